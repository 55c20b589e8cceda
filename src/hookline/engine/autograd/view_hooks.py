"""Hooks on the gradient of a value as it is now, whatever is done to the value later.

Before an in-place operation, a tensor hook stays with the old value, as it should. On a view it
does not: a view loses its hooks with its place in the graph. (`linear` of a batch of sequences
returns a view, and so does `flatten`.) The old value's gradient is then part of the gradient of the
view's base.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.torch_private.autograd import (
    at_end_of_backward,
    backward_number,
    base_in_graph,
    holds_base_alone,
    hook_gradient,
    hook_node,
    node_of_write,
    unhook_gradient,
    version_counter,
)
from hookline.engine.torch_private.hooks import tensor_hooks
from hookline.engine.torch_private.modes import is_legacy_batched
from hookline.util.fork_safe_lock import fork_safe_lock

Hook = Callable[[Tensor], Any]

# Held while hooks on a base change: a tensor that several threads give to a model is one base.
_lock = fork_safe_lock()


class GradHook(partial[Any]):
    """A hook on a tensor of the graph; pickling the tensor drops it, without torch's warning."""

    __slots__ = ()
    __torch_unserializable__ = True


@final
class _ViewGradients:
    """The gradients of a view and of its base, by the run of autograd.

    Attributes:
        totals: the base's gradient before any of its views changed the gradient; shared by all
            views of the base.
    """

    __slots__ = ("_base_layout", "_shares", "_view_layout", "totals")

    def __init__(self, view: Tensor, base: Tensor) -> None:
        offset = view.storage_offset() - base.storage_offset()
        self._base_layout = base.size(), base.stride()
        self._view_layout = view.size(), view.stride(), offset
        self._shares: dict[int, Tensor] = {}
        self.totals: dict[int, Tensor] = {}

    def add(self, grad: Tensor) -> None:
        """Add a gradient that arrived at the view."""
        run = backward_number()
        share = self._shares.get(run)
        self._shares[run] = grad if share is None else share + grad

    def add_from_base(self, grad: Tensor) -> None:
        """Add the view's part of a gradient that arrived at the base."""
        self.add(self._view_part(self._in_base_layout(grad)).clone())

    def finish_run(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Close the run with the base's gradient.

        Returns:
            The gradient in the base's layout; the view's part of the gradient before any view
            changed it; and the share of this part that arrived at the view, None if no gradient
            did.
        """
        run = backward_number()
        whole = self._in_base_layout(grad)
        if run not in self.totals:
            self.totals[run] = whole
            at_end_of_backward(self.totals.clear)
        return whole, self._view_part(self.totals[run]), self._shares.pop(run, None)

    def call_hook(self, whole: Tensor, total: Tensor, share: Tensor, hook: Hook) -> Tensor | None:
        """Call a hook with the view's share. Return the base's gradient with the hook's result."""
        now = self._view_part(whole)
        # Where the share is the whole gradient, nothing is subtracted: inf - inf would be NaN.
        is_all = total == share
        rest = total - share
        new = hook(torch.where(is_all, now, now - rest))
        if new is None:
            return None
        whole = whole.clone()
        self._view_part(whole).copy_(torch.where(is_all, new, new + rest))
        return whole

    def _in_base_layout(self, grad: Tensor) -> Tensor:
        # The view's strides refer to the base's memory; a gradient may have another layout.
        return grad.new_empty_strided(*self._base_layout).copy_(grad)

    def _view_part(self, whole: Tensor) -> Tensor:
        return whole.as_strided(*self._view_layout)


@final
class HookedView:
    """A hook on a view, and on its base in case the view is written to.

    The gradient of uses before the write arrives at the view. The gradient of later uses arrives at
    the node of the write. `find_write` looks this node up, before the backward. Both gradients are
    complete when the base's own gradient is complete, and are part of it.

    Without the node of the write, the base's gradient is the view's if only the view holds the
    base. Otherwise the gradient cannot be told. A node that is found during a backward may have run
    before.

    Args:
        tensor: the view, which is not held.
        base: the tensor of the graph whose memory the view shares.
        hook: called with the gradient; a result other than None replaces the gradient.
        lost: called in backward if the gradient cannot be told.
        is_alone: whether only the view holds the base.
    """

    __slots__ = (
        "__weakref__", "_base", "_counter", "_gradients", "_has_node", "_hook", "_is_alone",
        "_is_settled", "_key", "_lost", "_node_found_in", "_version", "_write_ran",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, base: Tensor, hook: Hook, lost: Callable[[], None], *, is_alone: bool
    ) -> None:
        self._hook = hook
        self._lost = lost
        self._is_alone = is_alone
        self._counter = version_counter(tensor)
        self._version = self._counter._version
        self._is_settled = self._has_node = self._write_ran = False
        self._node_found_in = -1  # the run of autograd in which the node of the write was found
        self._base = weakref.ref(base)
        self._key: Any = None
        self._gradients = _ViewGradients(tensor, base)

    def hook_base(
        self, base: Tensor, owner: int, trace_order: int | None, *, is_last: bool = False
    ) -> None:
        """Register a hook on the base, in case the view is written to."""
        with _lock:
            for other in _hooked_views(base):
                self._gradients.totals = other._gradients.totals
            # Keep the key and not the hook: the view and the hook would hold each other.
            self._key = hook_gradient(
                base, GradHook(self.on_base_gradient), owner, trace_order, is_last=is_last
            )

    def find_write(self, *, is_over: bool = True) -> None:
        """Look for the node of a write to the view.

        If it is over, which means that the view will not be written to from now on, the hook is
        removed from the base. The base may outlive the pass.
        """
        base = self._base()
        if self._is_settled or self._has_node or base is None:
            return
        n_writes = self._counter._version - self._version
        node = node_of_write(base, n_writes)
        if node is not None:
            self._has_node, self._node_found_in = True, backward_number()
            hook_node(node, GradHook(self.on_write_gradient))
        elif is_over and not n_writes:
            self._is_settled = True
            with _lock:
                unhook_gradient(base, self._key)

    def write_finder(self) -> Callable[[], None]:
        """Return a function that settles the view while it may still be written to.

        The function holds the base, without which the node of a write cannot be found.
        """
        return partial(self._find_write_keeping_base, self._base())

    def _find_write_keeping_base(self, base: Tensor | None) -> None:
        self.find_write(is_over=False)

    def is_view_of(self, base: Tensor) -> bool:
        """Tell whether this view shares a tensor's memory."""
        return self._base() is base

    def on_view_gradient(self, grad: Tensor) -> Any:
        """Handle the gradient at the view: the tensor hook."""
        if self._is_settled or not self._is_written():
            return self._hook(grad)
        self._gradients.add(grad)
        return None

    def on_write_gradient(self, grads: tuple[Tensor | None, ...], _: Any) -> None:
        """Add the gradient that flows on from the node of the first write to the old value."""
        self._write_ran = True
        if grads[0] is not None and not is_legacy_batched(grads[0]):
            self._gradients.add_from_base(grads[0])

    def on_base_gradient(self, grad: Tensor) -> Any:
        """Handle the gradient at the base, when all gradients have arrived: the tensor hook."""
        if self._is_settled or not self._is_written():
            return None
        if is_legacy_batched(grad):  # it lacks the operations that tell the parts of a gradient
            self._lost()
            return None
        whole, total, share = self._gradients.finish_run(grad)
        # In the run in which the node of the write was found, it may have run before.
        is_found = self._has_node and self._node_found_in != backward_number()
        if not (is_found or self._write_ran):
            if self._has_node or not self._is_alone:
                self._lost()
                return None
            share = total
        return None if share is None else self._gradients.call_hook(whole, total, share, self._hook)

    def _is_written(self) -> bool:
        return self._counter._version != self._version


def _hooked_views(base: Tensor) -> list[HookedView]:
    """Return the views that have a hook on their base."""
    hooks = [hook.func for _, hook in tensor_hooks(base) if isinstance(hook, GradHook)]
    owners = [getattr(function, "__self__", None) for function in hooks]
    return [owner for owner in owners if isinstance(owner, HookedView)]


def hook_value_gradient(
    tensor: Tensor,
    hook: Hook,
    lost: Callable[[], None],
    owner: int = 0,
    trace_order: int | None = None,
    *,
    is_last: bool = False,
) -> HookedView | None:
    """Call a hook with the gradient of a tensor's present value.

    Args:
        tensor: a tensor of the graph, which is not held.
        hook: called with the gradient; a result other than None replaces the gradient.
        lost: called in backward if the gradient cannot be told from others.
        owner, trace_order, is_last: as in `torch_private.autograd.hook_gradient`.

    Returns:
        The view, if the tensor is a view that can be written to; else None.
    """
    # Counted before this frame holds the base, too.
    is_alone = tensor._is_view() and holds_base_alone(tensor)
    base = base_in_graph(tensor)
    if base is None:
        hook_gradient(tensor, hook, owner, trace_order, is_last=is_last)
        return None
    view = HookedView(tensor, base, hook, lost, is_alone=is_alone)
    hook_gradient(tensor, GradHook(view.on_view_gradient), owner, trace_order, is_last=is_last)
    view.hook_base(base, owner, trace_order, is_last=is_last)
    return view
