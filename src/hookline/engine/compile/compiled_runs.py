"""The runs of compiled code: the taps and the pass of each run, and the values it has left."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.passes.passes import Pass, Switch
from hookline.engine.torch_private.graph.compiler_state import may_use_cudagraph_memory

_runs: weakref.WeakValueDictionary[int, CompiledRun] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@final
class CompiledRun:
    """One run of compiled code in a pass.

    Gradients that the run's graph returns later belong to this pass.

    Args:
        current: the pass. The pass holds the run, and the run refers to the pass weakly. In a
            recomputation this is the pass of the first run, if gradients flow in the second only.
        is_again: whether this is the recomputation of a checkpointed region.

    Attributes:
        current: returns the pass; None if it has been freed.
        number: the number of the run.
        n_before: the number of calls in the pass before the run, by tap.
        pending: values whose gradients arrive in several parts, by tap and call.
    """

    __slots__ = ("__weakref__", "current", "is_again", "n_before", "number", "pending")

    def __init__(self, current: Pass, *, is_again: bool = False) -> None:
        self.is_again: bool = is_again
        self.number: int = next(_numbers)
        self.current: Callable[[], Pass | None] = weakref.ref(current)
        self.n_before: dict[Any, int] = {}
        self.pending: dict[tuple[Any, int], Any] = {}
        _runs[self.number] = self
        current.opened.setdefault(_RUNS, []).append(self)

    def as_tensor(self) -> Tensor:
        """Return the number as a tensor: a graph is not recompiled for a new tensor."""
        return torch.tensor(self.number, device="cpu")


@final
class CollectingCallCounts(dict[Any, int]):
    """The number of calls of each tap in a pass, while compiled code runs.

    Eager code between two pieces of compiled code may call the same taps.

    Args:
        calls: the counts so far.
        settle: collects the values left by compiled code; called before a count is read.
    """

    __slots__ = ("_collect_values",)

    def __init__(self, calls: dict[Any, int], settle: Callable[[], None]) -> None:
        super().__init__(calls)
        self._collect_values = settle

    def get(self, tap: Any, default: Any = None) -> Any:
        """Return the number of a tap's calls."""
        self._collect_values()
        return super().get(tap, default)

    def __setitem__(self, tap: Any, number: int) -> None:
        super().__setitem__(tap, number)
        if tap.traced is not None:
            tap.traced.n_before = number


@final
@dataclass(slots=True, eq=False)
class _CollectingLogger:
    """The `log_entry` of a pass while compiled code runs: that code's values are logged first."""

    before: Callable[[Any], None]
    settle: Callable[[], None]

    def __call__(self, entry: Any) -> None:
        self.settle()
        self.before(entry)


def collect_before_reads(current: Pass, settle: Callable[[], None]) -> None:
    """Have the values of compiled code collected before eager code counts or logs in a pass.

    Eager code may run between two pieces of compiled code.
    """
    if not isinstance(current.calls, CollectingCallCounts):
        current.calls = CollectingCallCounts(current.calls, settle)
        current.log_entry = _CollectingLogger(current.log_entry, settle)


def stop_collecting(current: Pass) -> None:
    """Restore a pass's counts and log, after its compiled code has ended."""
    if isinstance(current.calls, CollectingCallCounts):
        current.calls = dict(current.calls)
    if isinstance(current.log_entry, _CollectingLogger):
        current.log_entry = current.log_entry.before


def compiled_run(number: int) -> CompiledRun | None:
    """Return the run with this number; None if its pass has been freed."""
    return _runs.get(number)


# The key in `Pass.opened` of a pass's runs.
_RUNS = object()


# The taps that compiled code uses, and the pass that the code runs in.
ActiveTaps = tuple[list[Any], Pass | None]


@final
@dataclass(slots=True, eq=False)
class CurrentRun:
    """The switch that turns a line's taps on for one run of compiled code after another."""

    switch: Switch  # the line's switch, which compiled code reads
    _active: ActiveTaps = field(default=([], None), init=False)
    _run: CompiledRun | None = field(default=None, init=False)
    _of_one_call: list[Any] = field(default_factory=list, init=False)
    _has_gradients: bool = field(default=False, init=False)

    def add_taps(self, taps: list[Any], *, has_gradients: bool) -> None:
        """Add taps that may be switched on."""
        self._of_one_call += [tap for tap in taps if tap.site.call is not None]
        self._has_gradients = self._has_gradients or has_gradients

    def drop_taps(self, dropped_ids: set[int]) -> None:
        """Forget taps, by their ids."""
        self._of_one_call = [tap for tap in self._of_one_call if id(tap) not in dropped_ids]

    def end(self) -> None:
        """Switch all taps off and forget them."""
        self.switch_taps([], None)
        self._of_one_call = []

    def switch_taps(self, taps: list[Any], current: Pass | None) -> ActiveTaps:
        """Let compiled code use these taps in this pass, and no other taps.

        The values that earlier code has left on the taps are collected first.

        Returns:
            The taps and the pass that compiled code used before.
        """
        before = self._active
        if before[1] is not None and before[1] is not current:
            stop_collecting(before[1])
        try:
            self._collect_values(is_over=True)
        finally:
            self._active = taps, current
            self.switch.is_on = current is not None
            for tap in before[0]:
                tap.active = None
            for tap in taps:
                tap.active = tap.traced
        if current is not None:
            collect_before_reads(current, self._collect_values)
            self._begin_run(current)
        return before

    def _begin_run(self, current: Pass) -> None:
        again = current.recomputation
        first = current if again is None else again.gradient_pass()
        self._run = run = CompiledRun(first, is_again=again is not None)
        for tap in self._of_one_call:
            tap.count_earlier_calls(current)
        if self._has_gradients:
            number = run.as_tensor()
            region = current.region
            self.switch.number = number if region is None else region.number_compiled_run(number)

    def _collect_values(self, *, is_over: bool = False) -> None:
        """Collect the values left by compiled code so far; later values belong to another run."""
        taps, current = self._active
        run, self._run = self._run, None  # the callbacks called here must not collect again
        if run is None or current is None:
            return
        is_new, must_own = False, may_use_cudagraph_memory()
        for tap in taps:
            if tap.traced is not None and tap.traced.captured is not None:
                if must_own:
                    tap.traced.clone_captured()
                tap.collect(current, run)
                is_new = True
        if is_new and not is_over:
            self._begin_run(current)
        else:
            self._run = run
