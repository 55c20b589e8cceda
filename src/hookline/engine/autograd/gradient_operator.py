"""Gradients inside compiled code, on their way out of the graph.

A hook on a tensor in a graph can run no Python of ours, but it can call an operator, and what the
operator does when the graph runs is Python again. The operator is defined when the first line needs
it: importing hookline changes nothing in torch.

Dynamo puts the call of `_put_hook` into the graph as it is. AOTAutograd runs it while it traces
forward and backward, on tensors with the autograd graph that eager code would have. So the hook is
put on a tensor there as in eager code: over all uses, in the same order, and before later writes.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.engine.autograd.written_views import HookedView, hook_value
from hookline.engine.pytree import outlines, tree
from hookline.engine.torch_private.autograd import is_of_trace
from hookline.engine.torch_private.dynamo import (
    at_end_of_graph,
    keep_call_in_graphs,
    keep_in_graphs,
    shares_outputs,
)
from hookline.errors import AttachError
from hookline.util.locks import fork_safe_lock

# By number, whoever waits. What a graph holds is a tensor with the number in it: another number
# needs no other graph.
_waiting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_defining = fork_safe_lock()


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


def define() -> None:
    """Define the operator. Idempotent, also where several threads need it first."""
    with _defining:
        _define()


@functools.cache
def _define() -> None:
    @torch.library.custom_op("hookline::gradient", mutates_args=())
    def gradient(grad: Tensor, tap: Tensor, of_run: Tensor, call: int, slot: int) -> None:
        waiting = _waiting.get(int(tap))
        if waiting is not None:
            # A copy: the graph may use the memory again.
            waiting.arrived_from_graph(int(of_run), call, slot, grad.clone())
        elif grad.dtype is torch.int64:  # no gradient: what is told where one is changed
            raise AttachError(ENDED.format(site="A gradient"))

    @gradient.register_fake
    def _(grad: Tensor, tap: Tensor, of_run: Tensor, call: int, slot: int) -> None:
        return None

    keep_in_graphs("hookline::gradient")
    keep_call_in_graphs(_put_hook)
    keep_call_in_graphs(_apart)


def hook_in_graph(tensor: Tensor, address: Address, owner: str, on: Any) -> None:
    """Hand a tensor's gradient out of the graph that is being compiled, or change it there.

    Dynamo traces the function that changes it as the backward of `_Change`, of which nothing else
    is used.

    Args:
        tensor: a tensor that was computed in the graph.
        address: who waits for its gradient.
        owner: says whose hook it is, as in `torch_private.autograd.hook_gradient`.
        on: says what is done with it: what `inside` returns, unless None, takes its place; it is
            handed out as it was if there is no such function, or a `before_inside`.
    """
    tap, of_run, call, slot = address
    if on.inside is None:
        _put_hook(tensor, tap, of_run, call, slot, owner, True, None)
        return
    is_handed_out = on.before_inside is not None
    given = _apart(tensor)
    changed = _Change.apply(given, on.inside)  # type: ignore[no-untyped-call]
    _put_hook(tensor, tap, of_run, call, slot, owner, is_handed_out, (given, changed))


# The tap's number, the run's, the call within the run, and the tensor within the value.
Address = tuple[Tensor, Tensor, int, int]

# A gradient that cannot be told from others has, in place of its call's number, one below zero.
LOST = -1


class _Change(torch.autograd.Function):
    """Holds a function of a gradient, as its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
        ctx.change = change
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        new = ctx.change(grads[0])
        return (grads[0] if new is None else new), None


def _apart(tensor: Tensor) -> Tensor:
    """A leaf like a tensor. What is computed from that may be held by the tensor's hooks: of what
    is computed from the tensor itself, which holds them, they would be freed never."""
    return tensor.detach().clone().requires_grad_()


def _put_hook(
    tensor: Tensor, tap: Tensor, of_run: Tensor, call: int, slot: int, owner: str,
    is_handed_out: bool, change: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """Put the hook on a tensor, while AOTAutograd traces; with backend="eager", in each run.

    `change` is what a function is traced between: its backward takes the gradient to the new one.
    """
    gradient = torch.ops.hookline.gradient

    def hook(grad: Tensor) -> Tensor | None:
        if change is not None:
            gradient(tap, tap, of_run, call, slot)  # told of it, where Python may refuse
        if is_handed_out:
            gradient(grad, tap, of_run, call, slot)
        if change is None:
            return None
        given, changed = change
        (new,) = torch.autograd.grad(changed, given, grad, retain_graph=True)
        return new

    def lost() -> None:
        gradient(tap, tap, of_run, LOST, slot)

    if shares_outputs():
        lost()
    elif tensor.requires_grad:
        view = hook_value(tensor, hook, lost, int(owner))
        # Held until then: of a base that is gone, the node of a write cannot be found.
        base = None if view is None else view.base()
        if view is None or at_end_of_graph(partial(_settle, view, base)):
            return tensor
        if not is_of_trace(tensor):
            _lane.untraced.append((view, base))
    return tensor


def _settle(view: HookedView, base: Tensor | None) -> None:
    view.settle(is_over=False)


class _Lane(threading.local):
    """Views that hooks were put on in graphs which a backend runs as they are, and their bases."""

    def __init__(self) -> None:
        self.untraced: list[tuple[HookedView, Tensor | None]] = []


_lane = _Lane()


def untraced_views() -> list[tuple[HookedView, Tensor | None]]:
    """Hand out the views of which it is not known yet who writes to them, with their bases."""
    found, _lane.untraced = _lane.untraced, []
    return found


def place_in(found: list[Tensor], tensor: Tensor) -> int:
    """Return the index of a tensor in a list; its length if it is not there."""
    for k, other in enumerate(found):
        if other is tensor:
            return k
    return len(found)


def emptied(tensor: Tensor) -> Tensor:
    """Return an empty tensor in place of one whose structure leaves a graph."""
    return tensor.detach().new_empty(0)


def outline(form: Any, slots: tuple[int, ...]) -> Any:
    """The outline of a structure of emptied tensors, by the slots of their gradients or -1."""
    numbers = {id(tensor): k for (_, tensor), k in zip(tree.tensors(form), slots, strict=True)}
    return outlines.outline(
        form, lambda tensor: None if numbers[id(tensor)] < 0 else numbers[id(tensor)]
    )
