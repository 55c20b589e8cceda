"""Hook the functions of torch that a module's own forward calls.

An `Operation` is a module that stands for the calls of one function. Its forward is the function.
While the module around it runs, a function mode of torch hands the calls of the function to the
operation, and torch calls the operation's hooks.
"""

from __future__ import annotations

import functools
import sys
import weakref
from types import FrameType
from typing import Any, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode

from hookline.engine.operations.names import Function, argument_names, functions
from hookline.engine.torch_private.dynamo import while_tracing
from hookline.engine.torch_private.graph.function_modes import (
    calling_module,
    calling_modules_of_graph,
    drop_modes,
    is_of_hook,
    method_name,
    n_modes,
)
from hookline.engine.torch_private.hooks import hook_dict
from hookline.util.weak_map import WeakIdentityMap


@final
class Operation(nn.Module):
    """The calls of one function in the forward of a module. Hooks on the operation see the calls.

    Args:
        name: the name of the function.

    Attributes:
        writes: whether the function writes to its first argument, as `relu_` does.
        place_of_inplace: the place of the argument `inplace`, if the function has one.
        may_change: whether a hook may change the arguments or the result.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.writes = False
        self.may_change = False
        self.place_of_inplace: int | None = None

    def forward(self, value: Any) -> Any:
        """Return the value: the forward of an operation whose value is computed elsewhere."""
        return value

    def calling(self, function: Function) -> Operation:
        """Return a copy whose forward is this function. The copy shares the hooks."""
        copy = nn.Module.__new__(Operation)
        copy.__dict__.update(self.__dict__)
        copy.__dict__["forward"] = by_method(function)
        copy.writes = _writes(function.__name__)
        names = argument_names(function).names
        copy.place_of_inplace = names.index("inplace") if "inplace" in names else None
        return copy

    def look(self) -> None:
        """Look at the hooks, which have changed."""
        self.may_change = any(
            getattr(getattr(hook, "__self__", None), "changes_values", True)
            for kind in ("forward_pre", "forward")
            for hook in list(hook_dict(self, kind).values())
        )

    def target(self, args: Any, kwargs: Any) -> Any:
        """Return the tensor that a call writes to; None for most calls.

        A statement such as `x.relu_()` uses this tensor afterwards, and not the call's result.
        """
        if "out" in kwargs:
            return kwargs["out"]
        place = self.place_of_inplace
        is_told = place is not None and (
            kwargs.get("inplace", False) or (len(args) > place and args[place])
        )
        if not is_told and not self.writes:
            return None
        return args[0] if args else kwargs.get("input")

    @property
    def is_hooked(self) -> bool:
        """Tell whether the operation has hooks."""
        return any(hook_dict(self, kind) for kind in _KINDS)

    def extra_repr(self) -> str:
        """Return the name of the function: for `repr`."""
        return self.name


_KINDS = ("forward_pre", "forward", "backward_pre", "backward")


@final
class OperationMode(TorchFunctionMode):
    """The function mode that hands a module's own calls of functions to their operations.

    Args:
        module: the module.

    Attributes:
        operations: the operation of each function, where it has hooks.
        in_graph: the same operations by number, for compiled code.
        wanted: the names of these operations. Compiled code is guarded on it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.operations: dict[Function, Operation] = {}
        self.in_graph: dict[str, Operation] = {}
        self.wanted = ""
        self._by_name: dict[str, Operation] = {}
        self._copies: dict[Function, Operation] = {}
        self._module = weakref.ref(module)
        self.module_id = id(module)
        self._parts: WeakIdentityMap[bool] = WeakIdentityMap()

    def begin(self) -> None:
        """Turn the mode on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Turn the mode off, which is the innermost one."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def operation(self, name: str) -> Operation:
        """Return the operation of a name."""
        operation = self._by_name.get(name)
        if operation is None:
            operation = self._by_name[name] = Operation(name)
        return operation

    def update(self) -> None:
        """Look for the functions whose operations have hooks at present, and for no others."""
        self.operations = {
            function: self._copy(operation, function)
            for name, operation in list(self._by_name.items())
            if operation.is_hooked
            for function in functions().get(name, ())
        }
        for operation in self.operations.values():
            operation.look()
        numbered = enumerate(self.operations.items())
        self.in_graph = {f"{number}": operation for number, (_, operation) in numbered}
        self.wanted = " ".join(sorted({one.name for one in self.operations.values()}))

    def _copy(self, operation: Operation, function: Function) -> Operation:
        # Always the same copy, on which compiled code is guarded.
        copy = self._copies.get(function)
        if copy is None:
            copy = self._copies[function] = operation.calling(function)
        return copy

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, through its operation if the module itself calls it."""
        kwargs = {} if kwargs is None else kwargs
        if is_dynamo_compiling():
            return self._call_in_graph(func, args, kwargs)
        operation = self.operations.get(func)
        if operation is None or not self._is_own():
            return func(*args, **kwargs)
        return _call(operation, args, kwargs)

    def _call_in_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function while the call is compiled."""
        key = self._key_in_graph(func, self.wanted)
        if not key:
            return func(*args, **kwargs)
        if key[0] == ".":
            return getattr(args[0], key[1:])(*args[1:], **kwargs)
        return _call(self.in_graph[key], args, kwargs)

    @while_tracing
    def _key_in_graph(self, func: Any, wanted: str) -> str:
        """Tell how to call a function in a graph. Dynamo itself finds no functions in dicts.

        Args:
            func: the function.
            wanted: `self.wanted`, so that the graph is guarded on it.

        Returns:
            The key of the operation that stands for the call. Otherwise a dot and the name, if the
            function is a method that dynamo traces only by its name; "" for any other function.
        """
        operation = self.operations.get(func)
        if operation is None or not self._is_own_in_graph():
            name = method_name(func)
            return f".{name}" if name else ""
        return next(key for key, copy in self.in_graph.items() if copy is operation)

    def _is_own(self) -> bool:
        """Tell whether the module itself makes the present call, and not a module inside it."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            module, code, frame = calling_module(frame)
            if frame is None or type(module) is Operation:
                return False
            if id(module) == self.module_id:
                return not is_of_hook(code, module)
            if self._is_part(module):
                return False
            frame = frame.f_back  # the forward has made this module: nn.Softmax(dim=-1)(x)
        return False

    def _is_own_in_graph(self) -> bool:
        for module in calling_modules_of_graph():
            if id(module) == self.module_id:
                return True
            if type(module) is Operation or self._is_part(module):
                return False
        return False

    def _is_part(self, module: nn.Module) -> bool:
        """Tell whether a module is inside the module of this mode."""
        if module in self._parts:
            return True
        own = self._module()
        for part in () if own is None else own.modules():
            self._parts[part] = True
        return module in self._parts


def _call(operation: Operation, args: Any, kwargs: Any) -> Any:
    """Call a function by its operation, and write a changed result to where the function writes."""
    target = operation.target(args, kwargs) if operation.may_change else None
    if not isinstance(target, Tensor):
        return operation(*args, **kwargs)
    if args and args[0] is target:
        # Backward may need what the function itself wrote.
        new = operation(target.clone(), *args[1:], **kwargs)
    else:
        new = operation(*args, **kwargs)
    return target.copy_(new)


@functools.cache
def by_method(function: Function) -> Function:
    """Return a function that dynamo can trace in place of this one, most often itself."""
    name = method_name(function)
    if not name:
        return function

    @functools.wraps(function)
    def method(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(input, name)(*args, **kwargs)

    return method


def _writes(name: str) -> bool:
    """Tell whether a function of this name writes to its first argument, as `relu_` does."""
    if name.startswith("__"):
        return name[2] == "i" and hasattr(Tensor, f"__{name[3:]}")  # x &= y, but not ~x
    return name.endswith("_")


_modes: WeakIdentityMap[OperationMode] = WeakIdentityMap()


def mode_of(module: nn.Module) -> OperationMode:
    """Return the mode of a module. All lines share it."""
    return _modes.get_or_add(module, lambda: OperationMode(module))


def drop_left(frame: FrameType | None) -> None:
    """Turn off the modes that nobody will turn off: an interrupted run has left them on.

    Args:
        frame: the frame from which the stack is walked for running modules.
    """
    if not n_modes():
        return
    running = set()
    while frame is not None:
        module, _, frame = calling_module(frame)
        running.add(id(module))
        frame = frame and frame.f_back
    drop_modes(
        lambda mode: (
            isinstance(mode, OperationMode)
            and (mode.module_id not in running or not mode.operations)
        )
    )
