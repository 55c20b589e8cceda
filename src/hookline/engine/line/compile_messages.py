"""Messages about hooks that a graph cannot hold: added to errors of torch.compile, or raised."""

from __future__ import annotations

import torch
from torch import nn

from hookline.engine.gradients.ports import all_at
from hookline.engine.gradients.tap import GradientTap
from hookline.engine.selection.site import Site
from hookline.engine.torch_private.dynamo import TracingAttachError, is_limit, is_untraceable

_UNTRACEABLE = (
    "hookline: the hook at {site} ({type}) cannot be part of a compiled graph; the reason is"
    " above.\nWrite it in tensor operations (no print, no `if` on values); or compile without"
    " fullgraph=True, so that the graph breaks there; or run without compiled code:"
    "\n    with torch.compiler.set_stance('force_eager'): ..."
)
_UNTRACEABLE_GRADIENT = (
    "hookline: the gradients at {site} ({type}) cannot come out of this compiled graph; the reason"
    " is above.\nAn edit of them has to be written in tensor operations. If there is none, it is"
    " torch that cannot trace a hook on a tensor beside what the model does (transformers' cache,"
    " made inside the graph, is such a thing: use_cache=False). Or compile without fullgraph=True;"
    " or run without compiled code:"
    "\n    with torch.compiler.set_stance('force_eager'): ..."
)
_LIMIT = (
    "hookline: hooks are part of compiled code, so another function in a hook, another Python"
    " number, or hooks at other sites cost another graph.\nMake the function once and keep it; give"
    " numbers as tensors, or by hl.edits, which does; in a sweep over sites, have a line at each of"
    " them all the time, with hl.edits.scale(1.0) where nothing is to change; or raise"
    " torch._dynamo.config.recompile_limit."
)
_REVERSED = (
    "{site} is changed by one line, and changed or seen by another, in one compiled graph, where"
    " torch {version} calls the later one first.\nUpdate torch, to 2.13 or newer; or run without"
    " compiled code:\n    with torch.compiler.set_stance('force_eager'): ..."
)

_STALE = (
    "{kind} got another forward while this line is on, and torch had fetched the old one for this"
    " call.\nCall the model again: from now on the new one runs."
)


def stale_forward(module: nn.Module) -> str:
    """Say that a call would run a forward which the module's class no longer has."""
    return _STALE.format(kind=type(module).__name__)


def note_on(error: BaseException, site: Site | None) -> str | None:
    """Explain how an error of torch.compile is related to hooks, and the fix; None if unrelated.

    Args:
        error: what was raised where code was compiled, or ran.
        site: where the last hook was met in that code, if any was.
    """
    if site is not None and is_untraceable(error):
        why = _UNTRACEABLE_GRADIENT if site.is_gradient else _UNTRACEABLE
        return why.format(site=site, type=site.module_type)
    return _LIMIT if is_limit(error) else None


def refuse_reversed(tap: GradientTap, module: nn.Module) -> None:
    """Refuse that lines on one module change a gradient, or change and see it.

    For torch before 2.13, which calls the hooks on a tensor in a graph in the reverse order.

    Raises:
        AttachError: they do.
    """
    for other in all_at(module, tap.site.port):
        is_beside = other is not tap and other.passes.is_here()
        if is_beside and (tap.on.changes or other.on.changes):
            raise TracingAttachError(_REVERSED.format(site=tap.site, version=torch.__version__))
