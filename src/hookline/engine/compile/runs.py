"""The runs of compiled code: which taps see which pass, and what a run has left on them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.passes.passes import Pass, Switch

_runs: weakref.WeakValueDictionary[int, CompiledRun] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@final
class CompiledRun:
    """One run of compiled code, in a pass: what comes back from its graph later belongs to that.

    Args:
        current: the pass. It keeps the run, and is not kept by it. Of a checkpointed region that
            is computed again it is that of the first run, if gradients flow in the second only.
        is_again: whether a region is computed again.

    Attributes:
        number: the run's.
        n_before: by tap, how many calls there were in the pass before the run.
        pending: by tap and call, values whose gradients arrive in several parts.
    """

    __slots__ = ("__weakref__", "_current", "is_again", "n_before", "number", "pending")

    def __init__(self, current: Pass, *, is_again: bool = False) -> None:
        self.is_again = is_again
        self.number = next(_numbers)
        self._current = weakref.ref(current)
        self.n_before: dict[Any, int] = {}
        self.pending: dict[tuple[Any, int], Any] = {}
        _runs[self.number] = self
        current.opened.setdefault(_RUNS, []).append(self)

    @property
    def current(self) -> Pass | None:
        """The pass, if anybody still has it."""
        return self._current()

    def as_tensor(self) -> Tensor:
        """The number, as graphs take it: another tensor is no other graph."""
        return torch.tensor(self.number, device="cpu")


@final
class Calls(dict[Any, int]):
    """The number of calls of each tap in a pass, while compiled code runs.

    Between two pieces of compiled code there may be eager code that calls the same taps.

    Args:
        calls: what was counted before.
        settle: sees what compiled code has left so far; called before a number is read.
    """

    __slots__ = ("_settle",)

    def __init__(self, calls: dict[Any, int], settle: Callable[[], None]) -> None:
        super().__init__(calls)
        self._settle = settle

    def get(self, tap: Any, default: Any = None) -> Any:
        """The number of a tap's calls."""
        self._settle()
        return super().get(tap, default)

    def __setitem__(self, tap: Any, number: int) -> None:
        super().__setitem__(tap, number)
        if tap.traced is not None:
            tap.traced.n_before = number


@final
class _Note:
    """The log of a pass while compiled code runs."""

    __slots__ = ("before", "settle")

    def __init__(self, before: Callable[[Any], None], settle: Callable[[], None]) -> None:
        self.before = before
        self.settle = settle

    def __call__(self, entry: Any) -> None:
        self.settle()
        self.before(entry)


def flush_before_reads(current: Pass, settle: Callable[[], None]) -> None:
    """Between pieces of compiled code there may be eager ones: before something is counted or noted
    there, in a pass, see what compiled code has left."""
    if not isinstance(current.calls, Calls):
        current.calls = Calls(current.calls, settle)
        current.note = _Note(current.note, settle)


def stop_settling(current: Pass) -> None:
    """The compiled code that ran in a pass is over."""
    if isinstance(current.calls, Calls):
        current.calls = dict(current.calls)
    if isinstance(current.note, _Note):
        current.note = current.note.before


def run_of(number: int) -> CompiledRun | None:
    """The run with this number, if anybody still has its pass."""
    return _runs.get(number)


# Under which a pass keeps its runs.
_RUNS = object()


# The taps that compiled code is to see, and the pass that it runs in.
ActiveTaps = tuple[list[Any], Pass | None]


@final
@dataclass(slots=True, eq=False)
class CurrentRun:
    """Switches the taps of a line on for one run of compiled code after another.

    Args:
        switch: the line's, which compiled code reads.
    """

    switch: Switch
    _active: ActiveTaps = field(default=([], None), init=False)
    _run: CompiledRun | None = field(default=None, init=False)
    _of_one_call: list[Any] = field(default_factory=list, init=False)
    _has_gradients: bool = field(default=False, init=False)

    def add(self, taps: list[Any], *, has_gradients: bool) -> None:
        """Prepare to switch taps on."""
        self._of_one_call += [tap for tap in taps if tap.site.call is not None]
        self._has_gradients = self._has_gradients or has_gradients

    def drop(self, gone: set[int]) -> None:
        """Forget taps, by their ids."""
        self._of_one_call = [tap for tap in self._of_one_call if id(tap) not in gone]

    def end(self) -> None:
        """Switch all taps off, and forget them."""
        self.turn([], None)
        self._of_one_call = []

    def turn(self, taps: list[Any], current: Pass | None) -> ActiveTaps:
        """Have compiled code see these taps in this pass, and no others.

        What it has left on the taps before is seen first.

        Returns:
            The taps and the pass that it saw before.
        """
        before = self._active
        if before[1] is not None and before[1] is not current:
            stop_settling(before[1])
        try:
            self._settle(is_over=True)
        finally:
            self._active = taps, current
            self.switch.is_on = current is not None
            for tap in before[0]:
                tap.active = None
            for tap in taps:
                tap.active = tap.traced
        if current is not None:
            flush_before_reads(current, self._settle)
            self._begin(current)
        return before

    def _begin(self, current: Pass) -> None:
        again = current.recomputation
        first = current if again is None else again.pass_of_gradients()
        self._run = run = CompiledRun(first, is_again=again is not None)
        for tap in self._of_one_call:
            tap.before_run(current)
        if self._has_gradients:
            number = run.as_tensor()
            region = current.region
            self.switch.number = number if region is None else region.run_number(number)

    def _settle(self, *, is_over: bool = False) -> None:
        """See what compiled code has left so far. What it leaves from then on is another run's."""
        taps, current = self._active
        run, self._run = self._run, None  # what is seen here is not to be settled in turn
        if run is None or current is None:
            return
        is_new = False
        for tap in taps:
            if tap.traced is not None and tap.traced.caught is not None:
                tap.collect(current, run)
                is_new = True
        if is_new and not is_over:
            self._begin(current)
        else:
            self._run = run
