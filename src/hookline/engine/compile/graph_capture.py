"""Capture values inside compiled code.

A graph can hold tensors and write to plain attributes. It can hold no locks, no contexts and no
growing lists. So inside a graph a tap keeps its values in an attribute, and the remaining work is
done after the graph has run. The captures read nothing that differs between sites, or each site
would need a graph of its own.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.engine.passes.modes import (
    is_compiled_in_transform,
    unwrap_all_transforms,
    unwrap_ended_transforms,
)
from hookline.engine.passes.passes import Pass, Switch
from hookline.engine.pytree import tree
from hookline.engine.torch_private.dynamo import keep_call_in_graphs, run_at_trace_time

Callback = Callable[[Pass, Any], Any]


class SplitCallback(NamedTuple):
    """A callback split for torch.compile: `inside` runs in the graph, `after` on its result."""

    callback: Callback  # the whole callback, for code that is not compiled
    inside: Callable[[Any], Any]  # the half that runs in the graph; its result is kept
    after: Callback  # the other half, which runs on the kept result


class BlockwiseCallback(NamedTuple):
    """A callback that takes an attention pattern whole or in blocks of queries."""

    bound: Callback | SplitCallback


class GraphCapture:
    """A capture at one site in compiled code, with the values that it holds.

    Dynamo guards each attribute that the code reads, at each site and in each run. So each kind of
    capture reads as little as it can. This base class reads nothing that sites share, because the
    sharing would be guarded, too.

    Args:
        call: capture only this call; None captures every call.

    Attributes:
        captured: the captured values, one for each call; None before the first.
        n_before: the number of calls in the pass before this run of the code.
    """

    __slots__ = ("call", "captured", "n_before")

    def __init__(self, call: int | None) -> None:
        self.call: int | None = call
        self.captured: tuple[Any, ...] | None = None
        self.n_before: int = 0

    def capture(self, value: Any) -> Any:
        """Keep a copy of a value in a graph."""
        self.add_result(snapshot_detached(value))

    def add_result(self, result: Any) -> None:
        """Add a call's result to the captured values."""
        self.captured = (result,) if self.captured is None else (*self.captured, result)

    def n_calls(self) -> int:
        """Count the calls of this run."""
        return 0 if self.captured is None else len(self.captured)

    def should_capture(self) -> bool:
        """Tell whether the present call should be captured."""
        return self.call is None or self.call == self.n_before + self.n_calls()

    def clone_captured(self) -> None:
        """Copy the captured values, which lie in memory of a CUDA graph."""
        captured, self.captured = self.captured, None  # also if a tensor was overwritten already
        self.captured = tree.map_tensors(Tensor.clone, captured)

    def take_captured(self) -> tuple[Any, ...]:
        """Return the captured values and clear them."""
        captured, self.captured = self.captured, None
        return captured or ()


@final
class GraphReduce(GraphCapture):
    """A capture that keeps a function's result for each value."""

    __slots__ = ("inside",)

    def __init__(self, call: int | None, inside: Callable[[Any], Any]) -> None:
        super().__init__(call)
        self.inside: Callable[..., Any] = inside

    def capture(self, value: Any) -> Any:
        """Keep the function's result for a value."""
        self.add_result(self.inside(value))


@final
class GraphEdit(GraphCapture):
    """A capture that changes values, and keeps for each call whether the call was to be changed."""

    __slots__ = ("change",)

    def __init__(self, call: int | None, change: Callback) -> None:
        super().__init__(call)
        self.change: Callback = change

    def capture(self, value: Any) -> Any:
        """Change a value, if this call should be changed."""
        is_meant = self.should_capture()
        self.add_result(is_meant)
        return self.change(NO_PASS, value) if is_meant else None


@final
class GraphGradient(GraphCapture):
    """A capture of values whose gradients are pending.

    All sites share the switch. So each site after the first has one more guard, which compares two
    sites' switches. A copy of the run's number for each site would have more guards.

    Args:
        number: the site's number, as a tensor.
        switch: the line's switch, which holds the number of the run.
    """

    __slots__ = ("number", "switch")

    def __init__(self, call: int | None, number: Tensor, switch: Switch) -> None:
        super().__init__(call)
        self.number: Tensor = number
        self.switch: Switch = switch

    def clone_captured(self) -> None:
        """Leave the tensors as they are, because they get hooks."""


def bind_own_defaults(function: Callable[..., Any], n_positional: int) -> Callable[..., Any]:
    """Bind a user's function to its own defaults.

    Compiled code of torch 2.11 treats two functions of the same code as one, whatever their
    defaults are. For `lambda value, k=k: value * k` in a loop, it would use the first `k` for all.

    Args:
        n_positional: the number of positional arguments in each call.
    """
    if not isinstance(function, types.FunctionType) or not function.__defaults__:
        return function
    code, values = function.__code__, function.__defaults__
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(names[-len(values) :], values, strict=True))
    named = names[max(n_positional, code.co_posonlyargcount) :]
    named_defaults = {name: defaults[name] for name in named if name in defaults}
    return functools.partial(function, **named_defaults) if named_defaults else function


def snapshot_detached(value: Any) -> Any:
    """Copy the tensors of a value, so that later in-place operations in the graph do not show.

    In compiled code, a tensor's version does not tell whether it was written to.
    """
    return tree.map_tensors(_clone_detached, value)


def snapshot_with_graph(value: Any) -> Any:
    """Copy the tensors of a value with clones that gradients flow through."""
    return tree.map_tensors(_clone_with_graph, value)


def _clone_detached(tensor: Tensor) -> Tensor:
    if is_compiled_in_transform():
        _keep_unwrap_in_graphs()
        return _unwrap_transforms(tensor.detach().clone())
    return tensor.detach().clone()


def _clone_with_graph(tensor: Tensor) -> Tensor:
    if is_compiled_in_transform():
        _keep_unwrap_in_graphs()
        return _unwrap_transforms(tensor.clone())
    return tensor.clone()


@run_at_trace_time
def _keep_unwrap_in_graphs() -> None:
    keep_call_in_graphs(_unwrap_transforms)


def _unwrap_transforms(copied: Tensor) -> Tensor:
    """Remove the wrappers of transforms: no graph can return a wrapped tensor."""
    # Under torch.func.grad, the operations in `unwrap_ended_transforms` wrap their results again.
    return unwrap_all_transforms(
        unwrap_ended_transforms(copied, keeps_graph=True, also_running=True)
    )


NO_PASS = Pass(-1)  # the pass given to edits inside compiled code, which may note nothing
