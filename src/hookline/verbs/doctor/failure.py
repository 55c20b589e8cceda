"""Describe an error that the model raised, and a remedy."""

from __future__ import annotations

import re
from types import TracebackType

from torch import nn

from hookline.engine import path_text
from hookline.engine.selection.module_tree import walk
from hookline.verbs.doctor.diagnosis import Note
from hookline.verbs.doctor.observe import foreign_hooks
from hookline.verbs.shared.failing_module import failure_text

_VIEW_OF_A_HOOK = re.compile(r"BackwardHookFunction\w* is a view and is being modified")


def raised(model: nn.Module, error: Exception) -> Note:
    """Describe the module that raised, its inputs, the error, and the remedy."""
    what = failure_text(model, error)
    if _VIEW_OF_A_HOOK.search(str(error)):
        return Note(
            "failure",
            f"{what}: a full backward hook is registered before an in-place operation",
            "remove that hook and use hl.attach(model), line.backward(...), or a grad_output"
            " site; or use an operation that is not in place",
        )
    codes = {code: (path, kind) for path, kind, code in foreign_hooks(walk(model))}
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code in codes:
            path, kind = codes[code]
            place = f"{code.co_qualname} ({code.co_filename}:{step.tb_lineno})"
            return Note(
                "failure",
                f"{what}: raised by the {kind} hook {place} on {path_text(path)}",
                "mend that hook, or remove it; hl.inventory(model) lists all hooks",
            )
        step = step.tb_next
    return Note("failure", what, "give the inputs that it expects; later sites were not reached")
