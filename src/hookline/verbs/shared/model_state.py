"""Leave a model as it was after a run: buffers, modes, gradients, hooks and attributes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine import (
    discard_hook,
    foreign_hooks,
    is_compiled,
    own_buffers,
    own_parameters,
)
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.verbs.shared.refused_weights import refuse_lazy_parameters
from hookline.verbs.shared.run_settings import RandomStates, generators_of

# A buffer of a module: the table that holds it, its name there, and the tensor.
Buffer = tuple[dict[str, Tensor | None], str, Tensor]


def buffers_with_numbers(modules: Iterable[nn.Module]) -> list[Buffer]:
    """Return the buffers of modules that have numbers."""
    return [
        (table, name, buffer)
        for table in map(own_buffers, modules)
        for name, buffer in table.items()
        if buffer is not None and not buffer.is_meta
    ]


@contextmanager
def restore_modes_buffers_rng(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore training flags and buffers of modules, and random states, after the block.

    The block runs on copies of the buffers. Compiled code is bound to the buffers themselves. There
    the block runs on the buffers, and their old values are written back.
    """
    with _lock:  # another thread may hold some in eval mode
        flags = [(module, module.training or id(module) in _n_blocks) for module in modules]
    saved, states = buffers_with_numbers(modules), RandomStates(generators_of(modules))
    kept = [buffer for *_, buffer in saved] if any(map(is_compiled, modules)) else []
    copies: dict[int, Tensor] = {}  # by buffer, because several modules may hold one buffer
    with _restore_numbers(kept):
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


def _copy_into(tensor: Tensor, numbers: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(numbers)


def tensor_version(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def restore_after_run(model: nn.Module) -> Iterator[None]:
    """Restore the model after a run in the block.

    This covers buffers, modes and random states. It also covers the parameters' `.grad`, and what a
    forward sets on its modules (a step counter), registers there (a hook), or writes to their plain
    tensors, lists, dictionaries and sets (a cache). It does not cover parameters: see
    `restore_parameters`.

    Another thread waits: two blocks on one model would put each other's state back.
    """
    with _one_at_a_time:
        modules = list(model.modules())
        tensors = [t for m in modules for t in own_parameters(m).values() if t is not None]
        with (
            restore_modes_buffers_rng(modules),
            clear_and_restore_grads(tensors),
            _restore_hooks(modules),
            _restore_attributes(modules),
        ):
            yield


@contextmanager
def _restore_hooks(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Remove the hooks that a forward has registered: without its own mark it would do so again."""
    before = [(module, foreign_hooks(module)) for module in modules]
    try:
        yield
    finally:
        for module, hooks in before:
            for kind, key in foreign_hooks(module) - hooks:
                discard_hook(module, kind, key)


@contextmanager
def _restore_attributes(modules: Sequence[nn.Module]) -> Iterator[None]:
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
        with _restore_numbers(plain):
            yield
    finally:
        for container, entries in before:
            _restore_container(container, entries)


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


def _restore_container(container: Any, before: Any) -> None:
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
def restore_parameters(model: nn.Module) -> Iterator[None]:
    """Restore the numbers of parameters to which a forward writes in the block: it copies all."""
    with _restore_numbers(list(model.parameters())):
        yield


@contextmanager
def _restore_numbers(tensors: Sequence[Tensor]) -> Iterator[None]:
    copies = [(tensor, _clone(tensor), tensor_version(tensor)) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, numbers, before in copies:
            if before is None or tensor_version(tensor) != before:
                _copy_into(tensor, numbers)


@contextmanager
def clear_and_restore_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
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
    refuse_lazy_parameters(model)
    with restore_after_run(model), torch.no_grad(), in_eval_mode(list(model.modules())):
        yield


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
