"""Hooks on the gradient of a value as it is now, whatever is done to it later.

Before an in-place operation a tensor hook stays with the old value, as it should; but not on a
view, which loses its hooks with its place in the graph (`linear` of a batch of sequences returns
one, and so does `flatten`). What comes back for the old value is then part of the gradient of the
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
    base_of_view,
    hook_gradient,
    hook_node,
    is_held_by_one_view,
    node_of_write,
    unhook_gradient,
    version_counter,
)
from hookline.engine.torch_private.hooks import tensor_hooks

Hook = Callable[[Tensor], Any]


class GradHook(partial[Any]):
    """A hook on a tensor of the graph. Pickling that tensor loses it, and need not say so."""

    __slots__ = ()
    __torch_unserializable__ = True


@final
class _Ledger:
    """The gradients of a view, and of its base, by the run of autograd in which they come.

    Attributes:
        totals: of all views of the base, its gradient before any of them changed it.
    """

    __slots__ = ("_base_layout", "_shares", "_view_layout", "totals")

    def __init__(self, view: Tensor, base: Tensor) -> None:
        offset = view.storage_offset() - base.storage_offset()
        self._base_layout = base.size(), base.stride()
        self._view_layout = view.size(), view.stride(), offset
        self._shares: dict[int, Tensor] = {}
        self.totals: dict[int, Tensor] = {}

    def add(self, grad: Tensor) -> None:
        """Add what comes back to the view."""
        run = backward_number()
        known = self._shares.get(run)
        self._shares[run] = grad if known is None else known + grad

    def add_from_base(self, grad: Tensor) -> None:
        """Add the view's part of what comes back to the base."""
        self.add(self._part(self._whole(grad)).clone())

    def close(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Close the run with the base's gradient.

        Returns:
            It in the base's layout; the view's part of it before any view changed that; and of this
            part what has come back to the view, None if nothing has.
        """
        run = backward_number()
        whole = self._whole(grad)
        if run not in self.totals:
            self.totals[run] = whole
            at_end_of_backward(self.totals.clear)
        return whole, self._part(self.totals[run]), self._shares.pop(run, None)

    def change(self, whole: Tensor, total: Tensor, share: Tensor, hook: Hook) -> Tensor | None:
        """Call a hook with the view's share. Return the base's gradient with what it returned."""
        now = self._part(whole)
        # Where the share is all there is, nothing is subtracted: inf - inf would be NaN.
        is_all = total == share
        rest = total - share
        new = hook(torch.where(is_all, now, now - rest))
        if new is None:
            return None
        whole = whole.clone()
        self._part(whole).copy_(torch.where(is_all, new, new + rest))
        return whole

    def _whole(self, grad: Tensor) -> Tensor:
        # The view's strides are those of the base's memory, in which a gradient need not lie.
        return grad.new_empty_strided(*self._base_layout).copy_(grad)

    def _part(self, whole: Tensor) -> Tensor:
        return whole.as_strided(*self._view_layout)


@final
class HookedView:
    """A hook on a view, and on its base for the case that the view is written to.

    What was computed from the view before the write comes back to the view; what was computed
    later, to the node of the write. That is found when `settle` says so, before the backward. Both
    are there when the base's own gradient is complete, and in that. Where the node was not found,
    the base's gradient is the view's, if nobody but the view has the base; otherwise nobody can
    tell what came from where. A node that is found in the midst of a backward may have run before.

    Args:
        tensor: the view. It is not held.
        base: the tensor of the graph whose memory it shows.
        hook: called with the gradient; what it returns, unless None, takes the gradient's place.
        lost: called in backward if nobody can tell the gradient.
        is_alone: whether nobody but the view has the base.
    """

    __slots__ = (
        "__weakref__", "_base", "_counter", "_found", "_found_in", "_hook", "_is_alone",
        "_is_settled", "_key", "_ledger", "_lost", "_version", "_write_ran",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, base: Tensor, hook: Hook, lost: Callable[[], None], *, is_alone: bool
    ) -> None:
        self._hook = hook
        self._lost = lost
        self._is_alone = is_alone
        self._counter = version_counter(tensor)
        self._version = self._counter._version
        self._is_settled = self._found = self._write_ran = False
        self._found_in = -1  # the run of autograd in which the node of the write was found
        self._base = weakref.ref(base)
        self._key: Any = None
        self._ledger = _Ledger(tensor, base)

    def hook_base(
        self, base: Tensor, owner: int, number: int | None, *, is_last: bool = False
    ) -> None:
        """Put the hook for the case that the view is written to on its base."""
        for _, hook in tensor_hooks(base):
            other = getattr(hook.func, "__self__", None) if isinstance(hook, GradHook) else None
            if isinstance(other, HookedView):
                self._ledger.totals = other._ledger.totals
        # The key and not the hook is kept: the two would hold each other.
        self._key = hook_gradient(base, GradHook(self.at_base), owner, number, is_last=is_last)

    def settle(self, *, is_over: bool = True) -> None:
        """Say that now is a moment to look for a write; if it `is_over`, nobody writes from now on.

        The base may outlive the pass, so what it does not need does not stay on it.
        """
        base = self._base()
        if self._is_settled or self._found or base is None:
            return
        n_writes = self._counter._version - self._version
        node = node_of_write(base, n_writes)
        if node is not None:
            self._found, self._found_in = True, backward_number()
            hook_node(node, GradHook(self.at_write))
        elif is_over and not n_writes:
            self._is_settled = True
            unhook_gradient(base, self._key)

    def base(self) -> Tensor | None:
        """The tensor whose memory it shows, if that is still there."""
        return self._base()

    def is_of(self, base: Tensor) -> bool:
        """Tell whether this view shows a tensor's memory."""
        return self._base() is base

    def at_view(self, grad: Tensor) -> Any:
        """The hook on the view itself."""
        if self._is_settled or not self._is_written():
            return self._hook(grad)
        self._ledger.add(grad)
        return None

    def at_write(self, grads: tuple[Tensor | None, ...], _: Any) -> None:
        """The hook on the node of the first write: what flows on from there to the old value."""
        self._write_ran = True
        if grads[0] is not None:
            self._ledger.add_from_base(grads[0])

    def at_base(self, grad: Tensor) -> Any:
        """The hook on the base: by now, all that there is has come."""
        if self._is_settled or not self._is_written():
            return None
        whole, total, share = self._ledger.close(grad)
        if not self._is_known_in(backward_number()):
            if self._found or not self._is_alone:
                self._lost()
                return None
            share = total
        return None if share is None else self._ledger.change(whole, total, share, self._hook)

    def _is_known_in(self, run: int) -> bool:
        """Tell whether what came back to the write in a run of autograd was seen."""
        return self._found and (self._write_ran or self._found_in < 0 or self._found_in != run)

    def _is_written(self) -> bool:
        return self._counter._version != self._version


def hook_value(
    tensor: Tensor,
    hook: Hook,
    lost: Callable[[], None],
    owner: int = 0,
    number: int | None = None,
    *,
    is_last: bool = False,
) -> HookedView | None:
    """Call a hook with the gradient of a tensor's present value, when it comes back.

    Args:
        tensor: a tensor of the graph. It is not held.
        hook: what it returns, unless None, takes the gradient's place.
        lost: called in backward if the gradient cannot be told from others any more.
        owner: whose hook it is; as in `torch_private.autograd.hook_gradient`.
        number: in which order it came, if it is put on later; likewise.
        is_last: whether it stays behind the owner's later ones; likewise.

    Returns:
        The view, if the tensor is one that can be written to.
    """
    is_alone = tensor._is_view() and is_held_by_one_view(tensor)  # before this frame holds it, too
    base = base_of_view(tensor)
    if base is None:
        hook_gradient(tensor, hook, owner, number, is_last=is_last)
        return None
    view = HookedView(tensor, base, hook, lost, is_alone=is_alone)
    hook_gradient(tensor, GradHook(view.at_view), owner, number, is_last=is_last)
    view.hook_base(base, owner, number, is_last=is_last)
    return view
