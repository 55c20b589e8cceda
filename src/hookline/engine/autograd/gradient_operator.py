"""Get gradients out of compiled graphs, through an operator.

A hook on a tensor in a graph can run none of hookline's Python, but it can call an operator. When
the graph runs, the operator runs Python again. The operator is defined when the first line needs
it, since importing hookline changes nothing in torch.

Dynamo puts the call of `_hook_traced_tensor` into the graph as it is. AOTAutograd runs this call
while it traces forward and backward, on tensors with the autograd graph of eager code. So the hook
is put on the tensor as in eager code: over all uses, in the same order, and before later writes.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.engine.autograd.view_hooks import HookedView, hook_value_gradient
from hookline.engine.pytree import outlines, tree
from hookline.engine.torch_private.autograd import is_traced_tensor
from hookline.engine.torch_private.dynamo import (
    at_end_of_traced_forward,
    call_tensor_shares_memory,
    keep_call_in_graphs,
    keep_operator_in_graphs,
)
from hookline.engine.torch_private.graph.checkpoint import is_resaving_tensors
from hookline.engine.torch_private.graph.dispatch import jagged_from_parts, jagged_parts
from hookline.errors import AttachError
from hookline.util.fork_safe_lock import fork_safe_lock

# The receivers of gradients, by number. A graph holds the number as a tensor, so that a new number
# triggers no recompilation.
_waiting: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_defining = fork_safe_lock()


ENDED = (
    "{site} was to be changed, but its line ended before this backward ran, and the compiled code"
    " would change it all the same.\nCall backward() inside the block."
)


def register_receiver(receiver: Any) -> Tensor:
    """Return a number, as a tensor, under which `waiting.receive_from_graph` is called."""
    define_operators()
    number = next(_numbers)
    _waiting[number] = receiver
    return torch.tensor(number, device="cpu")


def define_operators() -> None:
    """Define the operator. Idempotent and thread-safe."""
    with _defining:
        _define_operators_once()


@functools.cache
def _define_operators_once() -> None:
    # Inductor takes the device of the first tensor, the CPU, for that of the operator. So it leaves
    # the operator out of CUDA graphs, whose replays would run no Python.
    @torch.library.custom_op("hookline::gradient", mutates_args=())
    def gradient(tap: Tensor, of_run: Tensor, call: int, slot: int, grad: Tensor) -> None:
        waiting = _waiting.get(int(tap))
        if waiting is not None:
            # A copy, because the graph may reuse the memory.
            waiting.receive_from_graph(int(of_run), call, slot, grad.clone())
        elif grad.dtype is torch.int64:  # not a gradient, but the notice that a gradient is changed
            raise AttachError(ENDED.format(site="A gradient"))

    # torch gives an operator of others no jagged tensors, only their parts.
    @torch.library.custom_op("hookline::jagged_gradient", mutates_args=())
    def jagged_gradient(
        tap: Tensor, of_run: Tensor, call: int, slot: int, parts: Sequence[Tensor], dim: int
    ) -> None:
        waiting = _waiting.get(int(tap))
        if waiting is not None:
            values, *offsets = parts
            grad = jagged_from_parts([values.clone(), *offsets], dim)
            waiting.receive_from_graph(int(of_run), call, slot, grad)

    for operator in (gradient, jagged_gradient):
        operator.register_fake(_do_nothing)
    for name in ("gradient", "jagged_gradient"):
        keep_operator_in_graphs(f"hookline::{name}")
    keep_call_in_graphs(_hook_traced_tensor)
    keep_call_in_graphs(_leaf_like)


def _do_nothing(*_: Any) -> None: ...


def hook_in_graph(tensor: Tensor, address: Address, owner: str, on: Any) -> None:
    """Pass a tensor's gradient out of the graph being compiled, or change the gradient there.

    Dynamo traces the function that changes the gradient as the backward of `_GradientChange`.
    Nothing else of `_GradientChange` is used.

    Args:
        tensor: a tensor that was computed in the graph.
        owner: the owner of the hook, as in `torch_private.autograd.hook_gradient`.
        on: the callback. A result of its `inside` other than None replaces the gradient. Without
            `inside`, or with `before_inside`, the unchanged gradient leaves the graph.
    """
    if on.inside is None:
        _hook_traced_tensor(tensor, address, owner, True, None)
        return
    leaf = _leaf_like(tensor)
    changed = _GradientChange.apply(leaf, on.inside)  # type: ignore[no-untyped-call]
    _hook_traced_tensor(tensor, address, owner, on.before_inside is not None, (leaf, changed))


# The numbers of the tap, the run, the call within the run, and the tensor within the value.
Address = tuple[Tensor, Tensor, int, int]

# The number in place of the call's for a gradient that cannot be told from others.
LOST = -1


class _GradientChange(torch.autograd.Function):
    """An autograd function that holds a function of a gradient as its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
        ctx.change = change
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        new = ctx.change(grads[0])
        return (grads[0] if new is None else new), None


def _leaf_like(tensor: Tensor) -> Tensor:
    """Make a leaf like a tensor, for computations that the tensor's hooks may hold.

    Results computed from the tensor itself hold the tensor, and with it the hooks. Hooks that held
    such results would never be freed.
    """
    return tensor.detach().clone().requires_grad_()


def _hook_traced_tensor(
    tensor: Tensor,
    address: Address,
    owner: str,
    is_handed_out: bool,
    change: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Register the hook on a tensor while AOTAutograd traces; with backend="eager", in each run.

    Args:
        change: the input and the output of the traced function that changes the gradient. The
            backward from the output to the input turns the gradient into the new one.
    """
    gradient, jagged = torch.ops.hookline.gradient, torch.ops.hookline.jagged_gradient
    tap, of_run, _, slot = address

    def hook(grad: Tensor) -> Tensor | None:
        if change is not None:
            # Announces the change, so that Python may refuse it.
            gradient(*address, tap)
        if is_handed_out and grad.layout is torch.jagged:
            jagged(*address, *jagged_parts(grad))
        elif is_handed_out:
            gradient(*address, grad)
        if change is None:
            return None
        leaf, changed = change
        (new,) = torch.autograd.grad(changed, leaf, grad, retain_graph=True)
        return new

    def lost() -> None:
        gradient(tap, of_run, LOST, slot, tap)

    if not is_traced_tensor(tensor) and is_resaving_tensors():
        return tensor  # a backend that runs the graph as it is: the first run has the hook
    if call_tensor_shares_memory():
        lost()
    elif tensor.requires_grad:
        view = hook_value_gradient(tensor, hook, lost, int(owner))
        settle = None if view is None else view.write_finder()
        if view is None or settle is None or at_end_of_traced_forward(settle):
            return tensor
        if not is_traced_tensor(tensor):
            _views.untraced.append((view, settle))
    return tensor


class _ThreadViews(threading.local):
    """Hooked views in graphs that a backend runs as they are, each with its `write_finder`."""

    def __init__(self) -> None:
        self.untraced: list[tuple[HookedView, Callable[[], None]]] = []


_views = _ThreadViews()


def settle_untraced_views() -> Iterator[HookedView]:
    """Settle the views of this thread whose writes are not known yet, and yield each once."""
    views, _views.untraced = _views.untraced, []
    for view, settle in views:
        settle()
        yield view


def index_or_length(tensors: list[Tensor], tensor: Tensor) -> int:
    """Return the index of a tensor in a list; its length if it is not there."""
    for index in range(len(tensors)):  # not enumerate: dynamo traces each step of it
        if tensors[index] is tensor:
            return index
    return len(tensors)


def empty_placeholder(tensor: Tensor) -> Tensor:
    """Return an empty tensor in place of one whose structure leaves a graph."""
    return tensor.detach().new_empty(0)


def outline_with_slots(form: Any, slots: Sequence[int | None]) -> Any:
    """Return the outline of a structure of emptied tensors, given their gradients' slots."""
    tensors = (id(tensor) for _, tensor in tree.tensors(form))
    numbers = dict(zip(tensors, slots, strict=True))
    return outlines.outline(form, lambda tensor: numbers[id(tensor)])
