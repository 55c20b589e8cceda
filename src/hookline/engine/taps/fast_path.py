"""Layers that torch runs as one operation, unless a module in them has a hook.

`nn.TransformerEncoderLayer` does so in eval mode without gradients. A hook in the layer turns this
fast path off, which may change the last bits of the layer's output.
"""

from __future__ import annotations

from typing import Any, final

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.guards import has_own_forward
from hookline.engine.passes.passes import Passes
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import (
    ON_INPUTS,
    HookSpec,
    Order,
    Tap,
    foreign_hooks,
    no_callback,
)
from hookline.engine.torch_private.graph.fused_ops import runs_fused

REMEDY = "torch.backends.mha.set_fastpath_enabled(False)"


@final
class FusedTap(Tap):
    """A tap that detects a layer whose fast path the line's hooks have turned off.

    Attributes:
        ran: whether the layer would have run as one operation without the line.
    """

    __slots__ = ()
    hooks: tuple[HookSpec, ...] = ON_INPUTS

    def __init__(self, node: ModuleNode, passes: Passes) -> None:
        site = Site(node.path, module_type=node.type_name)
        super().__init__(site, passes, no_callback, Order.BEGIN)

    def fire(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Check whether torch would run this call as one operation: the forward-pre hook."""
        if kwargs is None or self.ran or is_dynamo_compiling():
            return
        if self.in_thread.current is None and not self.passes.is_here():
            self._slow_path(module)  # removes the tap, if it was copied along with the model
        elif is_fused(module, args, kwargs) and not any(map(foreign_hooks, module.modules())):
            self.ran: bool = True


def is_fused(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch runs a layer as one operation, if no module in it has a hook."""
    return runs_fused(layer, args, kwargs) and not has_own_forward(layer)


def layer_above(node: ModuleNode | None) -> ModuleNode | None:
    """Return the layer with a fast path that contains, or is, a module; None without one."""
    while node is not None and not isinstance(node.module, nn.TransformerEncoderLayer):
        node = node.parent
    return node


def fast_path_warning(name: str, taps: list[FusedTap]) -> str | None:
    """Write the warning about the fast paths that a line turned off."""
    paths = [str(tap.site) or "the model" for tap in taps if tap.ran]
    if not paths:
        return None
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return (
        f"hl.{name} turned off torch's fast path of {', '.join(paths[:3])}{more}"
        f" ({taps[0].site.module_type}), as any hook does: the last bits of what it returns may"
        f" differ from a run without the line.\nFor the same bits in both: {REMEDY} before both."
    )
