"""Traced: what a tap does inside compiled code. Imports passes, tree.

A graph holds tensors, and writes to plain attributes: no locks, no contexts, no lists that grow. So
inside it a tap keeps what it sees in an attribute, and the rest is done when the graph has run.
Nothing is read that differs between sites, or each would need a graph of its own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine import tree
from hookline.engine.passes import Pass, Switch

See = Callable[[Pass, Any], Any]


class Halves(NamedTuple):
    """What is done with the values at a site, also in two halves.

    Args:
        see: all of it, where no code is compiled.
        inside: the half that compiled code does; what it returns is kept.
        after: the other half, on what was kept.
    """

    see: See
    inside: Callable[[Any], Any]
    after: See


@final
class Traced:
    """What compiled code does at one site, and what it has left there.

    Args:
        switch: the line's.
        alter: changes a value; None where values are only kept.
        inside: what is kept of a value.
        after: is given what was kept, when the graph has run.
        call: the call that is meant, if it is but one.

    Attributes:
        caught: what was kept, call by call.
        n_before: how many calls there were in the pass before this run of the code.
        number: the site's, as a tensor, if it is one of gradients.
    """

    __slots__ = ("after", "alter", "call", "caught", "inside", "n_before", "number", "switch")

    def __init__(
        self,
        switch: Switch,
        alter: See | None,
        inside: Callable[[Any], Any],
        after: See,
        call: int | None,
    ) -> None:
        self.switch = switch
        self.alter = alter
        self.inside = inside
        self.after = after
        self.call = call
        self.caught: tuple[Any, ...] = ()
        self.n_before = 0
        self.number: Tensor | None = None

    def meet(self, value: Any) -> Any:
        """A value flows by, in a graph."""
        if not self.switch.is_on:
            return None
        self.switch.has_caught = True
        if self.alter is None:
            self.caught = (*self.caught, self.inside(value))
            return None
        is_meant = self.is_meant()
        self.caught = (*self.caught, is_meant)
        return self.alter(NO_PASS, value) if is_meant else None

    def is_meant(self) -> bool:
        """Whether the present call is one of those that are wanted."""
        return self.call is None or self.call == self.n_before + len(self.caught)

    def taken(self) -> tuple[Any, ...]:
        """What was kept, handed out once."""
        caught, self.caught = self.caught, ()
        return caught


_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@final
class Run:
    """One run of compiled code, in a pass: what comes back from its graph later belongs to that.

    Args:
        current: the pass. It keeps the run, and is not kept by it. Of a checkpointed stretch that
            is computed again it is that of the first run, if gradients flow in the second only.
        is_again: whether a stretch is computed again.

    Attributes:
        number: the run's, as a tensor.
        n_before: by tap, how many calls there were in the pass before the run.
        crossings: by tap and call, values whose gradients arrive in several parts.
    """

    __slots__ = ("__weakref__", "_current", "crossings", "is_again", "n_before", "number")

    def __init__(self, current: Pass, *, is_again: bool = False) -> None:
        self.is_again = is_again
        number = next(_numbers)
        self._current = weakref.ref(current)
        self.number = torch.tensor(number, device="cpu")
        self.n_before: dict[Any, int] = {}
        self.crossings: dict[tuple[Any, int], Any] = {}
        _runs[number] = self
        current.opened.setdefault(_RUNS, []).append(self)

    @property
    def current(self) -> Pass | None:
        """The pass, if anybody still has it."""
        return self._current()


def run_of(number: Tensor) -> Run | None:
    """The run with this number, if anybody still has its pass."""
    return _runs.get(int(number))


# Under which a pass keeps its runs.
_RUNS = object()


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
