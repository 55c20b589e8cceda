"""The numbers of any tensor, flat and real: sparse, nested, quantised and complex ones, too."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hookline.engine.pytree import describe
from hookline.errors import StructureError

# Tensors are read in chunks whose float64 copy takes at most 64 MiB.
CHUNK_NUMEL = 64 * 1024**2 // 8

# Larger sparse tensors (1 GiB as dense float32) are not made dense.
DENSE_NUMEL = 2**28


def check_has_data(value: Tensor) -> None:
    """Refuse a meta tensor.

    Raises:
        StructureError: the tensor is on the meta device.
    """
    if value.is_meta:
        raise StructureError(
            f"the value of a statistic must have data, got {describe.in_full(value)}."
            '\nMove the model to a device before it runs: model.to_empty(device="cpu").'
        )


def strided(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor of any layout as strided tensors, detached.

    Raises:
        RuntimeError: a sparse tensor is too large to be made dense.
    """
    tensor = tensor.detach()
    if tensor.is_nested:
        yield from tensor.unbind()
    elif tensor.is_quantized:
        yield tensor.dequantize()
    elif tensor.layout is not torch.strided:
        if tensor.numel() > DENSE_NUMEL:
            raise RuntimeError(
                f"a {str(tensor.layout).removeprefix('torch.')} tensor of {tensor.numel():,}"
                " elements is too large to be made dense"
            )
        yield tensor.to_dense()
    else:
        yield tensor


def chunks(tensor: Tensor, numel: int) -> Iterator[Tensor]:
    """Yield views of a tensor, split along its longest dimension until each is small enough."""
    if tensor.numel() <= numel:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    n_parts = math.ceil(tensor.numel() / numel)
    for part in torch.split(tensor, max(tensor.shape[longest] // n_parts, 1), dim=longest):
        yield from chunks(part, numel)


def real64(chunk: Tensor) -> Tensor:
    """Convert a chunk to float64; take the magnitude of complex numbers."""
    if chunk.device.type == "mps":  # MPS has no float64
        chunk = chunk.cpu()
    if chunk.is_complex():
        return chunk.to(torch.complex128).abs()
    return chunk.to(torch.float64)


def slot_device(value: Tensor) -> torch.device:
    """Return the device for a value's slots: its own, or the CPU where float64 is missing."""
    return torch.device("cpu") if value.device.type == "mps" else value.device
