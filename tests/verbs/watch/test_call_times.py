"""call_times: times are the model's own. The clock is a fake: modules and hooks move its hand."""

from __future__ import annotations

import io
import re
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.util.stopwatch import Stopwatch
from hookline.verbs.watch.call_times import TimedCall
from movable_clock import moved_clock

hand = pytest.fixture(moved_clock)


class Work(nn.Module):
    """Takes some seconds."""

    def __init__(self, hand, seconds):
        super().__init__()
        self.hand, self.seconds = hand, seconds

    def forward(self, x):
        self.hand.seconds += self.seconds
        return x * x


class SlowFile(io.StringIO):
    """Takes a thousand seconds to write."""

    def __init__(self, hand):
        super().__init__()
        self.hand = hand

    def write(self, text):
        self.hand.seconds += 1000
        return super().write(text)


def times(printed):
    """The lines of the forward: depth, path and what stands for the time."""
    lines = [line for line in printed.getvalue().splitlines() if not line.startswith("<")]
    found = [re.match(r"( *)(\S+) .*?(?:  (~?[\d.]+ ms.*))?$", line) for line in lines]
    return [(len(m[1]) // 2, m[2], m[3]) for m in found]


def nested(hand):
    return nn.Sequential(Work(hand, 1), nn.Sequential(Work(hand, 2), Work(hand, 3)), Work(hand, 4))


NESTED = [
    (1, "0", "1000.000 ms"),
    (2, "1.0", "2000.000 ms"),
    (2, "1.1", "3000.000 ms"),
    (1, "1", "5000.000 ms"),
    (1, "2", "4000.000 ms"),
    (0, "(root)", "10000.000 ms"),
]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_times_hold_the_model_alone_and_not_the_printing(hand, needs_grad):
    model, file = nested(hand), SlowFile(hand)
    with hl.watch(model, file=file):
        for _ in range(2):
            model(torch.ones(2, requires_grad=needs_grad))
    assert times(file) == NESTED * 2


def test_the_time_of_earlier_and_later_lines_is_left_out(hand):
    model, files = nested(hand), [SlowFile(hand), SlowFile(hand)]

    both = ("output", "input")
    with (
        hl.record(model, ports=both, keep=hand.slowly),
        hl.watch(model, file=files[0]),
        hl.watch(model, "1.*", file=files[1]),
        hl.record(model, ports=both, keep=hand.slowly),
    ):
        model(torch.ones(2))
    assert times(files[0]) == NESTED
    assert times(files[1]) == [(0, *line[1:]) for line in NESTED[1:3]]


def test_hooks_of_others_and_edits_are_part_of_the_model(hand):
    model, file = nested(hand), SlowFile(hand)

    def slow(*_):
        hand.seconds += 7

    def change(value):
        slow()
        return value + 1

    model[1].register_forward_hook(slow)
    with hl.edit(model, "1", change), hl.watch(model, ["1", ""], file=file):
        handle = model[1].register_forward_hook(slow)
        model(torch.ones(2))
    handle.remove()
    # The last one comes after the line of `1` is printed.
    assert times(file) == [(1, "1", "19000.000 ms"), (0, "(root)", "31000.000 ms")]


class Retrying(nn.Module):
    """Runs itself again, smaller, where a part raises."""

    def __init__(self, hand):
        super().__init__()
        self.hand, self.part = hand, Work(hand, 1)
        self.fragile = Fragile(hand)

    def forward(self, x):
        try:
            return self.fragile(x)
        except ValueError:
            self.hand.seconds += 10
            return self.part(self(x[:1]))


class Fragile(Work):
    def __init__(self, hand):
        super().__init__(hand, 5)
        self.inner = Work(hand, 100)

    def forward(self, x):
        if len(self.inner(x)) > 1:
            raise ValueError
        return super().forward(x)


def test_a_raise_that_is_caught_leaves_depths_and_times_right(hand):
    model, file = Retrying(hand), SlowFile(hand)
    with hl.watch(model, file=file):
        model(torch.ones(2))
    assert times(file) == [
        (2, "fragile.inner", "100000.000 ms"),
        (3, "fragile.inner", "100000.000 ms"),  # in the root, which the root has called
        (2, "fragile", "105000.000 ms"),
        (1, "(root)", "105000.000 ms"),
        (1, "part", "1000.000 ms"),
        (0, "(root)", "216000.000 ms"),
    ]


class Recursive(Work):
    """Calls itself, and gives up half-way."""

    def forward(self, x):
        self.hand.seconds += self.seconds
        if len(x) == 1:
            raise ValueError
        try:
            self(x[1:])
        except ValueError:
            self.hand.seconds += 1
        return x * 1.0


def test_a_call_that_raised_within_its_module_is_told_apart(hand):
    model, file = nn.Sequential(Recursive(hand, 10)), SlowFile(hand)
    with hl.watch(model, file=file):
        model(torch.ones(3))
    assert times(file) == [
        (2, "0", "21000.000 ms"),
        (1, "0", "31000.000 ms"),
        (0, "(root)", "31000.000 ms"),
    ]


def test_an_interrupted_run_leaves_the_next_one_right(hand):
    model, file = nested(hand), SlowFile(hand)

    def interrupt(module, args):
        raise KeyboardInterrupt

    with hl.watch(model, file=file):
        handle = model[1][1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(2))
        handle.remove()
        model(torch.ones(2))
    assert times(file) == NESTED[:2] + NESTED


def test_a_hook_that_raises_between_first_and_last_hides_no_time(hand):
    model, file = nested(hand), SlowFile(hand)

    def refuse(tensor):
        raise ValueError("refused")

    with hl.record(model, "1.1", keep=refuse), hl.watch(model, file=file):
        with pytest.raises(ValueError, match="refused"):
            model(torch.ones(2))
        model[0](torch.ones(2))
    assert times(file)[-1] == (0, "0", "1000.000 ms")


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_is_printed_and_timed_once(hand, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nested(hand)

        def forward(self, x):
            y = checkpoint(self.body, x, use_reentrant=reentrant)
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True) if not reentrant else (y,)
            return y + grad

    model, file = Checkpointed(), SlowFile(hand)
    x = torch.ones(2, requires_grad=True)
    with hl.watch(model, ports="output", file=file):
        model(x).sum().backward()
    shown = times(file)
    assert [(depth - 1, path.removeprefix("body.")) for depth, path, _ in shown[:5]] == [
        (depth, path) for depth, path, _ in NESTED[:5]
    ]
    assert shown[5] == (1, "body", "10000.000 ms")
    # Without reentrance the second run belongs to the forward, which asked for gradients.
    assert shown[6] == (0, "(root)", "10000.000 ms" if reentrant else "20000.000 ms")
    assert len(shown) == 7


def test_each_thread_has_a_stopwatch_of_its_own(hand):
    stopwatch = Stopwatch(hand)
    reading = stopwatch.read()
    hand.seconds += 3
    found = []

    def other():
        stopwatch.resume_from(stopwatch.read() - 2)
        found.append(stopwatch.read())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [1.0]
    assert stopwatch.read() - reading == 3


def test_a_time_that_hooks_could_change_by_a_tenth_is_marked(hand):
    model = nn.Sequential(Work(hand, 0.002), nn.Sequential(*[Work(hand, 1e-6) for _ in range(3)]))
    file = SlowFile(hand)
    with hl.watch(model, file=file):
        model(torch.ones(2))
    shown = {path: took for _, path, took in times(file)}
    assert shown["0"] == "2.000 ms"
    assert shown["1.0"] == "~0.001 ms"
    assert shown["1"] == "~0.003 ms"
    assert shown["(root)"] == "2.003 ms"


def test_inputs_that_take_long_to_read_make_a_time_inexact(hand):
    model = nn.Sequential(Work(hand, 0.002))
    file = SlowFile(hand)
    with hl.watch(model, file=file):
        model(torch.ones(1_000))
        model(torch.ones(1_000_000))
    assert [took for _, path, took in times(file) if path == "0"] == ["2.000 ms", "~2.000 ms"]


def test_calls_that_are_not_watched_make_no_time_inexact():
    call = TimedCall(0, 0.0)
    call.seconds = 0.001
    assert call.is_exact
    call.n_calls = 5
    assert not call.is_exact


def test_work_of_an_accelerator_is_said_to_be_launched_only():
    class Away(nn.Module):
        def forward(self, x):
            return torch.empty(2, device="cuda")

    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.away, self.here = Away(), nn.Identity()

        def forward(self, x):
            self.away(x)
            return self.here(x)

    file = io.StringIO()
    with FakeTensorMode(), hl.watch(Back(), file=file) as line:
        line._model(torch.ones(2))
    away, here, root = times(file)
    assert away[2].endswith(" ms to launch")
    assert not here[2].endswith("launch")
    assert root[2].endswith(" ms to launch")


class Pair(nn.Sequential):
    """A container of one's own: torch 2.11 runs nn.Sequential with hooks in eager code."""

    def forward(self, x):
        return self[1](self[0](x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_container_with_a_compiled_part_has_no_time(hand):
    model = nn.Sequential(Pair(nn.Linear(2, 2), nn.ReLU()), Work(hand, 1))
    model[0].compile(backend="eager")
    file = SlowFile(hand)
    with hl.watch(model, ports="output", file=file):
        for _ in range(2):
            model(torch.ones(2))
    assert times(file) == [
        (2, "0.0", None), (2, "0.1", None), (1, "0", None), (1, "1", "1000.000 ms"),
        (0, "(root)", None),
    ] * 2  # fmt: skip


def test_a_copy_of_a_watched_model_is_not_timed(hand):
    model, file = nested(hand), SlowFile(hand)
    with hl.watch(model, file=file):
        copy = deepcopy(model)
        copy(torch.ones(2))
        assert not copy[0]._forward_hooks
        assert not copy[0]._forward_pre_hooks
        assert file.getvalue() == ""
        model(torch.ones(2))
    assert times(file) == NESTED
