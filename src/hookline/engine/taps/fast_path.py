"""Layers that torch runs as one operation, unless a module in them has a hook.

`nn.TransformerEncoderLayer` does so in eval mode without gradients. A hook in the layer turns this
fast path off, which may change the last bits of the layer's output. `nn.TransformerEncoder` hands
such layers nested tensors, if its inputs are padded. Operations cannot be hooked on these, so the
encoder must keep its tensors padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.graph_capture import Callback
from hookline.engine.compile.guards import has_own_forward
from hookline.engine.operations.operation_mode import PaddedMode
from hookline.engine.passes.passes import Passes
from hookline.engine.selection.module_tree import ModuleNode, ModuleTree, OperationNode
from hookline.engine.selection.site import Site, paths_above
from hookline.engine.taps.base import (
    ON_INPUTS,
    HookSpec,
    Order,
    Tap,
    do_nothing,
    foreign_hooks,
    is_inert,
)
from hookline.engine.torch_private.graph.function_modes import pop_if_innermost
from hookline.engine.torch_private.graph.fused_ops import may_run_fused, may_run_nested

REMEDY = "torch.backends.mha.set_fastpath_enabled(False)"


@final
class FusedTap(Tap):
    """A tap that detects a layer whose fast path the line's hooks have turned off.

    Attributes:
        ran: whether the layer would have run as one operation without the line.
    """

    __slots__ = ()
    hooks: tuple[HookSpec, ...] = ON_INPUTS

    def fire(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Check whether torch would run this call as one operation: the forward-pre hook."""
        if kwargs is None or self.ran or is_dynamo_compiling():
            return
        if self.in_thread.current is None and not self.passes.sees_context_or_backward():
            self._pass_outside_root(
                module
            )  # removes the tap, if it was copied along with the model
        elif is_fused(module, args, kwargs) and not any(map(foreign_hooks, module.modules())):
            self.ran: bool = True


@final
class PaddedTap(Tap):
    """A tap that has an encoder hand its layers padded tensors, where it would nest them.

    Attributes:
        ran: whether the encoder would have nested its tensors without the line.
    """

    __slots__ = ("mode",)
    hooks: tuple[HookSpec, ...] = (
        HookSpec("forward_pre", order=Order.OPERATIONS_BEGIN, with_kwargs=True),
        HookSpec("forward", "leave", Order.OPERATIONS_END, always_call=True),
    )

    def __init__(self, site: Site, passes: Passes, callback: Callback, order: Order) -> None:
        super().__init__(site, passes, callback, order)
        self.mode: PaddedMode = PaddedMode()

    def fire(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Turn a mode on, under which the encoder nests no tensors: the forward-pre hook."""
        if kwargs is None or is_dynamo_compiling():
            return
        if is_inert(self):
            self._pass_outside_root(module)  # removes the tap
        elif may_run_nested(module, args, kwargs):
            self.ran: bool = True
            self.mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Turn the mode off: the always-called forward hook."""
        if not is_dynamo_compiling() and not is_inert(self):
            pop_if_innermost(self.mode)


_TAPS: dict[type[nn.Module], type[FusedTap | PaddedTap]] = {
    nn.TransformerEncoderLayer: FusedTap,
    nn.TransformerEncoder: PaddedTap,
}


def is_fused(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether torch runs a layer as one operation, if no module in it has a hook."""
    return may_run_fused(layer, args, kwargs) and not has_own_forward(layer)


@final
@dataclass(eq=False)
class FastPaths:
    """The fast paths that the hooks of a line turn off.

    Args:
        tree: the model of the line.
        passes: the passes of the line.
        place: places taps on their nodes.

    Attributes:
        taps: the taps that tell which fast paths were turned off, by the id of their node.
    """

    _tree: ModuleTree
    _passes: Passes
    _place: Callable[[list[tuple[Tap, Any]]], None]
    _may_fuse: bool | None = None  # None until first asked
    taps: dict[int, FusedTap | PaddedTap] = field(default_factory=dict)

    def watch(self, nodes: Iterable[ModuleNode]) -> None:
        """Watch the layers around modules and operations that are about to get hooks."""
        if self._may_fuse is None:
            kinds = self._tree.kinds
            self._may_fuse = any(issubclass(kind, nn.TransformerEncoderLayer) for kind in kinds)
        for node in nodes if self._may_fuse else ():
            for layer in self._layers_around(node, nn.TransformerEncoderLayer):
                self._watch_layer(layer)
            if isinstance(node, OperationNode):
                self.keep_padded(node.host)
                # Where operations have hooks, whatever the module calls runs under a mode.
                for module in node.host.module.modules():
                    self._watch_layer(self._tree.modules_by_id.get(id(module)))

    def keep_padded(self, node: ModuleNode) -> None:
        """Have the encoders around a module nest no tensors, on which operations take no hooks."""
        for encoder in self._layers_around(node, nn.TransformerEncoder):
            self._watch_layer(encoder)

    def _layers_around(self, node: ModuleNode, kind: type[nn.Module]) -> Iterator[ModuleNode]:
        """Yield the modules of a class that contain, or are, a module, at any of its paths."""
        for path in (node.host if isinstance(node, OperationNode) else node).paths:
            nodes = map(self._tree.by_path.get, [path, *paths_above(path)])
            yield from (above for above in nodes if above and isinstance(above.module, kind))

    def _watch_layer(self, node: ModuleNode | None) -> None:
        """Place a tap on a layer or an encoder, unless it has one."""
        kind = next((kind for kind in _TAPS if node and isinstance(node.module, kind)), None)
        if node is None or kind is None or id(node) in self.taps:
            return
        site = Site(node.path, module_type=node.type_name)
        self.taps[id(node)] = tap = _TAPS[kind](site, self._passes, do_nothing, Order.BEGIN)
        self._place([(tap, node)])

    def warning_text(self, name: str) -> str | None:
        """Write the warning about the fast paths that were turned off.

        Args:
            name: the name of the line.
        """
        taps = [tap for tap in self.taps.values() if tap.ran]
        if not taps:
            return None
        paths = [str(tap.site) for tap in taps]
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        kinds = " and ".join(sorted({tap.site.module_type for tap in taps}))
        reason, where = ", as any hook does", "the last bits of what it returns may differ"
        if any(isinstance(tap, PaddedTap) for tap in taps):
            reason = ", which takes no hooks on operations"
            where = "the last bits of what it returns, and its values at padding, may differ"
        return (
            f"hl.{name} turned off torch's fast path of {', '.join(paths[:3])}{more}"
            f" ({kinds}){reason}: {where} from a run without the line."
            f"\nFor the same bits in both: {REMEDY} before both."
        )

    def end(self) -> None:
        """Let go of the model."""
        self._tree = ModuleTree("", [])
