"""Notes on errors of torch.compile that hooks have caused."""

from __future__ import annotations

from hookline.engine.selection.site import Site
from hookline.engine.torch_private.dynamo import (
    is_lost_in_nested_operator,
    is_recompile_limit,
    is_untraceable,
    is_untraceable_in_operator,
)

_UNTRACEABLE = (
    "hookline: the hook at {site} ({type}) cannot be part of a compiled graph; the reason is"
    " above.\nWrite it in tensor operations (no print, no `if` on values). Or compile without"
    " fullgraph=True, so that the graph breaks there. Or run without compiled code:"
    "\n    with torch.compiler.set_stance('force_eager'): ..."
)
_UNTRACEABLE_GRADIENT = (
    "hookline: the gradients at {site} ({type}) cannot come out of this compiled graph; the reason"
    " is above.\nWrite an edit of them in tensor operations. Without an edit, torch cannot trace a"
    " tensor hook beside something in the model, such as transformers' cache made inside the graph"
    " (use_cache=False). Or compile without fullgraph=True. Or run without compiled code:"
    "\n    with torch.compiler.set_stance('force_eager'): ..."
)
_IN_OPERATOR = (
    "hookline: the hook at {site} ({type}) cannot be in a function that the model gives to"
    " torch.cond or the like, which torch compiles whole and without side effects."
    "\nSelect modules outside of that function."
)
_NESTED = (
    "hookline: torch cannot compile a hook in a checkpoint that is inside another checkpoint."
    "\nSelect modules outside of the inner one. Or run without compiled code:"
    "\n    with torch.compiler.set_stance('force_eager'): ..."
)
_LIMIT = (
    "hookline: hooks are part of compiled code. A new hook function, a new Python number or a"
    " different set of sites triggers a recompilation.\nMake the function once and keep it. Give"
    " numbers as tensors, or use hl.edits, which does so. In a sweep over sites, keep"
    " hl.edits.scale at every site, with 1.0 where nothing should change. Or raise"
    " torch._dynamo.config.recompile_limit."
)


def explain_error(error: BaseException, site: Site | None) -> str | None:
    """Explain how an error of torch.compile is related to hooks, and the fix.

    Args:
        error: the error raised while code was compiled or ran.
        site: the site of the hook that dynamo traced last, if it traced any.

    Returns:
        The note; None if the error is unrelated to hooks.
    """
    if site is not None and is_untraceable(error):
        why = _UNTRACEABLE_GRADIENT if site.is_gradient else _UNTRACEABLE
        return why.format(site=site, type=site.module_type)
    if site is not None and is_untraceable_in_operator(error):
        return _IN_OPERATOR.format(site=site, type=site.module_type)
    if site is not None and is_lost_in_nested_operator(error):
        return _NESTED
    return _LIMIT if is_recompile_limit(error) else None
