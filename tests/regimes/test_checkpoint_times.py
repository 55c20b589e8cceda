"""Activation checkpointing: what happens between the first run and the second, and around them."""

from __future__ import annotations

import gc
import operator
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine.passes.passes import THREAD
from hookline.errors import AttachError, HooklineWarning
from second_thread import in_autograds_thread

anywhere = pytest.mark.parametrize("run_in", [operator.call, in_autograds_thread])
both = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.stem = nn.Linear(3, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
        self.head = nn.Linear(4, 2)

    def features(self, x):
        x = self.stem(x)
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)

    def forward(self, x):
        return self.head(self.features(x))


X = torch.linspace(-1, 1, 15).view(5, 3)


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.trap(15)
@both
def test_hooks_fire_once_where_raw_ones_fire_twice(reentrant):
    model, seen = Net(reentrant), []
    handle = model.block[0].register_forward_hook(lambda m, args, out: seen.append(out))
    with hl.record(model, "block.0", ports=("output", "grad_output")) as run:
        model(X).sum().backward()
    handle.remove()
    assert len(seen) == 2
    assert seen[0].requires_grad != reentrant
    assert run.passes[0].order == ["block.0", "block.0:grad_output"]
    assert torch.equal(run["block.0"], seen[0])


@pytest.mark.trap(16)
@both
def test_an_edit_gone_in_backward_is_refused_unlike_a_raw_hook(
    reentrant,
):
    plain, raw, model = Net(), Net(reentrant), Net(reentrant)
    for one in (plain, raw):
        handle = one.block[0].register_forward_hook(lambda m, args, out: out * 3)
        loss = one(X).sum()
        handle.remove()
        loss.backward()
    assert not torch.allclose(gradients(plain), gradients(raw))
    with hl.edit(model, "block.0", hl.edits.scale(3)):
        loss = model(X).sum()
    with pytest.raises(AttachError, match=r"block\.0 was changed .*\n?.*inside the block"):
        loss.backward()


@both
@anywhere
def test_lines_between_forward_and_backward_see_nothing(run_in, reentrant):
    plain, model = Net(), Net(reentrant)
    plain(X).sum().backward()
    loss = model(X).sum()
    line = hl.edit(model, "block.0", hl.edits.scale(3))
    ports = ("output", "grad_output")
    recorder = hl.record(model, ["block.*", "stem.weight:grad"], ports=ports)
    raw = hl.attach(model)
    raw.forward("block.0", lambda m, args, out: out * 0)
    raw.saved("block.2", lambda t: t * 0, lambda t: t)
    run_in(loss.backward)
    with pytest.warns(HooklineWarning, match="8 of 9 sites never fired"):
        recorder.remove()
    assert torch.equal(gradients(plain), gradients(model))
    assert [p.order for p in recorder.recording.passes] == [["stem.weight:grad"]]
    for one in (line, raw):
        with pytest.warns(HooklineWarning, match="saw nothing: the model did not run"):
            one.remove()


@both
def test_a_recording_line_may_end_between_forward_and_backward(reentrant):
    plain, model = Net(), Net(reentrant)
    plain(X).sum().backward()
    with hl.record(model, "block.*") as run:
        loss = model(X).sum()
    loss.backward()
    assert torch.equal(gradients(plain), gradients(model))
    assert len(run.passes) == 1
    assert len(run.passes[0]) == 4


@both
def test_a_gradient_edit_that_was_not_made_is_warned_of(reentrant):
    model = Net(reentrant)
    line = hl.edit(model, "block.0:grad_output", lambda g: g * 0)
    loss = model(X).sum()
    with pytest.warns(HooklineWarning, match="no gradient flowed back to it"):
        line.remove()
    with pytest.warns(HooklineWarning, match=r"block\.0:grad_output was to be changed, but its li"):
        loss.backward()


@both
def test_two_passes_before_one_backward_stay_apart(reentrant):
    def run_twice(model):
        with hl.record(model, "block.*", ports=("output", "grad_output", "grad_input")) as run:
            (model(X).sum() + model(-X).square().sum()).backward()
        return run

    plain, run = run_twice(Net()), run_twice(Net(reentrant))
    assert len(run.passes) == 2
    for one, other in zip(plain.passes, run.passes, strict=True):
        assert sorted(one.order) == sorted(other.order)
        assert all(torch.equal(one[key], other[key]) for key in one)


@both
def test_a_checkpointed_root_is_one_pass(reentrant):
    def run_whole(function, model):
        with (
            hl.record(model, None, ports=("output", "grad_output", "grad")) as run,
            hl.edit(model, "stem", hl.edits.noise(1.0, seed=1)) as line,
        ):
            function(model, X.clone().requires_grad_()).sum().backward()
        assert line.report().fired[0][1] == 1
        return run

    plain = run_whole(lambda model, x: model(x), Net())
    run = run_whole(lambda *a: checkpoint(*a, use_reentrant=reentrant), Net())
    assert len(run.passes) == 1
    assert all(torch.equal(plain[key], run[key]) for key, _ in plain.items())


@both
def test_two_runs_of_the_root_in_one_region_are_two_passes(reentrant):
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x)

    def run_both(function):
        torch.manual_seed(0)
        model = Same()
        with hl.record(model, "inner", ports=("output", "grad_output")) as run:
            function(lambda x: model(model(x)), X.clone().requires_grad_()).sum().backward()
        return run

    plain = run_both(lambda f, x: f(x))
    run = run_both(lambda f, x: checkpoint(f, x, use_reentrant=reentrant))
    assert len(plain.passes) == len(run.passes) == 2
    for one, other in zip(plain.passes, run.passes, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@both
def test_submodules_run_by_hand_are_gathered_once(reentrant):
    model = Net(reentrant)
    with hl.record(model, "block.*", ports=("output", "grad_output")) as run:
        model.features(X).sum().backward()
    assert len(run.passes) == 1
    assert len(run.passes[0].order) == 8


@both
@anywhere
def test_a_forward_in_a_users_backward_hook_is_a_pass_of_its_own(run_in, reentrant):
    model = Net(reentrant)
    other = []
    y = model(X)
    y.register_hook(torch.enable_grad()(lambda g: other.append(model(X * 2).sum())))
    with hl.record(model, "block.0") as run:
        run_in(y.sum().backward)
    assert len(run.passes) == 1
    assert torch.equal(run["block.0"], model.block[0](model.stem(X * 2)))

    y = model(X)
    y.register_hook(lambda g: other.append(model.head(torch.ones(4)).sum()))
    with hl.record(model, "head") as run:
        run_in(y.sum().backward)
    assert torch.equal(run["head"], model.head(torch.ones(4)))


@both
def test_a_backward_inside_the_forward_is_no_other_call(reentrant):
    class Penalised(Net):
        def forward(self, x):
            y = super().forward(x)
            y.sum().backward()
            return y

    model = Penalised(reentrant)
    with hl.record(model, "block.0", ports=("output", "grad_output")) as run:
        model(X)
    assert run.passes[0].order == ["block.0", "block.0:grad_output"]


@both
def test_a_backward_in_another_thread_is_made_with_the_edit(reentrant):
    plain, model = Net(), Net(reentrant)
    for one in (plain, model):
        with hl.edit(one, "block.0", hl.edits.scale(3)) as line, hl.record(one, "block.2") as run:
            thread = threading.Thread(target=one(X).sum().backward)
            thread.start()
            thread.join()
        assert line.report().fired[0][1] == len(run.passes) == 1
    assert torch.equal(gradients(plain), gradients(model))


@both
def test_nothing_is_left_of_a_line_or_a_stopped_second_run(reentrant):
    before = checkpointing._checkpoint_hook, dict(vars(checkpointing.CheckpointFunction))
    model = Net(reentrant)
    with hl.record(model, "block.*") as run, hl.record(model, "stem"):
        model(X).sum().backward()
        assert checkpointing._checkpoint_hook is not before[0]
        model(X)
    assert len(run.passes) == 2
    assert THREAD.checkpoints == ()
    assert THREAD.draws is None
    after = checkpointing._checkpoint_hook, dict(vars(checkpointing.CheckpointFunction))
    assert before == after


@both
def test_a_forward_that_raises_in_a_region_leaves_no_state(reentrant):
    model = Net(reentrant)

    def fail(module, args, output):
        raise ValueError("on purpose")

    handle = model.block[2].register_forward_hook(fail)
    with hl.record(model, "**", ports=("output", "grad_output")) as run:
        with pytest.raises(ValueError, match="on purpose"):
            model(X)
        handle.remove()
        model(X).sum().backward()
    assert [one.failed for one in run.passes] == [True, False]
    assert THREAD.checkpoints == ()
    assert len(run.passes[1]["block.0"]) == 5
    assert "block.0:grad_output" in run.passes[1]


@both
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_why_no_gradient_came_is_said(reentrant):
    model = Net(reentrant)
    line = hl.record(model, "block.0:grad_output")
    model(X)
    with pytest.warns(HooklineWarning, match="no gradient flowed back to it while the line lasted"):
        line.remove()
    model.stem.requires_grad_(False)
    model.block.requires_grad_(False)
    with torch.no_grad(), pytest.warns(HooklineWarning, match=r"under torch\.no_grad\(\)"):
        with hl.record(model, "block.0:grad_output"):
            model(X)


@both
@pytest.mark.parametrize("detach", [True, False])
def test_what_was_recorded_is_freed_with_recording_and_graph(reentrant, detach):
    model = Net(reentrant)
    gc.collect()
    gc.disable()
    try:
        with hl.record(model, "**", ports=("output", "grad_output"), detach=detach) as run:
            loss = model(X).sum()
            loss.backward()
        held = weakref.ref(run["block.0"]), weakref.ref(run["block.0:grad_output"])
        del run, loss
        if reentrant:
            gc.collect()  # torch's own graph goes no sooner
        assert [ref() for ref in held] == [None, None]
    finally:
        gc.enable()


@both
@anywhere
def test_hooks_on_everything_change_both_runs_and_count_once(run_in, reentrant):
    plain, model = Net(), Net(reentrant)
    grads = []
    for net in (plain, model):
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward(nn.Tanh, lambda m, args, out: out * 2)
            line.backward(nn.Sigmoid, lambda m, gi, go: grads.append((*gi, *go)))
            run_in(net(X).sum().backward)
        assert [count for _, count in line.report().fired] == [1, 1]
    assert len(grads) == 2
    assert all(map(torch.equal, *grads))
    assert torch.equal(gradients(plain), gradients(model))
