"""The modes that the present code runs in: tracing, transforms, recomputation, autocast.

Asked once a pass, or where a value is looked at after the model has run; never at a site.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum, auto

import torch
from torch import Tensor

from hookline.engine.torch_private.autograd import backward_number
from hookline.engine.torch_private.checkpoint import is_recomputing
from hookline.engine.torch_private.dynamo import while_tracing
from hookline.engine.torch_private.functorch import (
    is_mapped,
    is_of_running_transform,
    is_ordinary,
    is_wrapped,
    tracer,
    transform,
    unwrapped,
)
from hookline.errors import AttachError


class Mode(Enum):
    """The modes of torch that change how a pass is seen."""

    TRANSFORMED = auto()  # a transform of torch.func: vmap, grad, jvp, ...
    RECOMPUTED = auto()  # a checkpointed region that torch computes again


def mode_now() -> Mode | None:
    """Look at what the present code runs in, as a pass begins: once. None is nothing special.

    Raises:
        AttachError: something traces the model.
    """
    if is_ordinary() and backward_number() == -1:
        return None
    if is_recomputing():
        return Mode.RECOMPUTED
    refuse_tracing()
    return None if transform() is None else Mode.TRANSFORMED


def refuse_tracing() -> None:
    """Refuse to go on if a graph is made of what runs now: hooks would become part of it.

    Raises:
        AttachError: something traces the model.
    """
    name = tracer()
    if name is not None:
        raise AttachError(
            f"{name} traces this model while a line is on, and would bake its hooks into the graph."
            "\nTrace it outside of the block, and attach to what the tracing returns, or to the"
            " Python model."
        )


def is_transformed() -> bool:
    """Tell whether a transform of torch.func (vmap, grad, jvp, ...) is running."""
    return transform() is not None


def hides_gradients(tensor: Tensor) -> bool:
    """Tell whether vmap's batch, of which this tensor is one example, requires a gradient.

    No hook on one example's tensor is ever called.
    """
    while is_wrapped(tensor) and is_mapped(tensor):
        tensor, _ = unwrapped(tensor)
        if tensor.requires_grad:
            return True
    return False


def refuse_mapped(name: str) -> None:
    """Refuse gradients of one example under vmap.

    Raises:
        AttachError: always.
    """
    raise AttachError(
        f"{name}: under vmap gradients flow through the whole batch, and no hook on one example's"
        " value is called.\nTake the gradient inside, vmap(grad(f)): there hooks see each example's"
        " own. Or run the model on the batch, without vmap."
    )


def plain(tensor: Tensor, *, keeps_graph: bool = False) -> Tensor:
    """A tensor without the wrappers of transforms that are over.

    Under vmap a module sees one example; what it saw in all of them comes with the batch in front,
    the outermost vmap's first. While the transform runs, the tensor is what its functions see.
    """
    if not is_wrapped(tensor):
        return tensor
    dimensions = []
    while is_wrapped(tensor) and not is_of_running_transform(tensor):
        tensor, dimension = unwrapped(tensor)
        if dimension is not None:
            dimensions.append(dimension)
    rest = list(range(tensor.dim()))
    front = [rest.pop(dimension) for dimension in reversed(dimensions)]
    if front:
        tensor = tensor.permute(*front, *rest)
    return tensor if keeps_graph else tensor.detach()


def innermost(tensor: Tensor) -> Tensor:
    """The tensor that holds the numbers: under vmap, only its version tells of writes."""
    while is_wrapped(tensor):
        tensor, _ = unwrapped(tensor)
    return tensor


def has_numbers(tensor: Tensor) -> bool:
    """Tell whether a tensor has data: it is neither on the meta device nor fake."""
    return not tensor.is_meta and not any(
        kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__
    )


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Autocast switched off for a kind of device, as in `device.type`, where it is on."""
    if _has_autocast(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


@while_tracing  # dynamo of torch 2.11 does not know the question
def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)
