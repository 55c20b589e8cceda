"""Observe a model with nothing attached: which forwards ran, and who called them.

Hooks only see calls through a module's `__call__`. Python's profiling function sees every call,
including a direct `.forward`. It changes nothing in the model, and unlike a hook it leaves torch's
fast paths on. The use of weights is observed in a run of its own, because torch's function mode
switches the fast paths off.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookline.engine import ModuleNode, global_hooks, hook_dict, own_parameters
from hookline.engine.pytree import tree
from hookline.util.walk_stack import walk_stack

# torch's own name for the method that every call of a module goes through.
_CALL = "_call_impl"
# The functions that torch may run in place of whole modules.
_FAST = {
    "_transformer_encoder_layer_fwd": "TransformerEncoderLayer",
    "_native_multi_head_attention": "MultiheadAttention",
}
_TORCH = str(Path(nn.__file__).parent.parent)
_OURS = str(Path(__file__).parents[2])
_HIGHEST = 25  # the most frames between a module's call and its forward: decorators


class DirectUse(NamedTuple):
    """An action that bypassed a module's call: the operation, the calling module, and the line."""

    by: str
    within: str
    where: str


@final
@dataclass
class Observations:
    """The observations of one run; modules are keyed by id."""

    called: set[int] = field(default_factory=set)  # the modules that were called through `__call__`
    # The modules whose forward was called directly, and the caller.
    direct: dict[int, DirectUse] = field(default_factory=dict)
    # The modules of `direct` whose class has a `__call__` of its own.
    overridden: set[int] = field(default_factory=set)
    # The modules that torch ran as one operation, with their kind.
    fast: dict[int, str] = field(default_factory=dict)
    # The modules whose own parameters an operation used, and the operation.
    used: dict[int, DirectUse] = field(default_factory=dict)
    # The code of the foreign hooks that returned a value.
    replacing: set[CodeType] = field(default_factory=set)

    @property
    def ran(self) -> set[int]:
        """The modules whose forward ran."""
        return self.called | self.direct.keys()


@contextmanager
def observe_calls(nodes: list[ModuleNode]) -> Iterator[Observations]:
    """Observe the modules that run in the block, in this thread; no profiler may be on."""
    observations = Observations()
    sys.setprofile(_CallProfiler(nodes, observations))
    try:
        yield observations
    finally:
        sys.setprofile(None)


@final
class _CallProfiler:
    """The profiling function: note calls, direct forwards, fused operations and hooks' results."""

    def __init__(self, nodes: list[ModuleNode], observations: Observations) -> None:
        self._paths = {id(node.module): node.path for node in nodes}
        forwards = (_unwrapped_code(getattr(node.module, "forward", None)) for node in nodes)
        self._forwards = set(filter(None, forwards))
        self._hooks = {code for _, _, code in foreign_hooks(nodes)}
        self._observations = observations

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            if code.co_name == _CALL:
                self._observations.called.add(id(frame.f_locals.get("self")))
            elif code in self._forwards:
                self._record_direct_forward(frame)
        elif event == "return":
            if arg is not None and code in self._hooks:
                self._observations.replacing.add(code)
        elif event == "c_call" and getattr(arg, "__name__", "") in _FAST:
            module = _calling_module(frame, self._paths)
            if module is not None:
                self._observations.fast[id(module)] = _FAST[arg.__name__]

    def _record_direct_forward(self, frame: FrameType) -> None:
        names = frame.f_code.co_varnames
        module = frame.f_locals.get(names[0]) if names else None
        if id(module) not in self._paths or id(module) in self._observations.direct:
            return
        has_own_call = False
        for above in islice(walk_stack(frame.f_back), _HIGHEST):
            if above.f_code in self._forwards:
                break
            if above.f_code.co_name == _CALL and above.f_locals.get("self") is module:
                return
            is_call = above.f_code.co_name == "__call__"
            has_own_call |= is_call and above.f_locals.get("self") is module
        if has_own_call:
            self._observations.overridden.add(id(module))
        within = _calling_module(frame.f_back, self._paths)
        self._observations.direct[id(module)] = DirectUse(
            "forward", self._paths.get(id(within), ""), _user_line(frame.f_back)
        )


@final
class WeightUses(TorchFunctionMode):
    """Note which modules' own parameters torch's operations use, and where."""

    def __init__(self, nodes: list[ModuleNode], observations: Observations) -> None:
        super().__init__()
        self._observations = observations
        self._paths = {id(node.module): node.path for node in nodes}
        self._owners: dict[int, list[int]] = {}
        for node in nodes:
            for parameter in own_parameters(node.module).values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(id(node.module))

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and note the parameters among its arguments."""
        result = func(*args, **(kwargs or {}))
        values = [*args, *(kwargs or {}).values()]
        for value in values:
            parts = value if isinstance(value, list | tuple) else (value,)
            for part in parts:
                if isinstance(part, Tensor) and id(part) in self._owners:
                    self._record_use(func, part, result)
        return result

    def _record_use(self, func: Any, parameter: Tensor, result: Any) -> None:
        if next(tree.tensors(result), None) is None:
            return  # its shape or dtype was read
        frame = sys._getframe(2)
        within = self._paths.get(id(_calling_module(frame, self._paths)), "")
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = f".{getattr(getattr(func, '__self__', None), '__name__', 'data')}"
        for owner in self._owners[id(parameter)]:
            self._observations.used.setdefault(owner, DirectUse(name, within, _user_line(frame)))


def foreign_hooks(nodes: list[ModuleNode]) -> Iterator[tuple[str, str, CodeType]]:
    """Yield the path, kind and code of every foreign forward and forward-pre hook."""
    hooks = [("(every module)", kind, hook) for kind, hook in global_hooks()]
    for node in nodes:
        for kind in ("forward_pre", "forward"):
            hooks += [(node.path, kind, hook) for hook in hook_dict(node.module, kind).values()]
    for path, kind, hook in hooks:
        code = _unwrapped_code(hook)
        if kind in ("forward_pre", "forward") and code is not None and not _is_of_library(code):
            yield path, kind, code


def _unwrapped_code(function: Callable[..., Any] | None) -> CodeType | None:
    """Return the code of a function as it was written, without decorators and partials."""
    while function is not None and hasattr(function, "func"):
        function = function.func
    if function is None:
        return None
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = vars(type(function)).get("__call__", function)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _calling_module(frame: FrameType | None, paths: dict[int, str]) -> Any:
    """Return the innermost module that is being called."""
    calls = (above for above in walk_stack(frame) if above.f_code.co_name == _CALL)
    modules = (call.f_locals.get("self") for call in calls)
    return next((module for module in modules if id(module) in paths), None)


def _user_line(frame: FrameType | None) -> str:
    """Return the file and line of the innermost frame that is neither torch's nor hookline's."""
    users = (above for above in walk_stack(frame) if not _is_of_library(above.f_code))
    return next((f"{user.f_code.co_filename}:{user.f_lineno}" for user in users), "")


def _is_of_library(code: CodeType) -> bool:
    return code.co_filename.startswith((_TORCH, _OURS))
