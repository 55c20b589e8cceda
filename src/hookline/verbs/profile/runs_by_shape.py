"""The kinds of runs that a profile has seen: runs with inputs of the same shapes do the same work.

Of each kind the inputs are copied without their numbers. The FLOPs of a kind are counted once, on
the copies, when they are asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine import (
    FakeModel,
    GradHook,
    backward_number,
    every_tensor,
    memory_key_and_size,
    module_flags,
    path_text,
    prehook_node,
    why_not_fakeable,
)
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.util.stopwatch import STOPWATCH
from hookline.verbs.shared.run_settings import Autocast, current_autocast

_MOST_KINDS = 16
_ATOMS = (int, float, bool, str, type(None))


@final
@dataclass(slots=True, eq=False)
class RunKind:
    """The runs of a module with inputs of the same shapes."""

    path: str  # the module's path
    has_gradients: bool  # whether gradients were enabled
    autocast: Autocast  # the autocast of the runs
    # The arguments and keyword arguments, without numbers; None if they were not copied.
    inputs: Any = None
    flags: list[Any] = field(default_factory=list)  # the modes of all modules
    n_runs: int = 0  # the number of runs
    n_backwards: int = 0  # the number of backwards through these runs
    kept_inputs: int = 0  # the bytes of the inputs that a run keeps for backward
    # The bytes of the workspaces that operations keep for backward, by module.
    workspaces: dict[str, list[int]] = field(default_factory=dict)
    is_noted: bool = False  # True if these two are known
    # The indices of the outputs that a gradient has reached.
    seeds: set[int] = field(default_factory=set)
    # The numbers of nodes in the graphs that the runs have made for backward.
    n_nodes: set[int] = field(default_factory=set)
    closed: bool = False  # whether the profile has ended: later backwards are not its own


@final
class Run:
    """One run of an outermost module.

    Args:
        kind: its kind.
        memory: the memory of the model's own tensors, for the first run of a kind.
        inputs: the memory of the inputs, for the first run of a kind.

    Attributes:
        is_new: True if the bytes that the run keeps for backward are to be noted.
        has_failed: True if the run raised.
    """

    __slots__ = ("_backward", "_error_at_start", "has_failed", "inputs", "is_new", "kind", "memory")

    def __init__(self, kind: RunKind, memory: set[int] | None, inputs: set[int]) -> None:
        self.kind: RunKind = kind
        self.is_new: bool = memory is not None
        self.memory: set[int] = memory or set()
        self.inputs: set[int] = inputs
        self.has_failed: bool = False
        self._error_at_start = id(sys.exception())
        self._backward: int | None = None

    def has_raised(self) -> bool:
        """Tell whether the run ends by an exception; only from a hook at its end."""
        error = sys.exception()
        return error is not None and id(error) != self._error_at_start

    def mark_failed(self) -> bool:
        """Leave the run out of the FLOPs. Return whether it had not failed before."""
        if self.has_failed:
            return False
        self.has_failed = True
        self.kind.n_runs -= 1
        return True

    def count_backwards(self, outputs: Any) -> None:
        """Note which outputs a gradient reaches."""
        for index, tensor in enumerate(outputs):
            node = tensor.grad_fn
            if node is not None:
                prehook_node(node, GradHook(partial(self._count_gradient, index)))

    def _count_gradient(self, index: int, grads: tuple[Tensor | None, ...]) -> None:
        if self.kind.closed:
            return
        self.kind.seeds.add(index)
        if self._backward != backward_number():
            self._backward = backward_number()
            self.kind.n_backwards += 1


@final
class RunKinds:
    """The kinds of runs of a model.

    Args:
        model: the model.
        modules: its modules, by path.
        wants_flops: whether the inputs are copied, so that FLOPs can be counted.

    Attributes:
        wants_flops: whether the inputs are copied.
        kinds: the kinds.
        failure: why the FLOPs of some runs are not known; empty where all are.
        seconds: the time that copying took.
    """

    def __init__(
        self, model: nn.Module, modules: dict[str, nn.Module], *, wants_flops: bool
    ) -> None:
        self._model: nn.Module | None = model
        self._by_path = modules
        self.wants_flops = wants_flops
        self._by_key: dict[Any, RunKind] = {}
        self.kinds: list[RunKind] = []
        self.copy: FakeModel | None = None
        self.failure: str = ""
        self.seconds: float = 0.0
        self._lock = fork_safe_lock()  # runs may begin in several threads

    @property
    def why_not_repeated(self) -> str:
        """Say which runs of a kind did not repeat each other; an empty text if all did."""
        for kind in self.kinds:
            if len(kind.n_nodes) > 1:
                least, most = min(kind.n_nodes), max(kind.n_nodes)
                return (
                    f"the run of {path_text(kind.path)} did not repeat itself: with inputs of the"
                    f" same shapes it made graphs of {least} to {most} operations for backward"
                )
        return ""

    def begin_run(self, path: str, args: Any, kwargs: Any) -> Run:
        """Return the run that begins with these arguments."""
        autocast = current_autocast()
        has_gradients = torch.is_grad_enabled()
        is_training = self._model is not None and self._model.training
        key = path, has_gradients, is_training, autocast, _work_key(args), _work_key(kwargs)
        memory, inputs = None, set[int]()
        with self._lock:
            kind = self._by_key.get(key)
            if kind is None:
                kind = RunKind(path, has_gradients=has_gradients, autocast=autocast)
                self._by_key[key] = kind
                self.kinds.append(kind)
                self._copy_inputs(kind, args, kwargs)
            if not kind.is_noted:  # the first run of the kind that does not fail
                memory = self._model_memory_keys()
                inputs = {memory_key_and_size(tensor)[0] for tensor in every_tensor((args, kwargs))}
            kind.n_runs += 1
        return Run(kind, memory, inputs)

    def _model_memory_keys(self) -> set[int]:
        if self._model is None:
            return set()
        tensors = (*self._model.parameters(), *self._model.buffers())
        return {memory_key_and_size(tensor)[0] for tensor in tensors if not is_lazy(tensor)}

    def _copy_inputs(self, kind: RunKind, args: Any, kwargs: Any) -> None:
        if self.failure or self._model is None or not self.wants_flops:
            return
        if len(self.kinds) > _MOST_KINDS:
            self.failure = (
                f"the inputs had more than {_MOST_KINDS} different shapes, as a generation with a"
                " cache has; profile fewer runs"
            )
            return
        if any(map(is_lazy, self._model.parameters())):
            self.failure = "its lazy modules had not run before; run the model once first"
            return
        began = STOPWATCH.read()  # without collections, as the clocks' overhead
        noun = "model"
        try:
            if self.copy is None:
                self.copy = FakeModel(self._model, self._by_path)
            noun = "inputs"
            kind.inputs = self.copy.copy_inputs((args, kwargs))
            kind.flags = module_flags(self._model)
        except Exception as error:
            self.failure = f"the {noun} cannot be copied: {why_not_fakeable(error)}"
        self.seconds += STOPWATCH.read() - began

    def release_model(self) -> None:
        """Let go of the model."""
        self._model, self._by_path = None, {}
        for kind in self.kinds:
            kind.closed = True
        if self.copy is not None:
            self.copy.release()


def _work_key(value: Any) -> Any:
    """Describe inputs so that equal descriptions mean equal work."""
    if isinstance(value, Tensor):
        size = tuple(value.shape) if not value.is_nested else id(value)
        return size, value.dtype, value.device, value.requires_grad
    if isinstance(value, _ATOMS):
        return value
    if type(value) in (tuple, list):
        return tuple(map(_work_key, value))
    if type(value) is dict:
        return tuple((repr(key), _work_key(part)) for key, part in value.items())
    return type(value), tuple(map(_work_key, every_tensor(value)))
