"""Find the module that raised an exception.

The traceback names the module, so nothing needs to be attached beforehand.
"""

from __future__ import annotations

import re
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple

from torch import Tensor, nn

from hookline.display.text import listed, type_and_line
from hookline.engine import Operation, module_tree, path_text
from hookline.engine.pytree import describe
from hookline.errors import HooklineError

_NOTE = "hookline: "
_FAILED = "the model failed in"
_ABOUT_KINDS = re.compile(r"dtype|\b([Ss]calar|[Ii]nput|[Ww]eight|[Bb]ias) type|\bdevices?\b")
_MOST_KINDS = 3


class FailingModule(NamedTuple):
    """The innermost module that was running when an exception was raised.

    An operation with hooks is a module, too. Its path is that of its site: `h.3.attn@softmax`.
    """

    path: str  # the module's path
    module_type: str  # the name of its class; "operation"
    arguments: str  # its arguments, with dtypes and devices if the exception is about these
    parameters: str = ""  # theirs, `float32 on cpu`, if the exception is about these

    def __str__(self) -> str:
        kinds = f" and has parameters of {self.parameters}" if self.parameters else ""
        return f"{path_text(self.path)} ({self.module_type}), which got {self.arguments}{kinds}"


def find_failing_module(model: nn.Module, error: BaseException) -> FailingModule | None:
    """Find the innermost module of a model that an exception passed through.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
        >>> try:
        ...     _ = model(torch.zeros(1, 2))
        ... except RuntimeError as error:
        ...     print(find_failing_module(model, error))
        1 (Linear), which got Tensor[1, 2]

    Returns:
        The module's path, type and arguments. None if no module of the model is in the traceback.
    """
    paths = {id(node.module): node.path for node in module_tree(model).nodes}
    is_about_kinds = _ABOUT_KINDS.search(str(error)) is not None
    innermost: FailingModule | None = None
    host = ""  # the innermost module of the model
    for frame, _ in walk_tb(error.__traceback__):
        local = frame.f_locals
        module: Any = local.get("self")
        # torch's own name for the method that every call of a module goes through.
        if frame.f_code.co_name != "_call_impl":
            continue
        arguments = partial(_arguments_text, local, in_full=is_about_kinds)
        if id(module) in paths:
            host, kind = paths[id(module)], type(module).__name__
            kinds = dict.fromkeys(
                map(describe.dtype_and_device, module.parameters() if is_about_kinds else ())
            )
            innermost = FailingModule(host, kind, arguments(), listed(kinds, _MOST_KINDS))
        elif isinstance(module, Operation) and innermost is not None:
            innermost = FailingModule(f"{host}@{module.name}", "operation", arguments())
    return innermost


def failure_text(model: nn.Module, error: BaseException) -> str:
    """Describe the failing module, its arguments, the error, and hookline's notes on the error."""
    where = find_failing_module(model, error) or "the call"
    notes = [note for note in hookline_notes(error) if not note.startswith(_FAILED)]
    return "\n".join([f"{where}: {type_and_line(error)}", *notes])


def hookline_notes(error: BaseException) -> list[str]:
    """List the notes that hookline has added to an exception, without the prefix "hookline: "."""
    notes = getattr(error, "__notes__", ())
    return [note.removeprefix(_NOTE) for note in notes if note.startswith(_NOTE)]


def add_failing_module_note(model: nn.Module, error: Exception) -> None:
    """Add a note to a model's exception that names the module that raised it.

    An exception of hookline's own, or with a note of hookline's, stays unchanged.
    """
    if isinstance(error, HooklineError) or hookline_notes(error):
        return
    module = find_failing_module(model, error)
    if module is not None:
        error.add_note(f"{_NOTE}{_FAILED} {module}.")


def _arguments_text(local: dict[str, Any], *, in_full: bool) -> str:
    def text_of(value: Any) -> str:
        is_full = in_full and isinstance(value, Tensor)
        return describe.in_full(value) if is_full else describe.in_words(value)

    parts = [text_of(value) for value in local.get("args", ())]
    parts += [f"{key}={text_of(value)}" for key, value in local.get("kwargs", {}).items()]
    return ", ".join(parts) or "nothing"
