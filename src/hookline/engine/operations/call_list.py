"""List the calls of torch's functions that a module's own forward makes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

from torch import nn
from torch.overrides import TorchFunctionMode

from hookline.engine.function_names import argument_names, functions_by_name, selector_name
from hookline.engine.operations.own_calls import OwnCalls
from hookline.engine.torch_private.graph.function_modes import calling_module, pop_if_innermost
from hookline.util.walk_stack import walk_stack

_TORCH = str(Path(inspect.getfile(nn)).parent.parent)


class FunctionCall(NamedTuple):
    """One call of a function."""

    name: str  # the name of the function, as selectors write it
    is_known: bool  # whether selectors know the function
    names: tuple[str, ...]  # the names of the positional arguments
    args: tuple[Any, ...]  # the arguments
    kwargs: dict[str, Any]  # the keyword arguments
    output: Any  # the result
    file: str  # the file of the code that makes the call
    line: int  # the line of this code


@final
class CallList(TorchFunctionMode):
    """A function mode that reports the calls which a module itself makes.

    Args:
        module: the module.
        report: called with each call, after it.
    """

    def __init__(self, module: nn.Module, report: Callable[[FunctionCall], None]) -> None:
        super().__init__()
        self._own = OwnCalls(module)
        self._report = report

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Turn the mode on: before the module runs."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Turn the mode off: after the module has run."""
        pop_if_innermost(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and report the call if the module itself makes it."""
        kwargs = {} if kwargs is None else kwargs
        output = func(*args, **kwargs)
        frame = sys._getframe(1)
        if getattr(func, "__name__", "__get__") not in _ATTRIBUTE and self._own.is_own(frame):
            name = selector_name(func)
            is_known = any(func is function for function in functions_by_name().get(name, ()))
            names = argument_names(func).names
            call = FunctionCall(name, is_known, names, args, kwargs, output, *_user_line(frame))
            self._report(call)
        return output


_ATTRIBUTE = ("__get__", "__set__", "__delete__")


def _user_line(frame: FrameType) -> tuple[str, int]:
    """Return the file and line of a call in the user's code; in torch's, if that alone calls."""
    first = frame.f_code.co_filename, frame.f_lineno
    _, _, outermost = calling_module(frame)
    for at in takewhile(lambda at: at is not outermost, walk_stack(frame)):
        place = at.f_code.co_filename, at.f_lineno
        if not place[0].startswith(_TORCH):
            return place
    return first
