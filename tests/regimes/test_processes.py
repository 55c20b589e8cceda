"""Processes: a forked child goes on with a copy of the line, a spawned one gets no line at all."""

from __future__ import annotations

import multiprocessing
import operator
import os
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hookline as hl
from forked_children import child
from hookline.util import fork_safe_lock

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system"),
    pytest.mark.processes,
]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


@pytest.fixture
def x():
    return torch.ones(1, 2)


@pytest.mark.cell(
    "`os.fork` while hooks are attached", "record", "gradients", "edit", "edit gradients", "clip",
    note="The child process has a copy of the hooks, so edits apply there. What it records is"
    " missing from the parent's recording.",
)  # fmt: skip
def test_a_child_goes_on_alone_and_the_parents_line_is_untouched(model, x):
    plain = model(x)
    with (
        hl.record(model, "0", ports=("output", "grad_output")) as run,
        hl.edit(model, ["2", "2:grad_output"], lambda t: t * 2),
        hl.clip(model, "0", norm=0.5) as clip,
    ):
        model(x).sum().backward()

        def action():
            doubled = model(x)
            doubled.sum().backward()
            return len(run.passes), torch.equal(doubled, plain * 2), clip.report().seen

        before = run.passes[0]["0:grad_output"].clone()
        assert child(action) == (2, True, 4)
        assert (len(run.passes), clip.report().seen) == (1, 2)
        assert torch.equal(run["0:grad_output"], before)
        assert torch.equal(model(x), plain * 2)
    assert len(run.passes) == 2
    assert not len(hl.inventory(model))


@pytest.mark.cell("`os.fork` while hooks are attached", "raw hooks", "features", "watch")
def test_a_child_that_ends_its_lines_leaves_the_parents_hooks(model, x, capsys):
    seen = []
    line = hl.attach(model)
    line.forward("0", lambda m, args, output: seen.append(1))

    def action():
        hl.features(model, x, "0")
        with hl.watch(model):
            model(x)
        line.remove()
        model(x)
        return len(seen), len(hl.inventory(model))

    on = len(hl.inventory(model))
    assert child(action) == (2, 0)
    assert len(hl.inventory(model)) == on
    model(x)
    line.remove()
    assert seen == [1]
    capsys.readouterr()


class Forking(nn.Module):
    """Forks in the midst of its forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.between = lambda: None

    def forward(self, x):
        x = self.first(x)
        self.between()
        return self.second(x)


def test_a_fork_amid_a_forward_leaves_both_with_their_own_pass(x):
    model = Forking()
    with hl.record(model) as run:
        model.between = lambda: said.append(child(lambda: (model.second(x), list(run))[1]))
        said = []
        model(x)
    assert said == [["first", "second"]]  # its root has not returned there
    assert list(run) == ["(root)", "first", "second"]


@pytest.mark.cell("`os.fork` while another thread attaches hooks", "record", "raw hooks")
def test_a_lock_that_another_thread_held_is_free_in_the_child(model, x):
    held, done = threading.Event(), threading.Event()
    plain_lock = threading.RLock()

    def hold():
        for one in (plain_lock, *list(fork_safe_lock._locks)):
            one.acquire()
        held.set()
        done.wait()
        for one in (plain_lock, *list(fork_safe_lock._locks)):
            one.release()

    def action():
        with hl.record(model, "0") as run, hl.attach(hl.EVERYWHERE) as line:
            line.forward(nn.ReLU, lambda m, args, output: None)
            model(x)
        return plain_lock.acquire(blocking=False), len(run), line.report().fired[0][1]

    with hl.record(model, "0") as old:  # its own lock is held, too
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        assert child(lambda: (model(x), len(old.passes))[1]) == 1
        assert child(action) == (False, 1, 1)
        done.set()
        thread.join()
        model(x)


def test_a_lock_held_by_the_forking_thread_is_held_in_the_child():
    with fork_safe_lock.fork_safe_lock() as was_free:
        assert was_free
        assert child(lambda: [lock.acquire(blocking=False) for lock in fork_safe_lock._locks]) == [
            True for _ in fork_safe_lock._locks
        ]


class Encoded(Dataset):
    """A model inside a data set, as people do to encode what they load."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, k):
        with torch.no_grad():
            return self.model(torch.full((2,), float(k)))


@pytest.mark.cell(
    "forked workers of a DataLoader", "record", refused="HooklineWarning",
    note="What a worker records is missing from the recording of the main process. A"
    " `HooklineWarning` says so.",
)  # fmt: skip
@pytest.mark.cell("forked workers of a DataLoader", "edit")
def test_forked_workers_edit_and_keep_what_they_record(model):
    def load():
        workers = DataLoader(Encoded(model), batch_size=4, num_workers=1)
        return next(iter(workers))

    plain = load()
    with (
        pytest.warns(hl.HooklineWarning, match="the workers of a DataLoader"),
        hl.edit(model, "1", hl.edits.scale(0.0)),
    ):
        assert torch.equal(load(), model[2].bias.detach().expand(4, 1))
    with (
        pytest.warns(hl.HooklineWarning, match="the workers of a DataLoader"),
        hl.record(model, "0") as run,
    ):
        assert torch.equal(load(), plain)
    with pytest.raises(hl.NotRecordedError, match="has not run"):
        run["0"]
    with hl.record(model, "0") as run:
        next(iter(DataLoader(Encoded(model), batch_size=4)))  # no worker: seen
    assert len(run.passes) == 4


@pytest.mark.cell(
    "spawned processes",
    "record",
    "edit",
    note="The new process gets a copy of the model. Hooks do nothing on this copy.",
)
def test_a_spawned_process_gets_a_model_whose_hooks_are_inert(model, x):
    plain = model.requires_grad_(False)(x)
    context = multiprocessing.get_context("spawn")
    with (
        pytest.warns(hl.HooklineWarning, match="it does not see other processes"),
        hl.edit(model, "2", hl.edits.scale(0.0)),
        hl.record(model),
        context.Pool(1) as pool,
    ):
        there = pool.apply(operator.call, (model, x))
    assert torch.equal(there, plain)
