"""Why a site was silent, as far as can be told from outside the model's code."""

from __future__ import annotations

from typing import Any

from torch import nn

from hookline.display.text import escape_invisible
from hookline.engine.passes.passes import Passes
from hookline.engine.selection.module_tree import ModuleNode, ParameterNode
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.modules import (
    children,
    is_scripted,
    parameters,
    unwrap,
)

_NOT_RUN = "the model has not run"


_BYPASSED = "not reached in this forward, or its .forward was called directly"


_OTHER_CONTEXT = (
    "the model ran in another thread or async task, and a line sees the one that made it; run the"
    " model there by contextvars.copy_context().run(model, ...), or attach with every_thread=True"
)


_NOT_ITSELF = (
    "the model itself was not called, only modules inside it (by hand, by generate() of an inner"
    " model, by a copy that torch.fx traced); attach to the one that is called"
)


def explain(tap: Tap, node: ModuleNode | ParameterNode | None, passes: Passes, root: Any) -> str:
    """Why a tap has not fired, as far as can be told from outside the model's code."""
    if isinstance(node, ParameterNode) and isinstance(root, nn.Module) and _is_replaced(node, root):
        return (
            "the parameter was replaced after the line was attached (fully_shard,"
            " parallelize_module, load_state_dict(assign=True)); attach after that"
        )
    own = tap.why_silent()
    if own is not None:
        return own
    if not passes.started:
        return _OTHER_CONTEXT if passes.elsewhere else _NOT_RUN
    if passes.failed == passes.started:
        return "the forward raised before this had finished"
    if isinstance(node, ModuleNode):
        return _explain_module(node, is_beside=passes.beside == passes.started)
    return "what it waits for did not happen"


def _is_replaced(node: ParameterNode, root: nn.Module) -> bool:
    """Whether the model holds another parameter by now where this one was."""
    *holders, name = node.path.split(".")
    module: nn.Module | None = unwrap(root)
    for holder in holders:
        module = None if module is None else dict(children(module).items()).get(holder)
        module = None if module is None else unwrap(module)
    if module is None:
        return False
    held = dict(parameters(module).items()).get(name)  # a ScriptModule's have no get
    # FSDP2 itself shows another one between forward and backward.
    return held is not None and held is not node.tensor and not node.is_sharded


def _explain_module(node: ModuleNode, *, is_beside: bool) -> str:
    if is_scripted(node.module):
        return "a ScriptModule; torch calls no hooks inside it"
    parent = node.parent.module if node.parent is not None else None
    if isinstance(parent, nn.MultiheadAttention) and node.path.endswith("out_proj"):
        return "MultiheadAttention uses out_proj's weights without calling it; select its parent"
    if type(node.module).__call__ is not nn.Module.__call__:
        return (
            f"{node.type_name} has a __call__ of its own; hooks are called by nn.Module's, which it"
            " must call: super().__call__(...)"
        )
    if parent is not None and "ao.nn" in type(parent).__module__:
        return "a quantised module holds its weights there, and does not call it; select its parent"
    if is_beside:
        return _NOT_ITSELF if node.parent is None else f"not called; {_NOT_ITSELF}"
    return _BYPASSED


def gathered(name: str, model_type: str, nodes: list[ModuleNode]) -> str | None:
    """What to say where the model itself was never called, and modules in it ran several times."""
    tops: dict[str, None] = {}
    for node in nodes:
        top = node
        while top.parent is not None and top.parent.parent is not None:
            top = top.parent
        tops[top.path] = None
    if not tops:
        return None
    shown = ", ".join(map(repr, list(tops)[:3])) + ", …" * (len(tops) > 3)
    first = escape_invisible(next(iter(tops)))
    return (
        f"hl.{name}: {model_type} itself was not called, only modules inside it ({shown}), so all"
        " their runs are one pass.\nGive the module that is called, such as"
        f" model.get_submodule({first!r}), or call the model."
    )
