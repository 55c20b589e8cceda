"""Every private name of torch.compile that hookline uses.

Nothing here loads dynamo. Nothing is compiled before dynamo is loaded, and loading it takes a
second.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.errors import AttachError
from hookline.util.optional_imports import module_if_imported
from hookline.util.walk_stack import walk_stack
from hookline.util.weak_map import WeakIdentityMap

# Dynamo before torch 2.13 has few ids in a graph, and calls the tensor hooks in a graph in reverse
# order. Dynamo of torch 2.11 makes named tuples only by their own `__new__`.
OLD_DYNAMO = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def run_at_trace_time(method: Callable[..., Any]) -> Any:
    """Mark a method to run when code that calls it is compiled, and never when that code runs."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


class TracingAttachError(AttachError, AssertionError):
    """An `AttachError` that is raised while code is compiled.

    Dynamo passes an `AssertionError` on as it is, and replaces most other errors by its own.
    """


def dynamo_config() -> Any:
    """Return dynamo's settings; None until dynamo is loaded, so that nothing is compiled."""
    return getattr(module_if_imported("torch._dynamo"), "config", None)


def may_have_compiled() -> bool:
    """Tell whether there may be compiled code. Many packages load dynamo and compile nothing."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


# Hooks in a checkpointed region keep the values of the first run.
_SETTINGS = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}


class _ThreadSettings(threading.local):
    """The owners of dynamo's settings in a thread, and the earlier values."""

    def __init__(self) -> None:
        self.by: set[DynamoSettings] = set()
        self.before: dict[str, Any] = {}


_in_thread = _ThreadSettings()


@final
class DynamoSettings:
    """Settings of dynamo while compiled code runs that a line sees.

    Dynamo keeps settings for each context. So a setting is restored in the context that made it, or
    not at all. Lines may end in any order: the last line restores the values from before the first.
    """

    _by: set[DynamoSettings] | None = None

    def begin(self) -> None:
        """Apply the settings."""
        self._by = _in_thread.by
        self._by.add(self)
        config = dynamo_config()
        for name, value in _SETTINGS.items():
            _in_thread.before.setdefault(name, getattr(config, name))
            setattr(config, name, value)

    def end(self) -> None:
        """Restore the earlier settings, if this is the last owner."""
        by, self._by = self._by, None
        if by is None:
            return
        by.discard(self)
        if by is _in_thread.by and not by:
            while _in_thread.before:
                name, value = next(iter(_in_thread.before.items()))
                setattr(dynamo_config(), name, value)
                del _in_thread.before[name]


def is_compile_disabled(function: Callable[..., Any]) -> bool:
    """Tell whether a function has `torch.compiler.disable`, which a copy of its code would lose."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def may_have_compiled_forward(module: nn.Module) -> bool:
    """Tell whether a module's forward was compiled by itself."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    entries = getattr(frames, "_debug_get_cache_entry_list", None)
    code = getattr(getattr(module.forward, "__func__", None), "__code__", None)
    return entries is None or code is None or bool(entries(code))


def is_untraceable(error: BaseException) -> bool:
    """Tell whether an error says that dynamo cannot trace the code."""
    return type(error).__name__ in ("Unsupported", "TorchRuntimeError", "UserError")


def is_untraceable_in_operator(error: BaseException) -> bool:
    """Tell whether an error says that dynamo cannot trace a function given to an operator."""
    return type(error).__name__ == "UncapturedHigherOrderOpError"


def is_lost_in_nested_operator(error: BaseException) -> bool:
    """Tell whether dynamo lost what a hook keeps in a checkpoint that is inside another."""
    is_internal = type(error).__name__ == "InternalTorchDynamoError"
    return is_internal and "does not belong to this Graph" in str(error)


def is_recompile_limit(error: BaseException) -> bool:
    """Tell whether an error says that the recompile limit was hit."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def never_compile_alone(functions: Iterable[types.FunctionType]) -> None:
    """Keep functions from being compiled on their own; they are compiled only within other code.

    torch calls the hooks of a compiled model from code that is not compiled.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    strategy = getattr(frames, "FrameExecStrategy", None)
    if frames is not None and strategy is not None:
        skip = strategy(frames.FrameAction.SKIP, frames.FrameAction.SKIP)
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, skip)


_hooks_met = itertools.count()


@run_at_trace_time
def next_hook_number() -> str:
    """Return a number for a hook, in the order in which dynamo traces hooks."""
    return str(next(_hooks_met))


def graph_input_codes(tensors: list[Tensor]) -> str:
    """Tell which tensors the graph being compiled gets from outside; only for code being compiled.

    Returns:
        A "1" for each tensor from outside, a "2" for each of these that the graph has written to,
        and a "0" for each tensor that the graph computes.
    """
    torch._dynamo.comptime.comptime(_store_input_codes)
    return _stored_input_codes()  # type: ignore[no-any-return]


class _InputCodes(threading.local):
    noted = ""


_sources = _InputCodes()


def _store_input_codes(context: Any) -> None:
    # torch's name for access to dynamo's variables, which are not public.
    tensors = context.get_local("tensors")._i_will_not_complain_if_bc_breaks_VariableTracker()
    _sources.noted = "".join(map(_input_code, tensors.realize().items))


def _input_code(variable: Any) -> str:
    if variable.source is None:
        return "0"
    value = _example_value(variable.as_proxy().node)
    return "1" if value is None or value._version == 0 else "2"


@run_at_trace_time
def _stored_input_codes() -> str:
    return _sources.noted


def keep_call_in_graphs(function: Callable[..., Any]) -> None:
    """Make dynamo put calls of a function into its graphs as they are, and keep them there."""
    torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    torch.fx.node.has_side_effect(function)


def call_tensor_shares_memory() -> bool:
    """Tell whether the tensor of the present call in a graph is a view that shares memory.

    The view shares memory with several of the graph's outputs, or with an input and an output.
    AOTAutograd then returns the memory and makes these outputs again outside the graph. Their
    gradients bypass the views in the graph. Only for functions of `keep_call_in_graphs`.
    """
    node: Any = next((node for _, node in _interpreters_and_nodes()), None)
    value = None if node is None else _example_value(node.args[0])
    if value is None or not value._is_view():
        return False
    memory = _storage_id(value)
    inputs = [other for other in node.graph.nodes if other.op == "placeholder"]
    outputs = next(iter(reversed(node.graph.nodes))).all_input_nodes
    n_outputs = sum(_is_differentiable_alias(other, memory) for other in outputs)
    is_of_input = any(_is_differentiable_alias(other, memory) for other in inputs)
    return n_outputs > 1 or (n_outputs == 1 and is_of_input)


def at_end_of_traced_forward(function: Callable[[], None]) -> bool:
    """Call a function between the forward and the backward of the graph that is being traced.

    Only for functions of `keep_call_in_graphs`.

    Returns:
        False if no tracer runs the graph; a backend may run graphs as they are.
    """
    is_traced = False
    for interpreter, _ in _interpreters_and_nodes():
        end = vars(interpreter).get("output")
        if end is None:
            end = interpreter.output = _EndOfGraph(interpreter)
        end.functions.append(function)
        is_traced = True
    return is_traced


@final
class _EndOfGraph:
    """A replacement for an interpreter's `output`, for one call."""

    __slots__ = ("functions", "interpreter")

    def __init__(self, interpreter: torch.fx.Interpreter) -> None:
        self.interpreter = interpreter
        self.functions: list[Callable[[], None]] = []

    def __call__(self, *args: Any) -> Any:
        del self.interpreter.output
        for function in self.functions:
            function()
        return self.interpreter.output(*args)


def _interpreters_and_nodes() -> Iterator[tuple[Any, Any]]:
    """Yield the interpreters that trace the present call, innermost first, with their nodes.

    Interpreters outside dynamo are the user's own.
    """
    last = None
    for frame in walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == _DYNAMO:
            return
        if frame.f_code.co_name == "run_node" and "n" in frame.f_locals:
            interpreter, node = frame.f_locals.get("self"), frame.f_locals["n"]
            if isinstance(interpreter, torch.fx.Interpreter) and interpreter is not last:
                yield interpreter, node
                last = interpreter


_DYNAMO = "torch._dynamo.convert_frame"


def _is_differentiable_alias(node: Any, memory: int | None) -> bool:
    """Tell whether the tensor at a node has this memory and requires a gradient."""
    value = _example_value(node)
    return value is not None and value.requires_grad and _storage_id(value) == memory


def _example_value(node: Any) -> Tensor | None:
    """Return dynamo's example value of the tensor at a node; None without one."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _storage_id(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def keep_operator_in_graphs(name: str) -> None:
    """Make graphs keep an operator whose result nobody uses, and keep its order."""
    from torch._higher_order_ops import effects  # dynamo is loaded by now

    effects._register_effectful_op(name, effects._EffectType.ORDERED)


# The versions of the stand-in tensors of a graph while it is traced.
_noted: WeakIdentityMap[int | None] = WeakIdentityMap()
_written: list[bool] = []


def store_graph_version(tensor: Tensor) -> None:
    """Note the version of a tensor in a graph being compiled, without adding to the graph."""
    torch._dynamo.comptime.comptime(_store_version)


def compare_graph_version(tensor: Tensor) -> None:
    """Compare the version of a tensor in a graph being compiled with the noted version."""
    torch._dynamo.comptime.comptime(_compare_version)


@run_at_trace_time
def was_written_in_graph() -> bool:
    """Tell whether versions have differed since the last call of this function."""
    was_written = bool(_written)
    _written.clear()
    return was_written


def _store_version(context: Any) -> None:
    stand_in = context.get_local("tensor").as_fake()
    _noted[stand_in] = None if stand_in.is_inference() else stand_in._version


def _compare_version(context: Any) -> None:
    stand_in = context.get_local("tensor").as_fake()
    # Read and not removed: a value may hold the tensor several times.
    if not stand_in.is_inference() and stand_in._version != _noted.get(stand_in):
        _written.append(True)
