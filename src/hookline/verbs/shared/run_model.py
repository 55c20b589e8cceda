"""Run a model on inputs in any of the forms that the verbs accept."""

from __future__ import annotations

import contextvars
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

from hookline.display.text import plural
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
    the model's only argument. If the model's forward refuses these arguments, a note on the error
    says how to give others.
    """
    is_function = callable(inputs) and not isinstance(inputs, Tensor | nn.Module | Mapping | tuple)
    if is_function:
        return inputs()
    args, kwargs = _arguments_of(inputs)
    try:
        return model(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        note = _advice(model, inputs)
        if note:
            error.add_note(f"hookline: {note}")
        raise


def _arguments_of(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(inputs, tuple):
        return inputs, {}
    return ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})


def signature_of(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of a model's forward; None if the forward is no Python function."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def refusal_of(signature: inspect.Signature, inputs: Any) -> TypeError | None:
    """Return the error of a signature that refuses inputs; None if the signature takes them."""
    args, kwargs = _arguments_of(inputs)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return error
    return None


def without_list(model: nn.Module, inputs: Any) -> Any:
    """Return the tensor of a list of one tensor, unless the model takes this list.

    A `DataLoader` makes such lists of a `TensorDataset` of one tensor. The model is called with the
    list, where no line sees it, to find out. Afterwards it is as before.
    """
    if type(inputs) is not list or len(inputs) != 1 or not isinstance(inputs[0], Tensor):
        return inputs
    if lazy_name(model) is not None:
        return inputs

    def is_taken() -> bool:
        with untouched(model), torch.no_grad():
            try:
                model(inputs)
            except (TypeError, AttributeError):
                return False
            except Exception:
                return True
        return True

    # In a context of its own, where no line of the caller sees the run.
    return inputs if contextvars.Context().run(is_taken) else inputs[0]


def _advice(model: nn.Module, inputs: Any) -> str | None:
    """Say how to give inputs that the model's forward takes; None where it takes these."""
    if isinstance(inputs, tuple) and inputs and all(type(size) is int for size in inputs):
        return (
            "a tuple is given as arguments, and these are numbers.\nGive"
            f" torch.rand({', '.join(map(str, inputs))}) for an input of this shape."
        )
    if isinstance(inputs, DataLoader):
        return (
            "a DataLoader gives batches, and the model takes one batch."
            "\nGive next(iter(loader)), or of a batch with labels next(iter(loader))[0]."
        )
    if isinstance(inputs, list):
        return (
            "a list is one argument of the model.\nGive several arguments as a tuple, and a batch"
            " with labels without them, such as batch[0]."
        )
    signature = signature_of(model)
    refusal = None if signature is None else refusal_of(signature, inputs)
    if signature is None or refusal is None:
        return None
    args, kwargs = _arguments_of(inputs)
    if kwargs:
        keys = ", ".join(f"{key!r}: ..." for key in itertools.islice(kwargs, _N_KEYS_SHOWN))
        more = ", ..." * (len(kwargs) > _N_KEYS_SHOWN)
        return (
            "a dict is given as keyword arguments, and the model's forward refuses them:"
            f" {refusal}.\nGive a dict that is one argument in a tuple: ({{{keys}{more}}},)."
        )
    names = ", ".join(signature.parameters)
    return (
        f"the model's forward takes ({names}), and refuses {plural(len(args), 'argument')}:"
        f" {refusal}.\nGive its arguments as a tuple, or by name in a dict."
    )


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the model after a run in the block.

    This covers buffers, modes and random states. It also covers the parameters' `.grad`, and the
    attributes that a forward sets on its modules (a step counter, a cache).
    """
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    tables = [table for module in model.modules() for table in (vars(module), buffers(module))]
    held = [(table, dict(table)) for table in tables]
    with restore_state(model):
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for parameter, grad in grads:
                parameter.grad = grad
            for table, before in held:
                _restore(table, before)


def _restore(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        if name not in now or now[name] is not value:
            now[name] = value


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
