"""Running a model on whatever a person gives as its input."""

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

_N_KEYS_SHOWN = 3

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any]


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model: a tuple is its arguments, a mapping its keyword arguments.

    A function is called as it is: code that runs the model somewhere inside. Anything else is the
    model's only argument. Where the model does not take a mapping's keys, a note on the error says
    how to give the mapping itself.
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
    """Add a note to the error of a model that was given a shape in the place of a tensor."""
    if inputs and all(type(size) is int for size in inputs):
        error.add_note(
            "hookline: a tuple is given as arguments, and these are numbers.\nFor an input of"
            f" this shape, give torch.rand({', '.join(map(str, inputs))})."
        )


def _note_refused_keywords(model: nn.Module, inputs: Mapping[str, Any], error: TypeError) -> None:
    """Add a note to the error of a model whose forward does not take these keyword arguments."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not Python's own
        return
    try:
        signature.bind(**inputs)
    except TypeError as refusal:
        keys = ", ".join(f"{key!r}: ..." for key in itertools.islice(inputs, _N_KEYS_SHOWN))
        more = ", ..." * (len(inputs) > _N_KEYS_SHOWN)
        error.add_note(
            f"hookline: a dict is given as keyword arguments, and the model's forward refuses them:"
            f" {refusal}.\nIf the model takes one dict, give it in a tuple: ({{{keys}{more}}},)."
        )


@contextmanager
def eval_without_side_effects(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode without gradients, and leave it as it was.

    Training flags, buffers and random states are put back afterwards.

    Raises:
        InputError: the model has lazy parameters, which its first run would create for good.
    """
    name = lazy_name(model)
    if name is not None:
        raise InputError(
            f"the parameter {name} is lazy: the first run of the model would create it for"
            " good.\nRun the model once yourself, then ask again."
        )
    with restore_state(model), torch.no_grad(), in_eval_mode(model.modules()):
        yield


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules in eval mode for a while, and give each its own mode back."""
    # A frozen ScriptModule has no such flag.
    training = [module for module in modules if getattr(module, "training", False)]
    try:
        # The flags alone: `train()` and `eval()` may be overridden, and merge or unpack weights.
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def lazy_name(model: nn.Module) -> str | None:
    """The first parameter or buffer that the model's first run will create; None if all exist."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next((name for name, tensor in tensors if is_lazy(tensor)), None)


@contextmanager
def restore_state(model: nn.Module) -> Iterator[None]:
    """Leave training flags, buffers and random states as they are, whatever runs in the block.

    It runs on copies of the buffers. Compiled code is bound to the buffers themselves: there they
    are written back.
    """
    modules = list(model.modules())
    flags = [(module, module.training) for module in modules]
    on_copies = not any(is_compiled(module) for module in modules)
    copies: dict[int, Tensor] = {}  # a buffer may be held by several modules
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
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # of the same kind
        return tensor.clone()


def _write(tensor: Tensor, numbers: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(numbers)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
