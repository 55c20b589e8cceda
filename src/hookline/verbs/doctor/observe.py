"""Observe a model with nothing attached: which forwards ran, and who called them.

Hooks only see what goes through a module's `__call__`. Python's own profiling function sees every
call, a direct `.forward` included, changes nothing in the model, and unlike a hook leaves torch's
fast paths on. Which weights were used by what is asked in a run of its own, because torch's
function mode switches those paths off.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookline.engine.pytree import tree
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.torch_private.hooks import global_hooks, hook_dict
from hookline.engine.torch_private.modules import parameters

# torch's own name for the method that every call of a module goes through.
_CALL = "_call_impl"
# What torch runs in the place of whole modules, where it may.
_FAST = {
    "_transformer_encoder_layer_fwd": "TransformerEncoderLayer",
    "_native_multi_head_attention": "MultiheadAttention",
}
_TORCH = str(Path(nn.__file__).parent.parent)
_OURS = str(Path(__file__).parent.parent)
_HIGHEST = 25  # frames between a module's call and its forward: decorators, no more


class Use(NamedTuple):
    """Something that was done past a module's call: who did it, by what, and in which line."""

    by: str
    within: str
    where: str


@final
@dataclass
class Look:
    """The observations of one run; modules are keyed by id.

    Args:
        called: those that went through `__call__`.
        direct: those whose forward was called past it, and by whom.
        overridden: of these, the ones whose class has a `__call__` of its own.
        fast: the modules that ran as one operation of torch, with the kind.
        used: those whose own parameters were used by an operation, and by which.
        replacing: the foreign hooks that returned something, by their code.
    """

    called: set[int] = field(default_factory=set)
    direct: dict[int, Use] = field(default_factory=dict)
    overridden: set[int] = field(default_factory=set)
    fast: dict[int, str] = field(default_factory=dict)
    used: dict[int, Use] = field(default_factory=dict)
    replacing: set[CodeType] = field(default_factory=set)


@contextmanager
def watching(nodes: list[ModuleNode]) -> Iterator[Look]:
    """See which modules run in the block, in this thread; no profiler may be at work."""
    look = Look()
    sys.setprofile(_Watcher(nodes, look))
    try:
        yield look
    finally:
        sys.setprofile(None)


@final
class _Watcher:
    """The profiling function."""

    def __init__(self, nodes: list[ModuleNode], look: Look) -> None:
        self._paths = {id(node.module): node.path for node in nodes}
        self._forwards = {code for node in nodes if (code := _code(node.module)) is not None}
        self._hooks = {code for _, _, code in foreign_hooks(nodes)}
        self._look = look

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code.co_name == _CALL:
                self._look.called.add(id(frame.f_locals.get("self")))
            elif code in self._forwards:
                self._forward(frame)
        elif event == "return":
            if arg is not None and code in self._hooks:
                self._look.replacing.add(code)
        elif event == "c_call" and getattr(arg, "__name__", "") in _FAST:
            module = _module_of(frame, self._paths)
            if module is not None:
                self._look.fast[id(module)] = _FAST[arg.__name__]

    def _forward(self, frame: FrameType) -> None:
        names = frame.f_code.co_varnames
        module = frame.f_locals.get(names[0]) if names else None
        if id(module) not in self._paths or id(module) in self._look.direct:
            return
        above, has_own_call = frame.f_back, False
        for _ in range(_HIGHEST):
            if above is None or above.f_code in self._forwards:
                break
            if above.f_code.co_name == _CALL and above.f_locals.get("self") is module:
                return
            is_call = above.f_code.co_name == "__call__"
            has_own_call |= is_call and above.f_locals.get("self") is module
            above = above.f_back
        if has_own_call:
            self._look.overridden.add(id(module))
        caller = frame.f_back
        within = None if caller is None else _module_of(caller, self._paths)
        self._look.direct[id(module)] = Use(
            "forward", self._paths.get(id(within), ""), _line_of(frame.f_back)
        )


@final
class Uses(TorchFunctionMode):
    """Notes which modules' own parameters are used by operations of torch, and where."""

    def __init__(self, nodes: list[ModuleNode], look: Look) -> None:
        super().__init__()
        self._look = look
        self._paths = {id(node.module): node.path for node in nodes}
        self._owners: dict[int, list[int]] = {}
        for node in nodes:
            for parameter in parameters(node.module).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(id(node.module))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Torch is about to run an operation."""
        result = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        for value in given:
            parts = value if isinstance(value, list | tuple) else (value,)
            for part in parts:
                if isinstance(part, Tensor) and id(part) in self._owners:
                    self._note(func, part, result)
        return result

    def _note(self, func: Any, parameter: Tensor, result: Any) -> None:
        if next(tree.tensors(result), None) is None:
            return  # it was asked for its shape or dtype
        frame = sys._getframe(2)
        within = self._paths.get(id(_module_of(frame, self._paths)), "")
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = f".{getattr(getattr(func, '__self__', None), '__name__', 'data')}"
        for owner in self._owners[id(parameter)]:
            self._look.used.setdefault(owner, Use(name, within, _line_of(frame)))


def foreign_hooks(nodes: list[ModuleNode]) -> Iterator[tuple[str, str, CodeType]]:
    """The code of every forward hook and forward-pre hook that is neither torch's nor ours."""
    found = [("(every module)", kind, hook) for kind, hook in global_hooks()]
    for node in nodes:
        for kind in ("forward_pre", "forward"):
            found += [(node.path, kind, hook) for hook in hook_dict(node.module, kind).values()]
    for path, kind, hook in found:
        code = _code_of(hook)
        if kind in ("forward_pre", "forward") and code is not None and not _is_known(code):
            yield path, kind, code


def _code(module: nn.Module) -> CodeType | None:
    return _code_of(getattr(module, "forward", None))


def _code_of(function: Callable[..., Any] | None) -> CodeType | None:
    """The code of a function as it was written, decorators and partials left out."""
    while function is not None and hasattr(function, "func"):
        function = function.func
    if function is None:
        return None
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = vars(type(function)).get("__call__", function)
    found = getattr(inspect.unwrap(function), "__code__", None)
    return found if isinstance(found, CodeType) else None


def _module_of(frame: FrameType | None, paths: dict[int, str]) -> Any:
    """The innermost module that is being called."""
    while frame is not None:
        if frame.f_code.co_name == _CALL and id(frame.f_locals.get("self")) in paths:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None


def _line_of(frame: FrameType | None) -> str:
    """The first line up the stack that is neither torch's nor ours."""
    while frame is not None:
        if not _is_known(frame.f_code):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_known(code: CodeType) -> bool:
    return code.co_filename.startswith((_TORCH, _OURS))
