"""Repeat a run of a model: put back what the run began with, and compare the second run with it.

A `RunStart` holds what a run began with. Whatever the second run shows counts only as far as
`RunComparison` has found both runs equal.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine import (
    discard_hook,
    every_tensor,
    foreign_hooks,
    has_process_group,
    is_compiled,
    own_buffers,
    own_parameters,
    path_text,
    tensor_hook_dict,
)
from hookline.engine.pytree import tree
from hookline.errors import InputError
from hookline.statistics.finiteness import Measure, is_measurable, local_numbers, probe_sum
from hookline.util.fork_safe_lock import fork_safe_lock

# -- random numbers and autocast -----------------------------------------------------------------


@final
class RandomStates:
    """The states of the random generators of torch, Python and numpy, when this was made.

    `generators` are further generators of torch, such as a model's own.
    """

    __slots__ = ("_numpy", "_python", "_torch")

    def __init__(self, generators: Iterable[torch.Generator] = ()) -> None:
        is_cuda_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        of_devices = torch.cuda.default_generators if is_cuda_used else ()
        of_torch = (torch.default_generator, *of_devices, *generators)
        self._torch = [(generator, generator.get_state()) for generator in of_torch]
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)

    def are_current(self) -> bool:
        """Tell whether all generators are still in these states."""
        # Their bytes, because there are arrays among the parts.
        numpy_now, numpy_before = map(
            pickle.dumps, (np.random.get_state(legacy=False), self._numpy)
        )
        return (
            numpy_now == numpy_before
            and random.getstate() == self._python
            and all(torch.equal(generator.get_state(), state) for generator, state in self._torch)
        )

    def restore(self) -> None:
        """Put the generators into these states again."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in self._torch:
            generator.set_state(state)


def generators_of(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """Return the random generators that are attributes of modules."""
    attributes = [vars(module).values() for module in modules]
    # Not isinstance: torch's metaclass answers it in Python, and few kinds make up all attributes.
    kinds: set[type] = set().union(*[map(type, values) for values in attributes])
    kinds = {kind for kind in kinds if torch.Generator in kind.__mro__}
    if not kinds:
        return []
    generators = {
        id(value): value for values in attributes for value in values if type(value) in kinds
    }
    return list(generators.values())


# For each kind of device: whether autocast is on, and its dtype.
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


def current_autocast() -> Autocast:
    """Return the autocast of the running code."""
    return tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    )


@contextmanager
def use_autocast(autocast: Autocast) -> Iterator[None]:
    """Run the block in this autocast."""
    with ExitStack() as stack:
        for device, is_on, dtype in autocast:
            if is_on or torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=is_on))
        yield


# -- the state of a model ------------------------------------------------------------------------


# A buffer of a module: the table that holds it, its name there, and the tensor.
_Buffer = tuple[dict[str, Tensor | None], str, Tensor]


def _buffers_of(modules: Iterable[nn.Module]) -> list[_Buffer]:
    """Return the buffers of modules that have numbers."""
    return [
        (table, name, buffer)
        for table in map(own_buffers, modules)
        for name, buffer in table.items()
        if buffer is not None and not buffer.is_meta
    ]


@contextmanager
def restore_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore training flags and buffers of modules, and random states, after the block.

    The block runs on copies of the buffers. Compiled code is bound to the buffers themselves. There
    the block runs on the buffers, and their old values are written back.
    """
    with _lock:  # another thread may hold some in eval mode
        flags = [(module, module.training or id(module) in _n_blocks) for module in modules]
    saved, states = _buffers_of(modules), RandomStates(generators_of(modules))
    kept = [buffer for *_, buffer in saved] if any(map(is_compiled, modules)) else []
    copies: dict[int, Tensor] = {}  # by buffer, because several modules may hold one buffer
    with _numbers_restored(kept):
        try:
            for table, name, buffer in saved if not kept else ():
                table[name] = copies.setdefault(id(buffer), _clone(buffer))
            yield
        finally:
            states.restore()
            with _lock:
                _restore_modes(flags)
            for table, name, buffer in saved:
                table[name] = buffer


def _restore_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, is_training in modes:
        # To set an attribute of a module is slow.
        if module.training is not is_training and id(module) not in _n_blocks:
            module.training = is_training


def _clone(tensor: Tensor) -> Tensor:
    # An inference tensor's copy must be an inference tensor.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return tensor.clone()


def _write(tensor: Tensor, numbers: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(numbers)


def version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def restore_after_run(model: nn.Module) -> Iterator[None]:
    """Restore the model after a run in the block.

    This covers buffers, modes and random states. It also covers the parameters' `.grad`, and what a
    forward sets on its modules (a step counter), registers there (a hook), or writes to their plain
    tensors, lists, dictionaries and sets (a cache). It does not cover parameters: see
    `parameters_restored`.

    Another thread waits: two blocks on one model would put each other's state back.
    """
    with _one_at_a_time:
        modules = list(model.modules())
        tensors = [t for m in modules for t in own_parameters(m).values() if t is not None]
        with (
            restore_state(modules), grads_restored(tensors), _hooks_restored(modules),
            _attributes_restored(modules),
        ):  # fmt: skip
            yield


@contextmanager
def _hooks_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the hooks that a forward has registered: without its own mark it would do so again."""
    before = [(module, foreign_hooks(module)) for module in modules]
    try:
        yield
    finally:
        for module, hooks in before:
            for kind, key in foreign_hooks(module) - hooks:
                discard_hook(module, kind, key)


@contextmanager
def _attributes_restored(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules, and what their containers and plain tensors hold."""
    tables = [table for module in modules for table in (vars(module), own_buffers(module))]
    before: list[tuple[Any, Any]] = [(table, dict(table)) for table in tables]
    before += [
        (container, dict(container) if isinstance(container, dict) else list(container))
        for container in _containers_in(modules)
    ]
    plain = [
        value
        for module in modules
        for value in vars(module).values()
        if type(value) is Tensor and not value.requires_grad and not value.is_meta
    ]
    try:
        with _numbers_restored(plain):
            yield
    finally:
        for container, entries in before:
            _restore(container, entries)


_one_at_a_time = fork_safe_lock()
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, Counter, deque)
# The hooks of a module, which another thread may register meanwhile, and its parameters, which
# sharding exchanges.
_OF_TORCH = frozenset(vars(nn.Module())) - {"_modules"}


def _containers_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the containers of modules, and those inside one another."""
    containers: dict[int, Any] = {}
    waiting = [
        value for module in modules for name, value in vars(module).items() if name not in _OF_TORCH
    ]
    while waiting:
        value = waiting.pop()
        if type(value) in _CONTAINERS and id(value) not in containers:
            containers[id(value)] = value
            waiting += value.values() if isinstance(value, dict) else value
    return list(containers.values())


def _restore(container: Any, before: Any) -> None:
    is_table = isinstance(before, dict)
    names = container.keys() if is_table else container
    is_same = len(container) == len(before) and all(map(is_, names, before))
    if is_same and (not is_table or all(map(is_, container.values(), before.values()))):
        return
    if not is_table:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)
        return
    for name in container.keys() - before.keys():
        del container[name]
    for name, value in before.items():
        if name not in container or container[name] is not value:
            container[name] = value


@contextmanager
def parameters_restored(model: nn.Module) -> Iterator[None]:
    """Restore the numbers of parameters to which a forward writes in the block: it copies all."""
    with _numbers_restored(list(model.parameters())):
        yield


@contextmanager
def _numbers_restored(tensors: Sequence[Tensor]) -> Iterator[None]:
    copies = [(tensor, _clone(tensor), version(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, numbers, before in copies:
            if before is None or version(tensor) != before:
                _write(tensor, numbers)


@contextmanager
def grads_restored(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Clear the `.grad` of tensors for the block, and restore it afterwards."""
    before = [(tensor, tensor.grad) for tensor in tensors]
    try:
        for tensor, _ in before:
            tensor.grad = None
        yield
    finally:
        for tensor, grad in before:
            tensor.grad = grad


@contextmanager
def eval_without_side_effects(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, and leave the model `restore_after_run`.

    Raises:
        InputError: the model has lazy parameters, which its first run would create for good.
    """
    name = first_lazy_name(model)
    if name is not None:
        raise InputError(
            f"the model must have no lazy parameters, got {name}: the first run would create it"
            " for good.\nRun the model once yourself, then call this again."
        )
    with restore_after_run(model), torch.no_grad(), in_eval_mode(list(model.modules())):
        yield


def first_lazy_name(model: nn.Module) -> str | None:
    """Return the first parameter or buffer that the first run will create; None if all exist."""
    tables = (table(m) for m in model.modules() for table in (own_parameters, own_buffers))
    if not any(t is not None and is_lazy(t) for table in tables for t in table.values()):
        return None  # as of most models, whose names need not be made
    return first_name(model, is_lazy)


def first_name(model: nn.Module, is_odd: Callable[[Tensor], bool]) -> str | None:
    """Return the name of the first odd parameter or buffer; None without one."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_odd(tensor)), None)


# How many blocks keep a module in eval mode, by the id of a module that was in training mode.
_n_blocks: dict[int, int] = {}
_lock = fork_safe_lock()


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules in eval mode in the block, and restore each module's mode afterwards.

    Where several threads do so at once, the last one restores the mode.
    """
    training: list[nn.Module] = []
    try:
        with _lock:
            for module in modules:
                _enter_eval_mode(module, training)
        yield
    finally:
        with _lock:
            for module in training:
                _leave_eval_mode(module)


def _enter_eval_mode(module: nn.Module, training: list[nn.Module]) -> None:
    n_blocks = _n_blocks.get(id(module), 0)
    # A frozen ScriptModule has no training flag.
    if n_blocks or getattr(module, "training", False):
        training.append(module)
        _n_blocks[id(module)] = n_blocks + 1
        # Only the flag: an overridden `train()` or `eval()` may merge weights.
        module.training = False


def _leave_eval_mode(module: nn.Module) -> None:
    n_left = _n_blocks.pop(id(module), 1) - 1
    if n_left:
        _n_blocks[id(module)] = n_left
    else:
        module.training = True


# -- inputs and gradients ------------------------------------------------------------------------


def copied(inputs: Any) -> Any:
    """Return the inputs with copied tensors, because a model may write to its inputs.

    The copies also get the gradients of the run.
    """
    return map_inputs(_copy, inputs)


def map_inputs(change: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    """Return the inputs with changed tensors; a function that runs the model, as it is."""
    if isinstance(inputs, Mapping):
        return {key: tree.map_tensors(change, part) for key, part in inputs.items()}
    if callable(inputs) and not isinstance(inputs, Tensor):
        return inputs
    return tree.map_tensors(change, inputs)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    if tensor.grad_fn is None:
        return copy
    with torch.enable_grad():
        return copy.clone()  # a non-leaf as well, which may be written to in place


class ReentrantError(RuntimeError):
    """A graph with a reentrant checkpoint has hooks that only a real backward may call."""


def gradients(
    outputs: Sequence[Tensor],
    tensors: Sequence[Tensor] | None = None,
    grads: Sequence[Tensor] | None = None,
) -> list[Tensor | None]:
    """Compute gradients of outputs, and leave every `.grad` as it is.

    Without `tensors`, return the gradients of all leaf tensors of the graph.

    Raises:
        ReentrantError: a part of the graph is checkpointed with use_reentrant=True, and there are
            hooks on accumulated gradients.
    """
    leaves, is_reentrant = leaves_and_reentrancy(outputs)
    tensors = leaves if tensors is None else tensors
    if not is_reentrant:
        return list(torch.autograd.grad(outputs, tensors, grads, allow_unused=True))
    # A reentrant checkpoint refuses torch.autograd.grad.
    if has_process_group() or any(tensor_hook_dict(leaf, "accumulated") for leaf in leaves):
        raise ReentrantError(
            "a checkpoint with use_reentrant=True only allows backward(), which would also run the"
            " hooks after gradient accumulation"
        )
    with grads_restored({id(tensor): tensor for tensor in (*leaves, *tensors)}.values()):
        torch.autograd.backward(outputs, grads)
        return [tensor.grad for tensor in tensors]


def leaves_and_reentrancy(outputs: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """Return the leaf tensors of a graph, and whether it holds reentrant checkpoints."""
    outputs = list(outputs)
    leaves = [output for output in outputs if output.grad_fn is None]
    waiting: list[Any] = [output.grad_fn for output in outputs]
    is_reentrant = False
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        is_reentrant |= node.name() == "CheckpointFunctionBackward"
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        waiting += [before for before, _ in node.next_functions]
    return leaves, is_reentrant


# -- the start of a run --------------------------------------------------------------------------


@final
class RunStart:
    """Hold what a run of a model began with: references, and few copies."""

    __slots__ = (
        "_copies", "_has_grad", "_is_inference", "_random", "_tensors", "args", "autocast",
        "kwargs",
    )  # fmt: skip

    def __init__(self, root: nn.Module, args: Any, kwargs: Any, changing: ChangingBuffers) -> None:
        if changing.copies_inputs:
            args, kwargs = copied((args, kwargs))
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self._tensors = [(tensor, version(tensor)) for tensor in every_tensor((args, kwargs))]
        self.autocast: Autocast = current_autocast()
        self._has_grad = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        self._copies = changing.copies(root)
        self._random = RandomStates(changing.generators)

    def are_inputs_overwritten(self) -> bool:
        """Tell whether an input has been overwritten in place since the run began."""
        return any(version(tensor) != before for tensor, before in self._tensors)

    def why_not_repeatable(self) -> str | None:
        """Say why the run cannot be repeated; None if it can."""
        tensors = every_tensor((self.args, self.kwargs))
        if list(map(id, tensors)) != [id(tensor) for tensor, _ in self._tensors]:
            return "an argument of the model was changed by the run, such as a cache that grows"
        if self.are_inputs_overwritten():
            return "an input of the model was overwritten in place after the run began"
        return None

    @contextmanager
    def restored(self, root: nn.Module) -> Iterator[None]:
        """Put buffers, random states and modes as they were when the run began, for the block."""
        with restore_state(list(root.modules())):
            for table, name, copy in self._copies:
                buffer = table.get(name)
                if buffer is not None and buffer.shape == copy.shape:
                    table[name] = copy.clone()
            self._random.restore()
            with (
                use_autocast(self.autocast),
                torch.inference_mode(self._is_inference),
                torch.set_grad_enabled(self._has_grad),
            ):
                yield

    def buffer_before(self, module: nn.Module, name: str) -> Tensor | None:
        """Return a buffer as it was when the run began; None if the run has not changed it."""
        table = own_buffers(module)
        copies = (copy for other, key, copy in self._copies if other is table and key == name)
        return next(copies, None)


_Place = tuple[dict[str, Tensor | None], str]


@final
class ChangingBuffers:
    """The buffers of a model that its forward writes to, as batch norm does.

    All buffers are copied until the first run in each mode has ended. From then on, only those that
    have changed in that run are.

    Attributes:
        copies_inputs: whether an earlier run has overwritten its inputs, so that copies are kept.
        generators: the random generators that are attributes of the model's modules.
    """

    __slots__ = (
        "_all", "_changing", "_is_training", "_lock", "_versions", "copies_inputs", "generators",
    )  # fmt: skip

    def __init__(self) -> None:
        self.copies_inputs: bool = False
        self.generators: list[torch.Generator] = []
        self._all: list[_Place] = []
        self._changing: list[_Place] = []
        self._is_training: bool | None = None
        self._versions: list[tuple[int, int | None]] | None = None
        self._lock = fork_safe_lock()  # runs may begin in several threads

    def copies(self, root: nn.Module) -> list[_Buffer]:
        """Copy the buffers that the run may change."""
        with self._lock:
            if self._is_training is not root.training:
                self._is_training = root.training
                modules = list(root.modules())
                self.generators = generators_of(modules)
                self._all = [(table, name) for table, name, _ in _buffers_of(modules)]
                self._versions = [_identity_and_version(*place) for place in self._all]
            return _copy_buffers(self._changing if self._versions is None else self._all)

    def learn(self) -> None:
        """Learn which buffers a run has changed that has ended."""
        with self._lock:
            before, self._versions = self._versions, None
            if before is not None:
                self._changing = _changed_places(self._all, before)


def _copy_buffers(places: list[_Place]) -> list[_Buffer]:
    tensors = [(table, name, table.get(name)) for table, name in places]
    return [
        (table, name, tensor.detach().clone())
        for table, name, tensor in tensors
        if tensor is not None
    ]


def _changed_places(places: list[_Place], before: list[tuple[int, int | None]]) -> list[_Place]:
    pairs = zip(places, before, strict=True)
    return [place for place, was in pairs if _identity_and_version(*place) != was]


def _identity_and_version(table: dict[str, Tensor | None], name: str) -> tuple[int, int | None]:
    buffer = table.get(name)
    return id(buffer), None if buffer is None else version(buffer)


# -- the second run beside the first -------------------------------------------------------------

# Rounding makes the sums of equal runs differ, by at most this share of the sum of magnitudes.
_ROUNDING = 1e-4
_ROUNDING_OF_HALF = 1e-3

# For each output of a run: the number of its site, a number, and how it was measured (None: by
# compiled code).
Sums = list[tuple[int, Tensor, Measure | None]]


@final
class RunComparison:
    """Compare a repeated run with the first run, output by output.

    `paths` has the path of each site, by number.
    """

    __slots__ = ("_first", "_last_equal", "_n_calls", "difference")

    def __init__(self, sums: Sums, paths: Sequence[str]) -> None:
        self._first: dict[str, deque[tuple[Tensor, Measure | None]]] = {}
        for number, first, measure in sums:
            self._first.setdefault(paths[number], deque()).append((first, measure))
        self._n_calls = dict.fromkeys(self._first, 0)
        # The number of operations before the last number that is not finite in both runs.
        self._last_equal = -1
        self.difference: str | None = None

    def compare(self, path: str, output: Any, n_operations: int) -> None:
        """Compare an output after so many operations of the repeated run with that of the first."""
        pending = self._first.get(path)
        if pending is None or self.difference is not None:
            return
        call, self._n_calls[path] = self._n_calls[path], self._n_calls[path] + 1
        if not pending:
            self._note_difference(path, call)
            return
        first, measure = pending.popleft()
        again = (measure or probe_sum)(output)
        if again is None or not _are_same(first, again, output, is_compiled=measure is None):
            self._note_difference(path, call)
        elif not first.isfinite():
            self._last_equal = n_operations

    def skip(self, path: str) -> None:
        """Compare no number of an output: it holds memory that was never written."""
        if self._first.get(path):
            self._first[path].popleft()
            self._n_calls[path] += 1

    def end(self, paths: set[str]) -> None:
        """Notice calls that the repeated run has not made; `paths` are the modules it watched."""
        for path, pending in self._first.items():
            if pending and path in paths and self.difference is None:
                self._note_difference(path, self._n_calls[path])

    def proves(self, number: int) -> bool:
        """Tell whether both runs were the same until they passed on what this operation made."""
        return self.difference is None or number <= self._last_equal

    def _note_difference(self, path: str, call: int) -> None:
        self.difference = path_text(path) + (f"#{call}" if call else "")


def _are_same(first: Tensor, again: Tensor, output: Any, *, is_compiled: bool) -> bool:
    if is_compiled:
        # It computes in another order and draws other random numbers.
        return bool(first.isnan()) == bool(again.isnan())
    if torch.equal(first, again) or (bool(first.isnan()) and bool(again.isnan())):
        return True
    if not (first.isfinite() and again.isfinite()):
        return False
    parts = [local_numbers(tensor) for _, tensor in tree.tensors(output) if is_measurable(tensor)]
    size = sum(float(tensor.abs().double().sum()) for tensor in parts)
    is_half = any(tensor.dtype.itemsize <= 2 for tensor in parts)
    return abs(float(again - first)) <= size * (_ROUNDING_OF_HALF if is_half else _ROUNDING)
