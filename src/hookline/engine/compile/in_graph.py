"""Capture values inside compiled code.

A graph holds tensors, and writes to plain attributes: no locks, no contexts, no lists that grow. So
inside it a tap keeps what it sees in an attribute, and the rest is done when the graph has run.
Nothing is read that differs between sites, or each would need a graph of its own.
"""

from __future__ import annotations

import functools
import types
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
        callback: all of it, where no code is compiled.
        inside: the half that compiled code does; what it returns is kept.
        after: the other half, on what was kept.
    """

    callback: Callback
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

    def capture(self, value: Any) -> Any:
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

    def capture(self, value: Any) -> Any:
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

    def capture(self, value: Any) -> Any:
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
