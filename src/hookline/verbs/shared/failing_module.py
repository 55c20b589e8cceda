"""Which module an exception came from.

Read off the traceback, so that nothing has to be attached beforehand.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NamedTuple

from torch import nn

from hookline.engine.pytree import describe
from hookline.engine.selection.module_tree import walk
from hookline.engine.selection.site import path_text


class FailingModule(NamedTuple):
    """The innermost module that was running when an exception was raised."""

    path: str
    module_type: str
    got: str

    def __str__(self) -> str:
        return f"{path_text(self.path)} ({self.module_type}), which got {self.got}"


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
        The module's path, type, and a description of its arguments; None if no module of the model
        is in the traceback.
    """
    paths = {id(node.module): node.path for node in walk(model)}
    found: FailingModule | None = None
    step: TracebackType | None = error.__traceback__
    while step is not None:
        code, local = step.tb_frame.f_code, step.tb_frame.f_locals
        module = local.get("self")
        # torch's own name for the method that every call of a module goes through.
        if code.co_name == "_call_impl" and id(module) in paths:
            found = FailingModule(paths[id(module)], type(module).__name__, _arguments(local))
        step = step.tb_next
    return found


def _arguments(local: dict[str, Any]) -> str:
    shown = [describe.in_words(value) for value in local.get("args", ())]
    shown += [f"{key}={describe.in_words(value)}" for key, value in local.get("kwargs", {}).items()]
    return ", ".join(shown) or "nothing"
