"""Statistics of a value at a site, for tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.pytree import tree

# Tensors are read in chunks whose float64 copy takes at most 64 MiB.
CHUNK_NUMEL = 64 * 1024**2 // 8

# Larger sparse tensors (1 GiB as dense float32) are not made dense.
DENSE_NUMEL = 2**28

_LARGE = 1e150


@final
@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor.

    Args:
        mean: the mean of the finite elements; None if there are none.
        std: the standard deviation of the finite elements, with divisor n; None if there are none.
        min: the smallest finite element; None if there are none.
        max: the largest finite element; None if there are none.
        zeros: the share of elements that are exactly zero, from 0 to 1; None for an empty tensor.
        non_finite: the number of elements that are NaN or infinite.
        numel: the number of elements.
        shape: the shape, such as `[2, 3]`.
        dtype: the tensor's own dtype, such as `float32`.
    """

    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    zeros: float | None
    non_finite: int
    numel: int
    shape: str
    dtype: str


def main_tensor(value: Any) -> Tensor | None:
    """Return the main tensor of a value: its first floating or complex tensor, else its first.

        >>> main_tensor((torch.arange(2), torch.zeros(3))).shape
        torch.Size([3])

    Returns:
        The tensor; None if the value holds no tensor with data (a meta tensor has none).
    """
    first = None
    for _, tensor in tree.tensors(value):
        if tensor.is_meta:
            continue
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
        first = tensor if first is None else first
    return first


def site_statistics(value: Any) -> Statistics | None:
    """Compute the statistics of a value's main tensor: its first floating one, else its first.

        >>> found = site_statistics(torch.tensor([0.0, 1.0, 2.0, float("inf")]))
        >>> found.mean, found.max, found.zeros, found.non_finite
        (1.0, 2.0, 0.25, 1)

    Sums are computed in float64, so narrow dtypes (float16, bfloat16, the 8-bit ones) do not
    overflow. For complex numbers the magnitude is measured.

    Args:
        value: the value at a site: a tensor, or any structure that holds tensors.

    Returns:
        The statistics; None if the value holds no tensor with data.

    Raises:
        RuntimeError: torch cannot read the tensor's numbers (for example packed 4-bit dtypes), or a
            sparse tensor is too large to be made dense.
    """
    tensor = main_tensor(value)
    if tensor is None:
        return None
    moments = _RunningMoments()
    for piece in pieces(tensor):
        moments.add(piece)
    return Statistics(
        mean=moments.mean,
        std=moments.std,
        min=moments.low,
        max=moments.high,
        zeros=moments.n_zeros / moments.numel if moments.numel else None,
        non_finite=moments.numel - moments.n_finite,
        numel=moments.numel,
        shape=str(list(tensor.shape)) if not tensor.is_nested else "nested",
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of any tensor in chunks of float64; for complex ones the magnitude.

    Raises:
        RuntimeError: torch cannot read the numbers, or a sparse tensor is too large.
    """
    for part in _dense(tensor.detach()):
        for chunk in _chunks(part):
            yield _real(chunk)


@final
class _RunningMoments:
    """The running mean, standard deviation and range of chunks of float64."""

    def __init__(self) -> None:
        self.numel = 0
        self.n_finite = 0
        self.n_zeros = 0
        self.mean: float | None = None
        self.std: float | None = None
        self.low: float | None = None
        self.high: float | None = None

    def add(self, chunk: Tensor) -> None:
        """Add a chunk; NaN and infinity are counted and left out."""
        self.numel += chunk.numel()
        self.n_zeros += chunk.numel() - int(chunk.count_nonzero())
        if not chunk.numel():
            return
        low, high = _bounds(chunk)
        # aminmax propagates NaN, so finite bounds mean that all elements are finite.
        if not (math.isfinite(low) and math.isfinite(high)):
            chunk = chunk[chunk.isfinite()]
            if not chunk.numel():
                return
            low, high = _bounds(chunk)
        peak = max(abs(low), abs(high))
        # Outside this range the squares would overflow or underflow.
        scale = peak if peak and not 1 / _LARGE < peak < _LARGE else 1.0
        std, mean = torch.std_mean(chunk / scale if scale != 1 else chunk, correction=0)
        self._merge(chunk.numel(), float(mean) * scale, float(std) * scale)
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)

    def _merge(self, n_new: int, mean: float, std: float) -> None:
        n_old, self.n_finite = self.n_finite, self.n_finite + n_new
        if self.mean is None or self.std is None:
            self.mean, self.std = mean, std
            return
        old, new = n_old / self.n_finite, n_new / self.n_finite
        gap = mean - self.mean
        # hypot, because the sum of squares could overflow even if its root does not.
        self.std = math.hypot(
            self.std * math.sqrt(old), std * math.sqrt(new), gap * math.sqrt(old * new)
        )
        self.mean += gap * new


def _bounds(chunk: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(chunk)
    return float(low), float(high)


def _dense(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as strided tensors."""
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


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of a tensor, split along its longest dimension until each is small enough."""
    if tensor.numel() <= CHUNK_NUMEL:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=lambda dim: tensor.shape[dim])
    n_parts = math.ceil(tensor.numel() / CHUNK_NUMEL)
    for part in torch.split(tensor, max(tensor.shape[longest] // n_parts, 1), dim=longest):
        yield from _chunks(part)


def _real(chunk: Tensor) -> Tensor:
    """Convert a chunk to float64; take the magnitude of complex numbers."""
    if chunk.device.type == "mps":  # MPS has no float64
        chunk = chunk.cpu()
    if chunk.is_complex():
        return chunk.to(torch.complex128).abs()
    return chunk.to(torch.float64)
