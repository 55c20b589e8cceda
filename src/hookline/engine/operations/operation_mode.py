"""The function mode that hands the calls of a module's own forward to operations."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, final

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.display.text import first_line
from hookline.engine.function_names import Function, functions_by_name
from hookline.engine.operations.attention_parts import (
    MULTIHEAD,
    PARTS,
    Attention,
    Call,
    MultiheadCall,
    hides_attention,
)
from hookline.engine.operations.operation import Operation
from hookline.engine.operations.own_calls import OwnCalls
from hookline.engine.torch_private.dynamo import TracingAttachError, run_at_trace_time
from hookline.engine.torch_private.graph.function_modes import (
    OwnMode,
    calling_module,
    drop_modes,
    method_name_for_dynamo,
    n_modes,
    pop_if_innermost,
    run_eagerly_by_itself,
)
from hookline.errors import AttachError
from hookline.util.weak_map import WeakIdentityMap

# What the note begins with that an error of a hook gets; the site follows.
NOTE_OF_HOOK = "hookline: raised by the hook at "


@final
class OperationMode(OwnMode):
    """The function mode that hands a module's own calls of functions to their operations.

    Args:
        module: the module.

    Attributes:
        calls: what stands for the functions whose operations have hooks.
        in_graph: the same by number, for compiled code.
        wanted: the names of the operations with hooks. Compiled code is guarded on it.
        attention: the parts of the module's attention.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.calls: dict[Function, Call] = {}
        self.in_graph: dict[str, Call] = {}
        self.wanted: str = ""
        self.attention: Attention = Attention(module)
        self.module_id: int = id(module)
        self._by_name: dict[str, Operation] = {}
        self._copies: dict[Function, Operation] = {}
        self._own = OwnCalls(module)

    def begin(self) -> None:
        """Turn the mode on, as a call of the module begins."""
        if self.attention.parts:
            self.attention.begin()
        self.turn_on()

    def end(self, *, is_whole: bool) -> None:
        """Turn the mode off, as a call of the module ends.

        Args:
            is_whole: whether the module has returned.
        """
        if is_dynamo_compiling():
            self.turn_off()
        else:
            pop_if_innermost(self)  # it is not on, where an earlier hook has raised
        if self.attention.parts:
            self.attention.end(is_whole=is_whole)

    def turn_on(self) -> None:
        """Turn the mode on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def turn_off(self) -> None:
        """Turn the mode off, which is the innermost one."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def operation(self, name: str) -> Operation:
        """Return the operation of a name."""
        operation = self._by_name.get(name)
        if operation is None:
            operation = self._by_name[name] = Operation(name)
        return operation

    def hooked_operations(self) -> list[Operation]:
        """Return the operations that have hooks at present."""
        operations = list(self._by_name.values())
        return [operation for operation in operations if operation.is_hooked]

    def update_hooked_functions(self) -> None:
        """Look for the functions whose operations have hooks at present, and for no others."""
        hooked = {operation.name: operation for operation in self.hooked_operations()}
        operations = {
            function: self._operation_for(operation, function)
            for name, operation in hooked.items()
            for function in functions_by_name().get(name, ())
        }
        # Also where the last hook has left: an operation must not hold on to its owner.
        for operation in (*self._by_name.values(), *self._copies.values()):
            operation.update_hook_needs()
        parts = {name: hooked[name] for name in PARTS if name in hooked}
        self.attention.set_parts(parts)
        calls: dict[Function, Call] = {**operations}
        if parts:
            calls |= self.attention.replacement_calls(operations)
            calls[MULTIHEAD] = MultiheadCall(self, operations.get(MULTIHEAD))
        self.calls = calls
        self.in_graph = {f"{number}": call for number, call in enumerate(calls.values())}
        self.wanted = " ".join(sorted(hooked))

    def _operation_for(self, operation: Operation, function: Function) -> Operation:
        # Always the same copy, on which compiled code is guarded.
        copy = self._copies.get(function)
        if copy is None:
            copy = self._copies[function] = operation.with_function(function)
        return copy

    @run_eagerly_by_itself
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, through its operation if the module itself calls it."""
        kwargs = {} if kwargs is None else kwargs
        if is_dynamo_compiling():
            return self._call_in_graph(func, args, kwargs)
        call = self.calls.get(func)
        is_watched = call is not None or (self.attention.parts and hides_attention(func))
        if not is_watched or not self._own.is_own(sys._getframe(1)):
            return func(*args, **kwargs)
        if call is None:
            return self.attention.refuse(func)
        try:
            return call.call(args, kwargs)
        except TypeError as error:
            _raise_from_hook(error)
            raise

    def _call_in_graph(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call a function while the call is compiled."""
        key = self._key_in_graph(func, self.wanted)
        if not key:
            return func(*args, **kwargs)
        if key[0] == ".":
            return getattr(args[0], key[1:])(*args[1:], **kwargs)
        return self.in_graph[key].call(args, kwargs)

    @run_at_trace_time
    def _key_in_graph(self, func: Any, wanted: str) -> str:
        """Tell how to call a function in a graph. Dynamo itself finds no functions in dicts.

        Args:
            func: the function.
            wanted: `self.wanted`, so that the graph is guarded on it.

        Returns:
            The key of what stands for the call, if the module itself makes it. Otherwise a dot and
            the name, if the function is a method that dynamo traces only by its name; "" for any
            other function.
        """
        call = self.calls.get(func)
        is_watched = call is not None or (self.attention.parts and hides_attention(func))
        if is_watched and self._own.is_own_in_graph():
            if call is None:
                self.attention.refuse(func, TracingAttachError)
            return next(key for key, other in self.in_graph.items() if other is call)
        name = method_name_for_dynamo(func)
        return f".{name}" if name else ""


def _raise_from_hook(error: TypeError) -> None:
    """Raise an error of a hook as one that an operator of Python lets through.

    In `x += y`, Python takes a TypeError for an unsupported operand, and computes `x + y`, without
    the hook; `x == y` is then False.

    Raises:
        AttachError: the error is of a hook, not of torch's function.
    """
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(NOTE_OF_HOOK)]
    if notes:
        raise AttachError(
            f"a function at {notes[0].removeprefix(NOTE_OF_HOOK).partition(' ')[0]} raised"
            f" TypeError: {first_line(error)}"
            "\nMend the function. Python would hide a TypeError in an operator, such as x + y."
        ) from error


@final
class PaddedMode(OwnMode):
    """A function mode that changes no call. While one is on, torch's encoder nests no tensors."""


_modes: WeakIdentityMap[OperationMode] = WeakIdentityMap()


def operation_mode(module: nn.Module) -> OperationMode:
    """Return the mode of a module. All lines share it."""
    return _modes.get_or_add(module, lambda: OperationMode(module))


def hooked_operations_on(module: nn.Module) -> list[Operation]:
    """Return the operations of a module that have hooks."""
    mode = _modes.get(module)
    return [] if mode is None else mode.hooked_operations()


def drop_leftover_modes(frame: FrameType | None) -> None:
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
            isinstance(mode, PaddedMode)
            or (
                isinstance(mode, OperationMode)
                and (mode.module_id not in running or not mode.calls)
            )
        )
    )
