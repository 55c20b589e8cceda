"""Every private name of torch.compile that hookline touches.

Nothing here loads dynamo: as long as nobody has, nothing is
compiled, and to load it takes a second.
"""

from __future__ import annotations

import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn

from hookline.errors import AttachError
from hookline.util.weak_map import WeakIdentityMap

# Dynamo before torch 2.13 has few ids in a graph, and calls the hooks on a tensor there in the
# reverse order; that of 2.11 makes named tuples only by their own `__new__`.
OLD_DYNAMO = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


def while_tracing(method: Callable[..., Any]) -> Any:
    """A method that is run when code that calls it is compiled, and never when that code runs."""
    method._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return method


class TracingAttachError(AttachError, AssertionError):
    """An `AttachError` that is raised while code is compiled.

    Dynamo hands an `AssertionError` on as it is, and puts an error of its own in most others'
    place.
    """


def dynamo_config() -> Any:
    """The settings of dynamo; None as long as nothing has loaded it, and so nothing is compiled."""
    loaded = sys.modules.get("torch._dynamo")
    return getattr(loaded, "config", None)


def has_compiled() -> bool:
    """Tell whether there may be compiled code. Many packages load dynamo and compile nothing."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


# What a hook keeps in a checkpointed region is kept in its first run.
_SETTINGS = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}


class _Held(threading.local):
    """The owners of dynamo's settings in a thread, and the values from before."""

    def __init__(self) -> None:
        self.by: set[Settings] = set()
        self.before: dict[str, Any] = {}


_held = _Held()


@final
class Settings:
    """Settings of dynamo's that are in force while compiled code runs that a line sees.

    Dynamo keeps a setting for each context, so it is put back where it was made, or not at all.
    Lines may end in any order: the last one puts back what was before the first.
    """

    __slots__ = ("_by",)

    def __init__(self) -> None:
        self._by: set[Settings] | None = None

    def begin(self) -> None:
        """Have them in force."""
        self._by = _held.by
        self._by.add(self)
        config = dynamo_config()
        for name, value in _SETTINGS.items():
            _held.before.setdefault(name, getattr(config, name))
            setattr(config, name, value)

    def end(self) -> None:
        """Put those back that were before."""
        by, self._by = self._by, None
        if by is None:
            return
        by.discard(self)
        if by is _held.by and not by:
            while _held.before:
                name, value = next(iter(_held.before.items()))
                setattr(dynamo_config(), name, value)
                del _held.before[name]


def is_disabled(function: Callable[..., Any]) -> bool:
    """Tell whether a function has `torch.compiler.disable`, which a copy of its code would lose."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def has_compiled_forward(module: nn.Module) -> bool:
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


def is_limit(error: BaseException) -> bool:
    """Tell whether an error says that the recompile limit was hit."""
    return type(error).__name__ == "FailOnRecompileLimitHit"


def not_alone(functions: Iterable[types.FunctionType]) -> None:
    """Have functions not be compiled where they are called from code that is not: only within other
    code. Torch calls the hooks of a compiled model that way."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    strategy = getattr(frames, "FrameExecStrategy", None)
    if frames is not None and strategy is not None:
        skip = strategy(frames.FrameAction.SKIP, frames.FrameAction.SKIP)
        for function in functions:
            frames.set_code_exec_strategy(function.__code__, skip)


_hooks_met = itertools.count()


@while_tracing
def next_hook() -> str:
    """A number that says in which order the hooks in code that is being compiled are met."""
    return str(next(_hooks_met))


def come_from_outside(tensors: list[Tensor]) -> str:
    """Which of some tensors the graph that is being compiled gets from outside: a "1" for each, a
    "2" for each that it has written to by now, a "0" for each that it computes. For code that is
    being compiled only."""
    torch._dynamo.comptime.comptime(_note_sources)
    return _noted_sources()  # type: ignore[no-any-return]


class _Sources(threading.local):
    noted = ""


_sources = _Sources()


def _note_sources(context: Any) -> None:
    # Named so by torch, as they are not its public ones.
    held = context.get_local("tensors")._i_will_not_complain_if_bc_breaks_VariableTracker()
    _sources.noted = "".join(map(_source_of, held.realize().items))


def _source_of(variable: Any) -> str:
    if variable.source is None:
        return "0"
    value = _example(variable.as_proxy().node)
    return "1" if value is None or value._version == 0 else "2"


@while_tracing
def _noted_sources() -> str:
    return _sources.noted


def keep_call_in_graphs(function: Callable[..., Any]) -> None:
    """Have dynamo put the call of a function into its graphs as it is, and nobody remove it."""
    torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    torch.fx.node.has_side_effect(function)


def shares_outputs() -> bool:
    """Tell whether the tensor of the present call in a graph is a view that shares memory.

    It shares memory with several of the graph's outputs, or with an input and an output.

    AOTAutograd returns the memory, and makes the outputs of it anew outside, where what comes back
    to them passes the views in the graph by. For functions of `keep_call_in_graphs`.
    """
    found: Any = next((node for _, node in _runs_of_nodes()), None)
    value = None if found is None else _example(found.args[0])
    if value is None or not value._is_view():
        return False
    memory = _memory(value)
    inputs = [one for one in found.graph.nodes if one.op == "placeholder"]
    outputs = next(iter(reversed(found.graph.nodes))).all_input_nodes
    n_outputs = sum(_shares(one, memory) for one in outputs)
    is_of_input = any(_shares(one, memory) for one in inputs)
    return n_outputs > 1 or (n_outputs == 1 and is_of_input)


def at_end_of_graph(function: Callable[[], None]) -> bool:
    """Call a function when the forward of the graph that is being traced is over, and its backward
    not begun. Return False where nobody traces it: a backend may run graphs as they are.

    For functions of `keep_call_in_graphs`.
    """
    is_traced = False
    for interpreter, _ in _runs_of_nodes():
        end = vars(interpreter).get("output")
        if end is None:
            end = interpreter.output = _EndOfGraph(interpreter)
        end.functions.append(function)
        is_traced = True
    return is_traced


@final
class _EndOfGraph:
    """Stands for `output` of an interpreter, once."""

    __slots__ = ("functions", "interpreter")

    def __init__(self, interpreter: torch.fx.Interpreter) -> None:
        self.interpreter = interpreter
        self.functions: list[Callable[[], None]] = []

    def __call__(self, *args: Any) -> Any:
        del self.interpreter.output
        for function in self.functions:
            function()
        return self.interpreter.output(*args)


def _runs_of_nodes() -> Iterator[tuple[Any, Any]]:
    """Find the interpreters that trace the present call, innermost first, and what each runs.

    Those outside of dynamo are the user's own.
    """
    frame: FrameType | None = sys._getframe(1)
    last = None
    while frame is not None and frame.f_globals.get("__name__") != _DYNAMO:
        if frame.f_code.co_name == "run_node" and "n" in frame.f_locals:
            interpreter, node = frame.f_locals.get("self"), frame.f_locals["n"]
            if isinstance(interpreter, torch.fx.Interpreter) and interpreter is not last:
                yield interpreter, node
                last = interpreter
        frame = frame.f_back


_DYNAMO = "torch._dynamo.convert_frame"


def _shares(node: Any, memory: int | None) -> bool:
    """Tell whether the tensor at a node has this memory and requires a gradient."""
    value = _example(node)
    return value is not None and value.requires_grad and _memory(value) == memory


def _example(node: Any) -> Tensor | None:
    """Return what dynamo knows of the tensor at a node."""
    found = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def keep_in_graphs(name: str) -> None:
    """Have graphs keep an operator that nobody uses the result of, and in its order."""
    from torch._higher_order_ops import effects  # dynamo is loaded by now

    effects._register_effectful_op(name, effects._EffectType.ORDERED)


# The versions of the tensors that stand for those of a graph while it is traced.
_noted: WeakIdentityMap[int | None] = WeakIdentityMap()
_written: list[bool] = []


def note_graph_version(tensor: Tensor) -> None:
    """Note the version of a tensor in a graph that is being compiled; the graph has none of it."""
    torch._dynamo.comptime.comptime(_note_version)


def compare_graph_version(tensor: Tensor) -> None:
    """Compare the version of a tensor in a graph that is being compiled with the one noted."""
    torch._dynamo.comptime.comptime(_compare_version)


@while_tracing
def was_written_in_graph() -> bool:
    """Tell whether versions differed since this was asked last."""
    found = bool(_written)
    _written.clear()
    return found


def _note_version(context: Any) -> None:
    stand_in = context.get_local("tensor").as_fake()
    _noted[stand_in] = None if stand_in.is_inference() else stand_in._version


def _compare_version(context: Any) -> None:
    stand_in = context.get_local("tensor").as_fake()
    if not stand_in.is_inference() and stand_in._version != _noted.pop(stand_in):
        _written.append(True)
