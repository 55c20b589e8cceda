"""profile: which module is charged, by a clock whose hand the modules move."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine import FakeModel
from hookline.util import stopwatch
from hookline.verbs.profile import costs_by_pass
from movable_clock import moved_clock
from second_thread import in_autograds_thread

hand = pytest.fixture(moved_clock)


class Timed(torch.autograd.Function):
    """Doubles; takes some seconds in forward, and others in backward."""

    @staticmethod
    def forward(ctx, x, hand, forward, backward):
        ctx.hand, ctx.backward_seconds = hand, backward
        hand.seconds += forward
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.hand.seconds += ctx.backward_seconds
        return grad * 2, None, None, None


class Work(nn.Module):
    def __init__(self, hand, forward, backward):
        super().__init__()
        self.hand, self.seconds = hand, (forward, backward)

    def forward(self, x):
        return Timed.apply(x, self.hand, *self.seconds)


class Around(nn.Sequential):
    """Works before, between and after its children."""

    def __init__(self, hand, *children):
        super().__init__(*children)
        self.hand = hand

    def forward(self, x):
        x = Timed.apply(x, self.hand, 0.5, 0.25)
        for child in self:
            x = Timed.apply(child(x), self.hand, 0.5, 0.25)
        return x


def model_of(hand):
    return nn.Sequential(Work(hand, 1, 10), Around(hand, Work(hand, 2, 20), Work(hand, 3, 30)))


def ones():
    return torch.ones(2, requires_grad=True)


def seconds(prof):
    """The seconds of each module: (with inner ones, alone) of forward and of backward."""
    return {
        row.path: (row.time.forward, row.self_time.forward, row.time.backward,
                   row.self_time.backward)
        for row in prof.rows
    }  # fmt: skip


EXPECTED = {
    "": (7.5, 0.0, 60.75, 0.0),
    "0": (1.0, 1.0, 10.0, 10.0),
    "1": (6.5, 1.5, 50.75, 0.75),
    "1.0": (2.0, 2.0, 20.0, 20.0),
    "1.1": (3.0, 3.0, 30.0, 30.0),
}


def test_each_module_has_its_time_in_forward_and_backward(hand):
    with hl.profile(model_of(hand)) as prof:
        prof._line.root(ones()).sum().backward()
    assert seconds(prof) == EXPECTED
    assert prof.total.time == (7.5, 60.75, 0.0)
    assert prof.total.seconds == 68.25
    assert prof[""].calls == prof["1.0"].calls == 1


def test_what_belongs_to_no_module_is_outside(hand):
    model = model_of(hand)
    parameter = nn.Parameter(torch.ones(2))
    model.register_parameter("scale", parameter)

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            hand.seconds += 1000
            return super().step(closure)

    optimizer = Slow([parameter], 0.1)
    others = Slow([nn.Parameter(torch.ones(1))], 0.1)
    with hl.profile(model) as prof:
        hand.seconds += 100
        x = Timed.apply(parameter, hand, 5, 7)  # before the model
        loss = Timed.apply(model(x), hand, 200, 300).sum()
        loss.backward()
        hand.seconds += 400
        optimizer.step()
        others.step()
    assert seconds(prof) == EXPECTED
    assert prof.total.optimizer == 1000
    assert prof.total.outside == 100 + 5 + 7 + 200 + 300 + 400 + 1000
    assert prof.total.seconds == 7.5 + 60.75 + 1000 + prof.total.outside


def test_a_closure_is_no_time_of_the_optimizer(hand):
    model = model_of(hand)
    model.register_parameter("scale", nn.Parameter(torch.ones(2)))

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            loss = closure()
            hand.seconds += 1000
            return loss

    optimizer = Slow([model.scale], 0.1)

    def closure():
        hand.seconds += 30
        loss = Timed.apply(model(ones()), hand, 200, 300).sum()
        loss.backward()
        hand.seconds += 400
        return loss

    with hl.profile(model) as prof:
        optimizer.step(closure)
    assert seconds(prof) == EXPECTED
    assert prof.total.optimizer == 1000
    assert prof.total.outside == 30 + 200 + 300 + 400


def test_the_work_of_other_lines_is_left_out(hand):
    model = model_of(hand)

    with (
        hl.record(model, ports=("output", "input"), keep=hand.slowly),
        hl.profile(model) as prof,
        hl.record(model, ports=("output", "input"), keep=hand.slowly),
    ):
        model(ones()).sum().backward()
    assert {path: one[:2] for path, one in seconds(prof).items()} == {
        path: one[:2] for path, one in EXPECTED.items()
    }
    assert prof.total.overhead > 5000


def test_what_other_lines_see_in_backward_is_left_out(hand):
    model = model_of(hand)

    ports = ("grad_output", "grad_input")
    with (
        hl.record(model, ports=ports, keep=hand.slowly),
        hl.profile(model) as prof,
        hl.record(model, ports=ports, keep=hand.slowly),
    ):
        model(ones()).sum().backward()
    assert seconds(prof) == EXPECTED
    assert prof.total.overhead >= 2 * 5 * 500


def test_an_edit_counts_for_the_model_that_it_changes(hand):
    model = model_of(hand)

    def slow(tensor):
        hand.seconds += 500
        return tensor * 1

    with hl.edit(model, ["0", "0:grad_output"], slow), hl.profile(model) as prof:
        model(ones()).sum().backward()
    assert prof["0"].time.forward == 501
    assert prof.total.time.backward == 560.75


class Slow:
    """A file that takes a thousand seconds to write to."""

    def __init__(self, hand):
        self.hand, self.text = hand, ""

    def write(self, text):
        self.hand.seconds += 1000
        self.text += text


def test_watch_prints_the_times_of_the_profile(hand):
    model, file = model_of(hand), Slow(hand)
    with hl.watch(model, ports="output", file=file), hl.profile(model) as prof:
        model(ones()).sum().backward()
    assert seconds(prof) == EXPECTED
    printed = {line.split()[0]: line.split("  ")[-1] for line in file.text.splitlines()}
    assert printed == {
        row.path or "(root)": f"{row.time.forward * 1e3:.3f} ms" for row in prof.rows
    }


def test_passes_add_up_and_a_mean_leaves_out_the_first(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        model[0].seconds = (100, 1000)
        model(ones()).sum().backward()
        model[0].seconds = (1, 10)
        model(ones()).sum().backward()
        model[0].seconds = (3, 30)
        model(ones()).sum().backward()
    assert prof["0"].time == (104, 1040, 0)
    assert prof["0"].calls == 3
    assert prof.first["0"].time == (100, 1000, 0)
    assert prof.per_pass["0"].time == (2, 20, 0)
    assert prof.per_pass["0"].calls == 1
    assert prof.per_pass.total.time == (8.5, 70.75, 0)
    assert prof.per_pass["1.1"].time == (3, 30, 0)


def timed_passes(hand, seconds, **options):
    """A profile of passes whose first module takes these seconds."""
    model = model_of(hand)
    with hl.profile(model, flops=False, **options) as prof:
        for number in seconds:
            model[0].seconds = (number, 10 * number)
            model(ones()).sum().backward()
    return prof


def test_one_slow_pass_does_not_change_the_median(hand):
    prof = timed_passes(hand, [9, 1, 1, 400, 1, 1])
    assert prof.per_pass["0"].time == (1, 10, 0)
    assert prof.per_pass["0"].spread == 0
    assert prof.first["0"].time == (9, 90, 0)
    assert prof["0"].time == (413, 4130, 0)
    assert prof.per_pass.total.passes == 5


def test_the_spread_is_the_interquartile_range(hand):
    prof = timed_passes(hand, [9, 1, 2, 3, 4, 5])
    row = prof.per_pass["0"]
    assert row.time == (3, 30, 0)
    assert row.spread == 11 * (4 - 2)
    assert prof.per_pass.total.spread == row.spread  # the others are the same in each pass
    assert prof.per_pass["1.0"].spread == 0
    text = str(prof.per_pass)
    assert "spread" in text.splitlines()[0]
    assert "66.7 %" in text
    assert "Each time is a median of its own" in text
    assert "spread" not in str(prof).splitlines()[0]
    assert "median" not in str(prof)


def test_passes_that_share_a_backward_share_its_time(hand):
    model = model_of(hand)
    with hl.profile(model, flops=False) as prof:
        for _ in range(4):
            (model(ones()) + model(ones())).sum().backward()
    assert prof.per_pass["0"].time == prof.first["0"].time == (1, 10, 0)
    assert prof["0"].time == (8, 80, 0)
    assert prof.per_pass.total.passes == 6
    with torch.no_grad(), hl.profile(model, flops=False) as prof:
        for _ in range(4):
            model(ones())
    assert prof.per_pass["0"].time == (1, 0, 0)
    assert prof.per_pass.total.passes == 3


def test_passes_without_a_backward_are_samples_of_their_own(hand):
    model = model_of(hand)
    with hl.profile(model, flops=False) as prof:
        for seconds in (9, 1, 1, 400):
            model[0].seconds = (seconds, 0)
            model(ones())
    assert prof.per_pass["0"].time == (1, 0, 0)


def test_failed_passes_are_in_no_median_and_no_count(hand):
    model = model_of(hand)

    def fail(value):
        raise ValueError("no")

    with hl.profile(model, flops=False) as prof:
        for number in range(7):
            if number % 3 == 2:
                hand.seconds += 5  # before the failed pass: of the one before
                with hl.edit(model, "1.0", fail), pytest.raises(ValueError, match="no"):
                    model(ones())
            else:
                model(ones()).sum().backward()
    assert prof["0"].time == (5, 50, 0)
    assert prof["0"].calls == prof.total.passes == 5
    assert prof.per_pass["0"].time == prof.first["0"].time == (1, 10, 0)
    assert prof.total.failed == 2 * (1 + 0.5 + 2)
    assert prof.total.outside == 10
    assert prof.total.seconds == 5 * 68.25 + prof.total.failed + 10
    text = str(prof)
    assert "Failed passes" in text
    assert "The forward raised in 2 passes: no module's time, FLOPs or calls contain that." in text


def test_a_failed_call_outside_the_root_fails_no_pass(hand):
    model = model_of(hand)
    with hl.profile(model, flops=False) as prof:
        model[0](ones())
        with pytest.raises(TypeError):
            model[1](None)
    assert prof["0"].calls == 1
    assert prof.total.failed == 0


def test_sums_of_a_long_run_are_whole(hand, monkeypatch):
    monkeypatch.setattr(costs_by_pass, "_MOST_NUMBERS", 1)
    monkeypatch.setattr(costs_by_pass, "_FEWEST", 3)
    prof = timed_passes(hand, range(1, 11))
    assert prof["0"].time == (55, 550, 0)
    assert prof["0"].calls == prof.total.passes == 10
    assert prof.per_pass.total.passes == 3
    assert prof.per_pass["0"].time.forward == 9


class Collects(nn.Module):
    """Works, and has Python collect garbage."""

    def __init__(self, hand):
        super().__init__()
        self.work = Work(hand, 1, 10)

    def forward(self, x):
        gc.collect()
        return self.work(x)


def test_garbage_collection_is_no_time_of_a_module(hand):
    model = nn.Sequential(Collects(hand), Work(hand, 2, 20))

    def collect_slowly(phase, info):
        hand.seconds += 500 * (phase == "start")

    before = list(gc.callbacks)
    with hl.profile(model, flops=False) as prof:
        gc.callbacks.append(collect_slowly)
        try:
            model(ones()).sum().backward()
            gc.collect()
            assert prof.total.overhead == 0
        finally:
            gc.callbacks.remove(collect_slowly)
    assert gc.callbacks == before
    assert gc.isenabled()
    assert prof["0"].time == (1, 10, 0)
    assert prof.total.outside == 0
    assert prof.total.garbage == 2 * 500
    assert prof.total.overhead == 0
    assert "Garbage collection" in str(prof)


def test_copies_of_inputs_take_no_time_of_collections(hand, monkeypatch):
    copied = FakeModel.copy_inputs

    def copied_slowly(*args):
        hand.seconds += 5
        gc.collect()
        return copied(*args)

    def collect_slowly(phase, info):
        hand.seconds += 500 * (phase == "start")

    monkeypatch.setattr(FakeModel, "copy_inputs", copied_slowly)
    model = model_of(hand)
    with hl.profile(model) as prof:
        gc.callbacks.append(collect_slowly)
        try:
            model(ones())
        finally:
            gc.callbacks.remove(collect_slowly)
    assert prof.total.overhead == 5
    assert prof.per_pass.total.overhead == 0  # copies are made once


def test_runs_of_a_part_of_the_model_are_told_to_be_one_pass(hand):
    model = model_of(hand)
    message = "itself was not called, only modules inside it .'1'., so all their runs are one pass"
    with pytest.warns(hl.HooklineWarning, match=message), hl.profile(model) as prof:
        for _ in range(3):
            model[1](ones())
    assert prof.per_pass["1"].calls == 3
    (note,) = prof.per_pass.notes
    assert "so all their runs are one pass. Give the module that is called" in note
    assert note in prof.table.to_dict()["notes"]
    assert "all their runs are one pass" in " ".join(str(prof.per_pass).split())


def test_a_profile_names_its_table_as_what_is_pickled():
    model = nn.Linear(2, 3)
    with hl.profile(model) as prof:
        model(torch.ones(4, 2))
    with pytest.raises(TypeError, match="its table if it is a profile"):
        pickle.dumps(prof)
    assert str(pickle.loads(pickle.dumps(prof.table))) == str(prof)


def test_a_profile_that_nobody_ends_leaves_no_callback():
    before = list(gc.callbacks)
    prof = hl.profile(nn.Linear(2, 2))
    assert len(gc.callbacks) == len(before) + 1
    with pytest.warns(hl.HooklineWarning, match="was dropped while its hooks were on"):
        del prof
        gc.collect()
    assert gc.callbacks == before


class Branches(nn.Module):
    """Two branches, of which the second is made before the first and joined after it."""

    def __init__(self, hand):
        super().__init__()
        self.hand, self.a, self.b = hand, Work(hand, 1, 10), Work(hand, 2, 20)

    def forward(self, x):
        side = Timed.apply(x, self.hand, 4, 40)
        x = self.a(x)
        late = Timed.apply(x, self.hand, 8, 80)
        return self.b(x) + side + late


def test_branches_are_told_apart_in_backward(hand):
    model = Branches(hand)
    with hl.profile(model) as prof:
        model(ones()).sum().backward()
    assert seconds(prof) == {
        "": (15.0, 12.0, 150.0, 120.0), "a": (1.0, 1.0, 10.0, 10.0), "b": (2.0, 2.0, 20.0, 20.0)
    }  # fmt: skip


class Shared(nn.Module):
    """Calls one module in two places, and itself."""

    def __init__(self, hand):
        super().__init__()
        self.hand, self.work = hand, Work(hand, 1, 10)
        self.inner = nn.Sequential(self.work)

    def forward(self, x, depth=1):
        x = self.inner(self.work(x))
        return self(x, depth - 1) if depth else x


def test_a_shared_and_recursive_module_is_counted_once(hand):
    with hl.profile(Shared(hand)) as prof:
        prof._line.root(ones()).sum().backward()
    assert prof["work"].calls == 4
    assert prof["inner"].calls == prof[""].calls == 2
    assert prof["work"].time == (4, 40, 0)
    assert prof["inner"].time == (2, 20, 0)
    assert prof[""].time == (4, 40, 0)
    assert prof["inner.0"] == prof["work"]


class Checkpointed(nn.Module):
    def __init__(self, hand, reentrant):
        super().__init__()
        self.reentrant, self.stem, self.body = reentrant, Work(hand, 1, 10), model_of(hand)

    def forward(self, x):
        return checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_has_a_column_of_its_own(hand, reentrant):
    model = Checkpointed(hand, reentrant)
    with hl.profile(model) as prof:
        for _ in range(2):
            model(ones()).sum().backward()
    # Nothing is saved here, so torch need not run the region again where it is not reentrant.
    again = {"": 7.5, "0": 1.0, "1": 6.5, "1.0": 2.0, "1.1": 3.0} if reentrant else {}
    for path, (forward, _, backward, alone) in EXPECTED.items():
        row = prof[f"body.{path}".rstrip(".")]
        assert row.time == (2 * forward, 2 * backward, 2 * again.get(path, 0.0))
        assert row.self_time.backward == 2 * alone
        assert row.calls == 2
    assert prof["stem"].time == (2, 20, 0)
    assert prof.total.time == (17, 141.5, 15 if reentrant else 0)


def test_a_recomputation_on_a_gpu_has_its_own_backward(hand):
    model = Checkpointed(hand, reentrant=True)
    with hl.profile(model) as prof:
        loss = model(ones()).sum()

        def backward():
            stopwatch.STOPWATCH._clock = hand  # each thread has its own
            loss.backward()

        in_autograds_thread(backward)
    for path, (forward, _, backward, _) in EXPECTED.items():
        row = prof[f"body.{path}".rstrip(".")]
        assert row.time == (forward, backward, forward)


class Saving(torch.autograd.Function):
    """As `Timed`, with a tensor that backward needs."""

    @staticmethod
    def forward(ctx, x, hand):
        ctx.hand = hand
        hand.seconds += 1
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        ctx.hand.seconds += 10
        return grad * 2, None


class Saves(nn.Module):
    def __init__(self, hand):
        super().__init__()
        self.hand = hand

    def forward(self, x):
        return Saving.apply(x, self.hand)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_the_midst_of_a_node_is_no_backward(hand, reentrant):
    model = Checkpointed(hand, reentrant)
    model.body = nn.Sequential(Saves(hand), nn.Sequential(Saves(hand)))
    with hl.profile(model) as prof:
        model(ones()).sum().backward()
    assert prof["body.0"].time == (1, 10, 1)
    assert prof["body.1.0"].time == (1, 10, 1)
    assert prof["body"].time == (2, 20, 2)
    assert prof["stem"].time == (1, 10, 0)
    assert prof["body.1"].calls == 1


def test_a_block_that_raises_keeps_what_ran(hand):
    class Fails(nn.Module):
        def forward(self, x):
            hand.seconds += 5
            raise torch.OutOfMemoryError("no room")

    model = nn.Sequential(Work(hand, 1, 10), nn.Sequential(Work(hand, 2, 20), Fails()))
    with pytest.raises(torch.OutOfMemoryError), hl.profile(model) as prof:
        model(ones())
    assert prof["1.1"].time.forward == 5
    assert prof["1"].time.forward == 7
    assert prof.failure == "in 1.1 (Fails), which got Tensor[2]: OutOfMemoryError: no room"
    assert "no room" in str(prof)


def test_a_backward_that_raises_names_the_module(hand):
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise torch.OutOfMemoryError("no room")

    class Fails(nn.Module):
        def forward(self, x):
            return Raising.apply(x)

    model = nn.Sequential(Work(hand, 1, 10), Fails(), Work(hand, 2, 20))
    with pytest.raises(torch.OutOfMemoryError), hl.profile(model) as prof:
        model(ones()).sum().backward()
    assert prof.failure == "in the backward of 1: OutOfMemoryError: no room"
    assert prof["2"].time == (2, 20, 0)


def test_a_backward_that_raised_is_not_charged_later(hand):
    model = nn.Sequential(Work(hand, 1, 10))
    with hl.profile(model) as prof:
        loss = model(ones()).sum()
        loss.register_hook(lambda grad: None)
        with pytest.raises(RuntimeError):
            loss.backward(gradient=torch.ones(3))
        hand.seconds += 100
        model(ones()).sum().backward()
    assert prof["0"].time == (2, 10, 0)
    assert prof.total.outside == 100


def test_a_module_that_raises_and_is_caught_keeps_times_right(hand):
    class Retries(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad = nn.Sequential(Work(hand, 1, 10), nn.Linear(3, 3))
            self.good = Work(hand, 2, 20)

        def forward(self, x):
            try:
                return self.bad(x)
            except RuntimeError:
                hand.seconds += 4
                return self.good(x)

    with hl.profile(Retries()) as prof:
        prof._line.root(ones()).sum().backward()
    assert prof[""].self_time == (4, 0, 0)
    assert prof["bad"].time == (1, 0, 0)
    assert prof["good"].time == (2, 20, 0)


def test_an_interrupted_run_leaves_the_next_one_right(hand):
    model = model_of(hand)

    def interrupt(module, args):
        raise KeyboardInterrupt

    with hl.profile(model) as prof:
        handle = model[1][1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ones())
        handle.remove()
        hand.seconds += 100
        model(ones()).sum().backward()
    assert prof.first["1.0"].time.forward == 2
    assert prof["0"].time == (1, 10, 0)
    assert prof["1.0"].time == (2, 20, 0)
    assert prof["1.1"].time == (3, 30, 0)
    assert prof.total.outside == 0
    assert prof.total.failed == 1 + 1 + 2 + 100  # with what came before the next pass


def test_calls_outside_the_root_are_rows_too(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        x = model[0](ones())
        model[1](x).sum().backward()
    found = seconds(prof)
    assert {path: found[path] for path in ("0", "1", "1.0")} == {
        path: EXPECTED[path] for path in ("0", "1", "1.0")
    }
    assert prof[""].calls == 0
    assert prof[""].time == (7.5, 60.75, 0)
    assert prof.total.time == (7.5, 60.75, 0)


def test_a_state_carried_from_pass_to_pass_keeps_its_owner(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        x = ones()
        for _ in range(3):
            x = model(x)
        x.sum().backward()
    assert {
        path: tuple(part / 3 for part in one) for path, one in seconds(prof).items()
    } == EXPECTED


def test_a_backward_in_another_thread_is_charged(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        loss = model(ones()).sum()

        def backward():
            stopwatch.STOPWATCH._clock = hand  # each thread has its own
            stopwatch.STOPWATCH.left_out = 17.0
            hand.seconds += 100
            loss.backward()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert seconds(prof) == EXPECTED
    assert prof.total.outside == 100


def test_each_thread_is_measured_only_if_asked_for():
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)

    def run():
        model(x).sum().backward()

    def in_thread():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    with hl.profile(model, every_thread=True) as prof:
        run()
        in_thread()
    assert prof["0"].calls == 2
    with hl.profile(model) as prof:
        run()
        in_thread()
    assert prof["0"].calls == 1
    with pytest.warns(hl.HooklineWarning, match="in another thread"), hl.profile(model) as prof:
        in_thread()
    assert prof["0"].calls == 0


def test_steps_of_optimizers_in_threads_add_up(hand):
    model = nn.Sequential(nn.Linear(2, 2))

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            # Without the step of SGD, which calls the hooks again if a test has made an SGD before.
            stopwatch.STOPWATCH._clock = hand  # each thread has its own
            stopwatch.STOPWATCH.left_out = 0.0

    slow = Slow(model.parameters(), 0.1)
    slow.register_step_pre_hook(lambda *_: setattr(hand, "seconds", hand.seconds + 50))

    def run():
        stopwatch.STOPWATCH._clock = hand
        stopwatch.STOPWATCH.left_out = 0.0
        model(torch.ones(1, 2)).sum().backward()
        slow.step()

    with hl.profile(model, every_thread=True) as prof:
        for _ in range(2):
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    assert prof.total.optimizer == 100


def test_two_tasks_have_profiles_of_their_own():
    models = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]

    async def one(model, n):
        with hl.profile(model) as prof:
            for _ in range(n):
                model(torch.ones(1, 2)).sum().backward()
                await asyncio.sleep(0)
        return prof

    async def both():
        return await asyncio.gather(one(models[0], 2), one(models[1], 3))

    first, second = asyncio.run(both())
    assert (first["0"].calls, second["0"].calls) == (2, 3)


def test_nested_profiles_measure_alike(hand):
    model = model_of(hand)
    with hl.profile(model) as outer, hl.profile(model) as inner:
        model(ones()).sum().backward()
    assert seconds(inner) == EXPECTED
    found = seconds(outer)
    assert {path: one[:2] for path, one in found.items()} == {
        path: one[:2] for path, one in EXPECTED.items()
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
def test_nothing_is_left_behind_and_no_bit_changes(net, image, left_as_found):
    expected = net(image)
    torch.manual_seed(3)
    before, after = left_as_found(net), torch.rand(3)
    torch.manual_seed(3)
    with hl.profile(net) as prof:
        output = net(image)
        output.sum().backward()
    str(prof)
    assert torch.equal(output, expected)
    assert left_as_found(net) == before
    assert torch.equal(torch.rand(3), after)
    with pytest.raises(ZeroDivisionError), hl.profile(net):
        net(image)
        1 / 0  # noqa: B018
    hl.profile(net).remove()
    torch.manual_seed(3)
    assert left_as_found(net) == before
    optimizers = sys.modules["torch.optim.optimizer"]
    assert not optimizers._global_optimizer_pre_hooks
    assert not optimizers._global_optimizer_post_hooks


def test_gradients_are_those_without_a_profile(net, image):
    net(image).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    with hl.profile(net):
        net(image).square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(net.parameters(), expected, strict=True))


def test_a_profile_ended_before_backward_does_nothing_then(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        loss = model(ones()).sum()
    loss.backward()
    assert prof.total.time == (7.5, 0, 0)
    assert prof["0"].flops.backward == 0


def test_a_profile_does_not_keep_its_model_alive():
    model = nn.Sequential(nn.Linear(2, 2))
    ref, weight = weakref.ref(model), weakref.ref(model[0].weight)
    with hl.profile(model) as prof:
        model(torch.ones(1, 2)).sum().backward()
    str(prof)
    del model
    gc.collect()
    assert ref() is None
    assert weight() is None
    assert prof["0"].flops.forward == 8


def test_no_pass_is_said():
    model = nn.Linear(2, 2)
    with pytest.warns(hl.HooklineWarning, match=r"got none\.\nRun the forward inside") as caught:
        with hl.profile(model) as prof:
            pass
    assert caught[0].filename == __file__
    assert prof.total.passes == 0
    assert "0 passes" in str(prof)


@pytest.mark.parametrize("given", [lambda x: x, None, "model"])
def test_what_is_not_a_model_is_refused(given):
    with pytest.raises(hl.AttachError, match=r"hl.profile must be given a model .*, got "):
        hl.profile(given)


@pytest.mark.slow
def test_a_copy_of_a_profiled_model_is_not_measured(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        copy = deepcopy(model)
        copy(ones())
        assert not copy[0]._forward_hooks
        model(ones())
    assert prof["0"].calls == 1


def test_a_frozen_part_has_no_backward():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with hl.profile(model) as prof:
        model(torch.ones(1, 2)).sum().backward()
    assert prof["0"].time.backward == 0
    assert prof["1"].time.backward > 0
    assert prof["0"].flops.backward == 0
    assert prof["1"].flops.backward == 8


def test_a_second_backward_over_one_graph_adds_up(hand):
    model = model_of(hand)
    with hl.profile(model) as prof:
        loss = model(ones()).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert prof["1.1"].time == (3, 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(4))
@pytest.mark.filterwarnings("ignore::hookline.HooklineWarning")
def test_ctrl_c_while_it_attaches_leaves_nothing(interrupted, left_as_found, first):
    model = nn.Sequential(nn.Linear(2, 2))
    before = left_as_found(model)
    optimizers = sys.modules["torch.optim.optimizer"]
    for step in range(1 + first, 4000, 4 * 4):
        done = not interrupted(step, "hookline.", lambda: hl.profile(model).remove())
        gc.collect()
        assert left_as_found(model) == before, step
        assert not optimizers._global_optimizer_pre_hooks
        assert not optimizers._global_optimizer_post_hooks
        if done:
            break
    else:
        raise AssertionError("it never got to the end")


@pytest.mark.processes
def test_a_profile_at_the_end_of_a_program_says_nothing():
    program = (
        "import torch, hookline as hl\n"
        "model = torch.nn.Linear(4, 4)\n"
        "with hl.profile(model) as prof:\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "print(prof.total.flops.all > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
