"""The hooks that watch a module for calls of its operations while the module runs."""

from __future__ import annotations

import sys
from typing import Any, final

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.guards import unmark_copied_module
from hookline.engine.operations.operation_mode import OperationMode
from hookline.engine.taps.base import HookOwner, HookSpec, Order
from hookline.engine.torch_private.hooks import discard_hooks_of, hook_dict


@final
class ModeTap(HookOwner):
    """Turn the function mode of a module on while the module runs; inert in copies.

    Args:
        mode: the mode; None for an inert copy.

    Attributes:
        is_first: whether the tap is the first of this kind on its module. Each line has one, and
            the first turns the mode on for all.
    """

    __slots__ = ("is_first", "mode")
    hooks: tuple[HookSpec, HookSpec] = (
        HookSpec("forward_pre", "fire", Order.OPERATIONS_BEGIN),
        HookSpec("forward", "leave", Order.OPERATIONS_END, always_call=True),
    )

    def __init__(self, mode: OperationMode | None) -> None:
        self.mode: OperationMode | None = mode
        self.is_first: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ModeTap, (None,)

    def fire(self, module: nn.Module, args: Any) -> None:
        """Turn the mode on: the forward-pre hook."""
        if self.mode is None:
            _discard_copied(module, self)
        elif self.is_first:
            self.mode.begin()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Turn the mode off: the always-called forward hook."""
        if self.mode is None:
            _discard_copied(module, self)
        elif self.is_first:
            self.mode.end(is_whole=is_dynamo_compiling() or sys.exception() is None)


def _discard_copied(module: nn.Module, tap: ModeTap) -> None:
    """Remove a tap that was copied along with a hooked module."""
    discard_hooks_of(module, tap, lambda owner: isinstance(owner, ModeTap) and owner.mode is None)
    unmark_copied_module(module)


def choose_active_tap(module: nn.Module, mode: OperationMode) -> None:
    """Have the first of a module's taps turn the mode on."""
    from_hooks = [
        getattr(hook, "__self__", None) for hook in hook_dict(module, "forward_pre").values()
    ]
    taps = [tap for tap in from_hooks if isinstance(tap, ModeTap) and tap.mode is mode]
    for tap in taps:
        tap.is_first = tap is taps[0]
