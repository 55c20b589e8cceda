"""Run a model on inputs in any of the forms that the verbs accept."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine.compile.compiled_modules import is_compiled
from hookline.engine.torch_private.modules import buffers
from hookline.errors import InputError
from hookline.util.locks import fork_safe_lock

_N_KEYS_SHOWN = 3

# How many blocks keep a module in eval mode, by the id of a module that was in training mode.
_n_blocks: dict[int, int] = {}
_lock = fork_safe_lock()

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any]


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model: a tuple gives its arguments, a mapping its keyword arguments.

    A function is called without arguments; it runs the model somewhere inside. Any other object is
    the model's only argument. If the model refuses a mapping's keys, a note on the error says how
    to give the mapping as one argument.
    """
    if isinstance(inputs, tuple):
        try:
            return model(*inputs)
        except TypeError as error:
            _note_shape(inputs, error)
            raise
    if isinstance(inputs, Mapping):
        try:
            return model(**inputs)
        except TypeError as error:
            _note_refused_keywords(model, inputs, error)
            raise
    if callable(inputs) and not isinstance(inputs, Tensor | nn.Module):
        return inputs()
    return model(inputs)


def _note_shape(inputs: tuple[Any, ...], error: TypeError) -> None:
    """Add a note to the error if the tuple looks like a shape given in place of a tensor."""
    if inputs and all(type(size) is int for size in inputs):
        error.add_note(
            "hookline: a tuple is given as arguments, and these are numbers.\nGive"
            f" torch.rand({', '.join(map(str, inputs))}) for an input of this shape."
        )


def _note_refused_keywords(model: nn.Module, inputs: Mapping[str, Any], error: TypeError) -> None:
    """Add a note to the error if the model's forward does not take these keyword arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not a Python function
        return
    try:
        signature.bind(**inputs)
    except TypeError as refusal:
        keys = ", ".join(f"{key!r}: ..." for key in itertools.islice(inputs, _N_KEYS_SHOWN))
        more = ", ..." * (len(inputs) > _N_KEYS_SHOWN)
        error.add_note(
            f"hookline: a dict is given as keyword arguments, and the model's forward refuses them:"
            f" {refusal}.\nGive a dict that is one argument in a tuple: ({{{keys}{more}}},)."
        )


@contextmanager
def eval_without_side_effects(model: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, and leave the model as it was.

    Training flags, buffers and random states are restored afterwards.

    Raises:
        InputError: the model has lazy parameters, which its first run would create for good.
    """
    name = lazy_name(model)
    if name is not None:
        raise InputError(
            f"the model must have no lazy parameters, got {name}: the first run would create it"
            " for good.\nRun the model once yourself, then call this again."
        )
    with restore_state(model), torch.no_grad(), in_eval_mode(model.modules()):
        yield


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules in eval mode in the block, and restore each module's mode afterwards.

    Where several threads do so at once, the last one restores the mode.
    """
    training: list[nn.Module] = []
    try:
        with _lock:
            for module in modules:
                n_blocks = _n_blocks.get(id(module), 0)
                # A frozen ScriptModule has no training flag.
                if n_blocks or getattr(module, "training", False):
                    training.append(module)
                    _n_blocks[id(module)] = n_blocks + 1
                    # Only the flag: an overridden `train()` or `eval()` may merge weights.
                    module.training = False
        yield
    finally:
        with _lock:
            for module in training:
                n_left = _n_blocks.pop(id(module), 1) - 1
                if n_left:
                    _n_blocks[id(module)] = n_left
                else:
                    module.training = True


def lazy_name(model: nn.Module) -> str | None:
    """Return the first parameter or buffer that the first run will create; None if all exist."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)


@contextmanager
def restore_state(model: nn.Module) -> Iterator[None]:
    """Restore training flags, buffers and random states after the block.

    The block runs on copies of the buffers. Compiled code is bound to the buffers themselves. There
    the block runs on the buffers, and their old values are written back.
    """
    modules = list(model.modules())
    flags = [(module, module.training) for module in modules]
    on_copies = not any(is_compiled(module) for module in modules)
    copies: dict[int, Tensor] = {}  # by buffer, because several modules may hold one buffer
    kept = [
        (table, name, buffer, copies.setdefault(id(buffer), _clone(buffer)), _version(buffer))
        for table in map(buffers, modules)
        for name, buffer in table.items()
        if buffer is not None and not buffer.is_meta
    ]
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        try:
            for table, name, _, copy, _ in kept if on_copies else ():
                table[name] = copy
            yield
        finally:
            for module, training in flags:
                module.training = training
            for table, name, buffer, copy, version in kept:
                table[name] = buffer
                if not on_copies and (version is None or buffer._version != version):
                    _write(buffer, copy)


def _clone(tensor: Tensor) -> Tensor:
    # An inference tensor's copy must be an inference tensor.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return tensor.clone()


def _write(tensor: Tensor, numbers: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(numbers)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
