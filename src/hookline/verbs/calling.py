"""Running a model on whatever a person gives as its input. Imports errors, torch_internals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hookline.engine.errors import InputError
from hookline.engine.torch_internals import buffers

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[], Any]


def call(model: nn.Module, inputs: Any) -> Any:
    """Run a model: a tuple is its arguments, a mapping its keyword arguments.

    A function is called as it is: code that runs the model somewhere inside. Anything else is the
    model's only argument.
    """
    if isinstance(inputs, tuple):
        return model(*inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if callable(inputs) and not isinstance(inputs, Tensor | nn.Module):
        return inputs()
    return model(inputs)


@contextmanager
def as_found(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode without gradients, and leave it as it was.

    Training flags, buffers and random states are put back afterwards.

    Raises:
        InputError: the model has lazy parameters, which its first run would create for good.
    """
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            raise InputError(
                f"the parameter {name} is lazy: the first run of the model would create it for"
                " good.\nRun the model once yourself, then ask again."
            )
    # The flags alone: `train()` and `eval()` may be overridden, and merge or unpack weights.
    flags = [(module, module.training) for module in model.modules()]
    kept = [
        (table, name, buffer, buffer.clone(), _version(buffer))
        for module in model.modules()
        for table in [buffers(module)]
        for name, buffer in table.items()
        if buffer is not None and not buffer.is_meta
    ]
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        try:
            for module, _ in flags:
                module.training = False
            yield
        finally:
            for module, training in flags:
                module.training = training
            for table, name, buffer, before, version in kept:
                table[name] = buffer
                if version is None or buffer._version != version:
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(before)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
