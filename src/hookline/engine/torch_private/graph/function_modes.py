"""torch's stack of function modes, and the frames of a module's call, eager or traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from types import CodeType, FrameType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from hookline.engine.torch_private.dynamo import OLD_DYNAMO
from hookline.util.walk_stack import walk_stack

# The code of a module's call: the outer function, and the inner one that calls hooks and forward.
_CALL = nn.Module._call_impl.__code__
_INNER = next(
    (c for c in _CALL.co_consts if isinstance(c, CodeType) and c.co_name == "inner"), None
)

# Returns the number of function modes that are on in this thread. Torch's own function, because it
# is called in each pass.
n_modes: Callable[[], int] = torch._C._len_torch_function_stack
_mode_at: Callable[[int], Any] = torch._C._get_function_stack_at
_push_mode: Callable[[Any], None] = torch._C._push_on_torch_function_stack
_pop_mode: Callable[[], Any] = torch._C._pop_torch_function_stack
_not_overridden: Any = torch._C._disabled_torch_function_impl  # of parameters, for example


def run_eagerly_by_itself(method: Callable[..., Any]) -> Any:
    """Mark a method that dynamo compiles only as part of code that calls it, not by itself.

    Called from eager code, it runs with all that it calls as it is written. Dynamo would compile it
    there, where it has given up on the caller, as on one with an `nn.LSTM`. It does not look which
    function a mode is given, and would call the one of an earlier time.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(method.__code__, frames._FrameExecStrategy(skip, skip))
    return method


class OwnMode(TorchFunctionMode):
    """A function mode of hookline: it hands on each call as it is, unless a subclass says else."""

    @run_eagerly_by_itself
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        return func(*args, **({} if kwargs is None else kwargs))


def has_torch_function_override(tensors: Iterable[Tensor]) -> bool:
    """Tell whether a class of tensors, or a mode of other code, takes part in calls of torch."""
    modes = [_mode_at(place) for place in range(n_modes())]
    kinds = {type(tensor) for tensor in tensors} - {Tensor}
    return not all(isinstance(mode, OwnMode) for mode in modes) or any(
        kind.__torch_function__ is not _not_overridden for kind in kinds
    )


def pop_if_innermost(mode: object) -> None:
    """Turn a function mode off, if it is the innermost one."""
    n_on = n_modes()
    if n_on and _mode_at(n_on - 1) is mode:
        _pop_mode()


def drop_modes(is_unwanted: Callable[[Any], bool]) -> None:
    """Turn the unwanted function modes of this thread off."""
    modes = [_mode_at(place) for place in range(n_modes())]
    if not any(map(is_unwanted, modes)):
        return
    while n_modes():
        _pop_mode()
    for mode in modes:
        if not is_unwanted(mode):
            _push_mode(mode)


def calling_module(frame: FrameType | None) -> tuple[Any, CodeType | None, FrameType | None]:
    """Find the innermost call of a module on the stack.

    Args:
        frame: the frame from which the stack is walked.

    Returns:
        The module; the code that it runs, which is that of its forward or of a hook; the frame of
        the call. None for each, if no module runs.
    """
    running = None
    while frame is not None:
        code = frame.f_code
        if code is _CALL:
            return frame.f_locals["self"], running, frame
        if code is not _INNER:
            running = code
        frame = frame.f_back
    return None, None, None


def runs_compiled_graph(frame: FrameType | None, outermost: FrameType) -> bool:
    """Tell whether compiled code runs between two frames on the stack.

    Args:
        frame: the inner frame.
        outermost: the outer frame.
    """
    return any(
        each.f_code.co_name == "_fn" and _is_compiled_graph(each.f_locals.get("fn"), each.f_back)
        for each in takewhile(lambda each: each is not outermost, walk_stack(frame))
    )


def _is_compiled_graph(function: object, caller: FrameType | None) -> bool:
    """Tell whether a function is a graph that dynamo has compiled of the caller's code.

    Such code calls its graphs by global names. Each holds a function that turns dynamo off around
    the graph, as `torch.compiler.disable` does around a function of the user.
    """
    return caller is not None and any(
        getattr(caller.f_globals.get(name), "_torchdynamo_orig_callable", None) is function
        for name in caller.f_code.co_names
        if name.startswith("__compiled_fn")
    )


def is_hook_code(code: CodeType | None, module: nn.Module) -> bool:
    """Tell whether a module that runs this code runs a hook, and not its forward."""
    return code is not _code_of(module.forward) and any(
        code is _code_of(hook)
        for hooks in (
            module._forward_pre_hooks, module._forward_hooks,
            nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks,
        )
        for hook in list(hooks.values())
    )  # fmt: skip


def _code_of(function: Any) -> CodeType | None:
    function = getattr(function, "func", function)  # of a partial
    code = getattr(function, "__code__", None)
    return code if code is not None else getattr(type(function).__call__, "__code__", None)


def traced_calling_modules() -> Iterator[nn.Module]:
    """Yield the modules whose calls dynamo traces at present, innermost first."""
    symbolic = sys.modules["torch._dynamo.symbolic_convert"]
    frame: Any = symbolic.InstructionTranslator.current_tx().output.current_tx
    while frame is not None:
        code = frame.f_code
        # Dynamo goes past the call of a module without hooks, right into its forward.
        if code.co_name in ("forward", "_wrapped_call_impl") and code.co_argcount:
            module = _traced_local(frame, code.co_varnames[0])
            if isinstance(module, nn.Module):
                yield module
        frame = getattr(frame, "parent", None)


def _traced_local(frame: Any, name: str) -> object:
    """Return the value of a local variable in a frame that dynamo traces; None if not known."""
    variable = frame.symbolic_locals.get(name)
    if type(variable).__name__.endswith("CellVariable"):
        variable = frame.output.side_effects.load_cell(variable)
    if hasattr(variable, "realize"):
        variable = variable.realize()
    value = getattr(variable, "value", None)
    if value is None and variable is not None and variable.is_python_constant():
        value = variable.as_python_constant()
    return value


def method_name_for_dynamo(function: Callable[..., Any]) -> str:
    """Return the name of a tensor's method that calls `super()`; "" for other functions.

    Dynamo traces such a method only if it is called by its name. Dynamo before torch 2.13 traces no
    method in C otherwise, either.
    """
    if OLD_DYNAMO and isinstance(function, MethodDescriptorType):
        return function.__name__
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    name: str = getattr(function, "__name__", "")
    return name if "__class__" in names and vars(Tensor).get(name) is function else ""


def is_exported(module: nn.Module) -> bool:
    """Tell whether a module runs a graph of `torch.ops`, as a program of torch.export does."""
    graph = getattr(module, "graph", None)
    return isinstance(graph, torch.fx.Graph) and any(
        isinstance(node.target, OpOverload) for node in graph.nodes
    )
