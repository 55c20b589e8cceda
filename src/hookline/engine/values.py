"""Hooks on the gradient of a value as it is now, whatever is done to it later.

Imports torch_internals. Before an in-place operation a tensor hook stays with the old value, as it
should; but not on a view, which loses its hooks with its place in the graph (`linear` of a batch of
sequences returns one, and so does `flatten`). What comes back for the old value is then part of the
gradient of the view's base.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, final

from torch import Tensor

from hookline.engine.torch_internals import (
    base_of_view,
    hook_gradient,
    unhook_gradient,
    version_counter,
)

Hook = Callable[[Tensor], Any]


class Arrival(partial[Any]):
    """A hook on a tensor of the graph. Pickling that tensor loses it, and need not say so."""

    __slots__ = ()
    __torch_unserializable__ = True


@final
class View:
    """A hook on a view, and on the view's base for the case that the view is written to."""

    __slots__ = (
        "__weakref__", "_base", "_counter", "_hook", "_is_settled", "_key", "_lies", "_version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, base: Tensor, hook: Hook) -> None:
        self._hook = hook
        self._counter = version_counter(tensor)
        self._version = self._counter._version
        self._is_settled = False
        self._base = weakref.ref(base)
        self._key: Any = None
        offset = tensor.storage_offset() - base.storage_offset()
        self._lies = base.size(), base.stride(), tensor.size(), tensor.stride(), offset

    def hook_base(self, base: Tensor, owner: int) -> None:
        """Put the hook for the case that the view is written to on its base."""
        # The key and not the hook is kept: the two would hold each other.
        self._key = hook_gradient(base, Arrival(self.at_base), owner)

    def settle(self) -> None:
        """From now on, nobody writes to the view: if it was not written to yet, it is the way.

        The base may outlive the pass, so what it does not need does not stay on it.
        """
        self._is_settled = self._counter._version == self._version
        base = self._base()
        if self._is_settled and base is not None:
            unhook_gradient(base, self._key)

    def is_of(self, base: Tensor) -> bool:
        """Whether it shows this tensor's memory."""
        return self._base() is base

    def was_written_to(self) -> bool:
        """Whether its own gradient is only part of what comes back, or nothing."""
        return not self._is_settled and self._counter._version != self._version

    def at_view(self, grad: Tensor) -> Any:
        """The hook on the view itself."""
        return None if self.was_written_to() else self._hook(grad)

    def at_base(self, grad: Tensor) -> Any:
        """The hook on the base: the view's part is what the user's hook gets."""
        if not self.was_written_to():
            return None
        base_size, base_stride, size, stride, offset = self._lies
        # The view's strides are those of the base's memory, in which a gradient need not lie.
        whole = grad.new_empty_strided(base_size, base_stride).copy_(grad)
        new = self._hook(whole.as_strided(size, stride, offset).clone())
        if new is None:
            return None
        whole = whole.clone()
        whole.as_strided(size, stride, offset).copy_(new)
        return whole


def hook_value(tensor: Tensor, hook: Hook, owner: int = 0) -> View | None:
    """Call a hook with the gradient of a tensor's present value, when it comes back.

    Args:
        tensor: a tensor of the graph. It is not held.
        hook: what it returns, unless None, takes the gradient's place.
        owner: whose hook it is; as in `torch_internals.hook_gradient`.

    Returns:
        The view, if the tensor is one that can be written to.
    """
    base = base_of_view(tensor)
    if base is None:
        hook_gradient(tensor, hook, owner)
        return None
    view = View(tensor, base, hook)
    hook_gradient(tensor, Arrival(view.at_view), owner)
    view.hook_base(base, owner)
    return view
