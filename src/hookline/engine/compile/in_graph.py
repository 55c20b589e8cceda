"""Capture values inside compiled code.

A graph holds tensors, and writes to plain attributes: no locks, no contexts, no lists that grow. So
inside it a tap keeps what it sees in an attribute, and the rest is done when the graph has run.
Nothing is read that differs between sites, or each would need a graph of its own.
"""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine.passes.passes import Pass, Switch
from hookline.engine.pytree import tree

Callback = Callable[[Pass, Any], Any]


class SplitCallback(NamedTuple):
    """A callback split for torch.compile: `inside` runs in the graph, `after` on its result.

    Args:
        see: all of it, where no code is compiled.
        inside: the half that compiled code does; what it returns is kept.
        after: the other half, on what was kept.
    """

    see: Callback
    inside: Callable[[Any], Any]
    after: Callback


class GraphCapture:
    """A capture at one site in compiled code, with the values that it holds.

    What code reads is guarded, at each site anew in each run, so each kind reads as little as it
    can, and nothing that sites share: that they share it would be guarded, too.

    Args:
        call: the call that is meant, if it is but one.

    Attributes:
        caught: what was kept, call by call, if anything was.
        n_before: how many calls there were in the pass before this run of the code.
    """

    __slots__ = ("call", "caught", "n_before")

    def __init__(self, call: int | None) -> None:
        self.call = call
        self.caught: tuple[Any, ...] | None = None
        self.n_before = 0

    def meet(self, value: Any) -> Any:
        """A value flows by, in a graph: keep a copy."""
        self.add(snapshot(value))

    def add(self, what: Any) -> None:
        """Keep something of a call."""
        self.caught = (what,) if self.caught is None else (*self.caught, what)

    def n_calls(self) -> int:
        """Count the calls of this run."""
        return 0 if self.caught is None else len(self.caught)

    def is_meant(self) -> bool:
        """Tell whether the present call is a wanted one."""
        return self.call is None or self.call == self.n_before + self.n_calls()

    def taken(self) -> tuple[Any, ...]:
        """Hand out what was kept, once."""
        caught, self.caught = self.caught, None
        return caught or ()


@final
class GraphReduce(GraphCapture):
    """Keeps what a function makes of a value.

    Args:
        inside: the function.
    """

    __slots__ = ("inside",)

    def __init__(self, call: int | None, inside: Callable[[Any], Any]) -> None:
        super().__init__(call)
        self.inside = inside

    def meet(self, value: Any) -> Any:
        """A value flows by: keep what the function makes of it."""
        self.add(self.inside(value))


@final
class GraphEdit(GraphCapture):
    """Changes a value, and keeps for each call whether it was one that is meant.

    Args:
        alter: changes it.
    """

    __slots__ = ("alter",)

    def __init__(self, call: int | None, alter: Callback) -> None:
        super().__init__(call)
        self.alter = alter

    def meet(self, value: Any) -> Any:
        """A value flows by: change it, if this is a call that is meant."""
        is_meant = self.is_meant()
        self.add(is_meant)
        return self.alter(NO_PASS, value) if is_meant else None


@final
class GraphGradient(GraphCapture):
    """Keeps what waits for its gradients.

    Args:
        number: the site's, as a tensor.
        switch: the line's, for the number of the run.
    """

    __slots__ = ("number", "switch")

    def __init__(self, call: int | None, number: Tensor, switch: Switch) -> None:
        super().__init__(call)
        self.number = number
        self.switch = switch


_runs: weakref.WeakValueDictionary[int, CompiledRun] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@final
class CompiledRun:
    """One run of compiled code, in a pass: what comes back from its graph later belongs to that.

    Args:
        current: the pass. It keeps the run, and is not kept by it. Of a checkpointed stretch that
            is computed again it is that of the first run, if gradients flow in the second only.
        is_again: whether a stretch is computed again.

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


def defaults_by_name(function: Callable[..., Any], n_given: int) -> Callable[..., Any]:
    """A user's function, called with its own defaults from then on.

    Compiled code of torch 2.11 takes two functions of the same code for one, whatever their
    defaults are: of `lambda value, k=k: value * k` in a loop it would use the first `k` for all.

    Args:
        function: the function.
        n_given: how many arguments it is called with, by position.
    """
    if not isinstance(function, types.FunctionType) or not function.__defaults__:
        return function
    code, given = function.__code__, function.__defaults__
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(names[-len(given) :], given, strict=True))
    named = names[max(n_given, code.co_posonlyargcount) :]
    mine = {name: defaults[name] for name in named if name in defaults}
    return functools.partial(function, **mine) if mine else function


def snapshot(value: Any) -> Any:
    """A value with its tensors copied: what is done to it in place later in the graph is not seen.

    In compiled code, versions tell nothing.
    """
    return tree.map_tensors(_copy, value)


def graph_snapshot(value: Any) -> Any:
    """A copy that gradients flow through."""
    return tree.map_tensors(torch.clone, value)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


NO_PASS = Pass(-1)  # for what changes a value inside compiled code: nothing may be noted there
