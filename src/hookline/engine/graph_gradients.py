"""Gradients inside compiled code, on their way out of the graph. Imports tree, errors,
compile_internals.

A hook on a tensor in a graph can run no Python of ours, but it can call an operator, and what the
operator does when the graph runs is Python again. The operator is defined when the first line needs
it: importing hookline changes nothing in torch.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hookline.engine import outlines, tree
from hookline.engine.compile_internals import keep_in_graphs
from hookline.engine.errors import AttachError

# By number, whoever waits. What a graph holds is a tensor with the number in it: another number
# needs no other graph.
_waiting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


ENDED = (
    "{site} was to be changed, but its line ended before this backward ran, and the compiled code"
    " would change it all the same.\nCall backward() inside the block."
)


def number_of(waiting: Any) -> Tensor:
    """A number, as a tensor, under which `waiting.arrived_from_graph` is called."""
    define()
    number = next(_numbers)
    _waiting[number] = waiting
    return torch.tensor(number, device="cpu")


@functools.cache
def define() -> None:
    """Define the operator."""

    @torch.library.custom_op("hookline::gradient", mutates_args=())
    def gradient(grad: Tensor, of: Tensor, call: int, slot: int) -> None:
        tap, run = of.tolist()
        waiting = _waiting.get(tap)
        if waiting is not None:
            # A copy: the graph may use the memory again.
            waiting.arrived_from_graph(run, call, slot, grad.clone())
        elif grad.dtype is torch.int64:  # no gradient: what is told where one is changed
            raise AttachError(ENDED.format(site="A gradient"))

    @gradient.register_fake
    def _(grad: Tensor, of: Tensor, call: int, slot: int) -> None:
        return None

    keep_in_graphs("hookline::gradient")


def sender(
    tap: Tensor, of_run: Tensor, call: int, slot: int, on: Any
) -> Callable[[Tensor], Tensor | None]:
    """The hook on a tensor in a graph: hand its gradient out, or change it, or both.

    Torch 2.11 moves what a hook takes from outside to behind the tensor, an input of the graph
    that other hooks take as well too: then the graph is broken. What is in a list it does not move.
    """
    of = torch.stack([tap, of_run])
    change, is_handed_out = on.inside, on.inside is None or on.before_inside is not None

    def hook(grad: Tensor) -> Tensor | None:
        if change is not None:
            torch.ops.hookline.gradient(of, of, call, slot)
        if is_handed_out:
            torch.ops.hookline.gradient(grad, of, call, slot)
        if change is None:
            return None
        new: Tensor | None = change(grad)
        return new

    return hook


def place_in(found: list[Tensor], tensor: Tensor) -> int:
    """Where a tensor stands in a list; its length if it does not."""
    for k, other in enumerate(found):
        if other is tensor:
            return k
    return len(found)


def emptied(tensor: Tensor) -> Tensor:
    """What stands for a tensor in a structure that leaves a graph: it holds nothing."""
    return tensor.detach().new_empty(0)


def outline(form: Any, slots: tuple[int, ...]) -> Any:
    """The outline of a structure of emptied tensors, by the slots of their gradients or -1."""
    numbers = {id(tensor): k for (_, tensor), k in zip(tree.tensors(form), slots, strict=True)}
    return outlines.outline(
        form, lambda tensor: None if numbers[id(tensor)] < 0 else numbers[id(tensor)]
    )
