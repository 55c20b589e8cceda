"""The modes that the present code runs in: tracing, transforms, recomputation, autocast.

The mode is looked up once a pass, or when a value is read after the model has run. It is never
looked up at a site.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto

import torch
from torch import Tensor

from hookline.engine.torch_private.autograd import backward_number
from hookline.engine.torch_private.dynamo import run_at_trace_time
from hookline.engine.torch_private.graph.checkpoint import is_recomputing
from hookline.engine.torch_private.modes import (
    is_of_running_transform,
    is_plain_eager,
    is_vmapped,
    is_wrapped,
    rewrap_legacy_vmap,
    running_tracer,
    running_transform,
    unwrap_legacy_vmap,
    unwrap_transform,
)
from hookline.errors import AttachError


class Mode(Enum):
    """The modes of torch that change how a line handles a pass."""

    TRANSFORMED = auto()  # a transform of torch.func: vmap, grad, jvp, ...
    RECOMPUTED = auto()  # the recomputation of a checkpointed region


def running_mode() -> Mode | None:
    """Return the mode that the present code runs in; None for an ordinary run.

    Called once, when a pass begins.

    Raises:
        AttachError: a tracer runs the model.
    """
    if is_plain_eager() and backward_number() == -1:
        return None
    if is_recomputing():
        return Mode.RECOMPUTED
    refuse_tracing()
    return None if running_transform() is None else Mode.TRANSFORMED


def refuse_tracing() -> None:
    """Raise an error while a tracer makes a graph: the hooks would become part of the graph.

    Raises:
        AttachError: a tracer runs the model.
    """
    name = running_tracer()
    if name is not None:
        raise AttachError(
            f"{name} traces this model while a line is on, and would bake its hooks into the graph."
            "\nTrace it outside of the block, and attach to the result of the tracing, or to the"
            " Python model."
        )


def is_in_transform() -> bool:
    """Tell whether a transform of torch.func (vmap, grad, jvp, ...) is running."""
    return running_transform() is not None


@run_at_trace_time
def is_compiled_in_transform() -> bool:
    """Tell whether code is compiled inside a transform of torch.func."""
    return is_in_transform()


def is_vmapped_with_gradient(tensor: Tensor) -> bool:
    """Tell whether a tensor is one example of a vmapped batch that requires a gradient.

    torch never calls a hook on one example's tensor.
    """
    while is_wrapped(tensor) and is_vmapped(tensor):
        tensor, _ = unwrap_transform(tensor)
        if tensor.requires_grad:
            return True
    return False


def vmapped_gradient_text(name: str) -> str:
    """Say that the gradients of one example under vmap cannot be seen."""
    return (
        f"{name}: under vmap gradients flow through the whole batch, and no hook on one example's"
        " value is called.\nTake the gradient inside, vmap(grad(f)): there hooks see each example's"
        " own. Or run the model on the batch, without vmap."
    )


def map_legacy_vmap(function: Callable[[Tensor], Tensor | None], example: Tensor) -> Tensor | None:
    """Call a function on an example of torch's older vmap, as `torch.vmap` calls functions.

    The older vmap lacks many operations, among them `detach`.

    Returns:
        The function's result as an example of the older vmap; None if the function returned None.
    """
    batch, levels = unwrap_legacy_vmap(example)
    results: list[Tensor | None] = []

    def mapped(part: Tensor) -> Tensor:
        results.append(function(part))
        return part if results[0] is None else results[0]

    for _ in levels:
        mapped = torch.vmap(mapped, randomness="different")
    new = mapped(batch)
    if results[0] is None or not is_wrapped(results[0]):  # it does not depend on the example
        return results[0]
    return rewrap_legacy_vmap(new, levels)


def unwrap_ended_transforms(
    tensor: Tensor, *, keeps_graph: bool = False, also_running: bool = False
) -> Tensor:
    """Return a tensor without the wrappers of transforms that have ended.

    Under vmap a module sees one example. Its value then comes back with the batch dimension in
    front, the outermost vmap's first. While the transform runs, the tensor is left as the
    transform's functions see it, unless `also_running` is given.
    """
    if not is_wrapped(tensor):
        return tensor
    dimensions = []
    while is_wrapped(tensor) and (also_running or not is_of_running_transform(tensor)):
        tensor, dimension = unwrap_transform(tensor)
        if dimension is not None:
            dimensions.append(dimension)
    rest = list(range(tensor.dim()))
    front = [rest.pop(dimension) for dimension in reversed(dimensions)]
    if front:
        tensor = tensor.permute(*front, *rest)
    return tensor if keeps_graph else tensor.detach()


def unwrap_all_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor that holds the numbers; under vmap, only its version counts the writes."""
    while is_wrapped(tensor):
        tensor, _ = unwrap_transform(tensor)
    return tensor


def has_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor has data: it is neither on the meta device nor fake."""
    return not tensor.is_meta and not any(
        kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__
    )


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Return a context in which autocast is off for a kind of device, as in `device.type`.

    Where autocast is off already, the context does nothing.
    """
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


@run_at_trace_time  # dynamo of torch 2.11 cannot trace is_autocast_available
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)
