"""Find the module that raised an exception.

The traceback names the module, so nothing needs to be attached beforehand.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn

from hookline.display.text import type_and_line
from hookline.engine.pytree import describe
from hookline.engine.selection.module_tree import walk
from hookline.engine.selection.site import path_text
from hookline.errors import HooklineError

_NOTE = "hookline: "
_ABOUT_KINDS = re.compile(r"dtype|\b([Ss]calar|[Ii]nput|[Ww]eight|[Bb]ias) type|\bdevices?\b")
_MOST_KINDS = 3


class FailingModule(NamedTuple):
    """The innermost module that was running when an exception was raised.

    Args:
        path: the module's path.
        module_type: the name of its class.
        got: its arguments, with dtypes and devices if the exception is about these.
        has: the dtypes and devices of its parameters, if the exception is about these.
    """

    path: str
    module_type: str
    got: str
    has: str = ""

    def __str__(self) -> str:
        has = f" and has parameters of {self.has}" if self.has else ""
        return f"{path_text(self.path)} ({self.module_type}), which got {self.got}{has}"


def find_failing_module(model: nn.Module, error: BaseException) -> FailingModule | None:
    """Find the innermost module of a model that an exception passed through.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
        >>> try:
        ...     _ = model(torch.zeros(1, 2))
        ... except RuntimeError as error:
        ...     print(find_failing_module(model, error))
        1 (Linear), which got Tensor[1, 2]

    Args:
        model: the model that was running.
        error: the exception, with its traceback.

    Returns:
        The module's path, type and arguments. None if no module of the model is in the traceback.
    """
    paths = {id(node.module): node.path for node in walk(model)}
    is_about_kinds = _ABOUT_KINDS.search(str(error)) is not None
    found: FailingModule | None = None
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code, local = step.tb_frame.f_code, step.tb_frame.f_locals
        module = local.get("self")
        # torch's own name for the method that every call of a module goes through.
        if code.co_name == "_call_impl" and module is not None and id(module) in paths:
            got = _arguments(local, in_full=is_about_kinds)
            has = _kinds_of_parameters(module) if is_about_kinds else ""
            found = FailingModule(paths[id(module)], type(module).__name__, got, has)
        step = step.tb_next
    return found


def failure_text(model: nn.Module, error: BaseException) -> str:
    """Describe the failing module, its arguments, the error, and hookline's notes on the error."""
    where = find_failing_module(model, error) or "the call"
    return "\n".join([f"{where}: {type_and_line(error)}", *notes_of(error)])


def notes_of(error: BaseException) -> list[str]:
    """List the notes that hookline has added to an exception, without the prefix "hookline: "."""
    notes = getattr(error, "__notes__", ())
    return [note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)]


def note_failing_module(model: nn.Module, error: Exception) -> None:
    """Add a note to a model's exception that names the module that raised it.

    An exception of hookline's own, or with a note of hookline's, stays unchanged.
    """
    if isinstance(error, HooklineError) or notes_of(error):
        return
    found = find_failing_module(model, error)
    if found is not None:
        error.add_note(f"{_NOTE}the model failed in {found}.")


def _arguments(local: dict[str, Any], *, in_full: bool) -> str:
    def shown(value: Any) -> str:
        is_full = in_full and isinstance(value, Tensor)
        return describe.in_full(value) if is_full else describe.in_words(value)

    parts = [shown(value) for value in local.get("args", ())]
    parts += [f"{key}={shown(value)}" for key, value in local.get("kwargs", {}).items()]
    return ", ".join(parts) or "nothing"


def _kinds_of_parameters(module: nn.Module) -> str:
    """List the dtypes and devices of a module's parameters: `float32 on cpu`."""
    kinds = list(dict.fromkeys(map(describe.kind, module.parameters())))
    return ", ".join(kinds[:_MOST_KINDS]) + ", …" * (len(kinds) > _MOST_KINDS)
