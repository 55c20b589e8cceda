"""Compute the statistics and the histogram of one value."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.display.text import name_without_torch
from hookline.engine.pytree import tree
from hookline.engine.pytree.tree import Leaf
from hookline.errors import InputError
from hookline.statistics.flat_numbers import float64_chunks
from hookline.statistics.moments import Moments, measure_moments
from hookline.util.view_as_array import view_as_array

Array = NDArray[Any]

# Between these magnitudes neither squares nor fourth powers overflow or vanish.
_LARGE = 1e75

# Ranges below this one have bins of subnormal numbers.
_SMALL = 1e-290

# Below this share of the mean, sums of squares give fewer than eight digits of the deviation.
_COARSE = 1e-4

BLOCK_NUMEL = 2**16  # elements whose float64 copy, of 512 KiB, stays in a core's cache

_EPS = float(np.finfo(np.float64).eps)
_MOST_BLUR = 0.01
_MOST_CLOSE = 4096  # numbers of a block; for more, NumPy takes less time


@final
@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor."""

    mean: float | None  # the mean of the finite elements; None if there are none
    # the standard deviation of the finite elements, with divisor n; None if there are none
    std: float | None
    min: float | None  # the smallest finite element; None if there are none
    max: float | None  # the largest finite element; None if there are none
    # the share of elements that are exactly zero, from 0 to 1; None for an empty tensor
    zeros: float | None
    non_finite: int  # the number of elements that are NaN or infinite
    numel: int  # the number of elements
    shape: str  # the shape, such as `[2, 3]`
    dtype: str  # the tensor's own dtype, such as `float32`


def main_tensor(value: Any, *, with_meta: bool = False) -> Tensor | None:
    """Return the main tensor of a value: its first floating or complex tensor, else its first.

        >>> main_tensor((torch.arange(2), torch.zeros(3))).shape
        torch.Size([3])

    Args:
        value: any structure that holds tensors.
        with_meta: include meta tensors, which have no data.

    Returns:
        The tensor; None if the value holds none.
    """
    first = None
    for _, tensor in tree.tensors(value):
        if tensor.is_meta and not with_meta:
            continue
        if _is_floating(tensor):
            return tensor
        first = tensor if first is None else first
    return first


def measured_tensors(value: Any) -> list[tuple[Leaf, Tensor]]:
    """Return the tensors of a value that are measured, each with its leaf.

        >>> measured_tensors((torch.arange(2), torch.zeros(3), {"a": torch.ones(1)}))
        [((1,), tensor([0., 0., 0.])), ((2, 'a'), tensor([1.]))]

    Returns:
        The floating and complex tensors, the main tensor first of all. A value without any has its
        main tensor alone.
    """
    main = main_tensor(value)
    by_id: dict[int, tuple[Leaf, Tensor]] = {}
    for leaf, tensor in tree.tensors(value):
        if tensor is main or (_is_floating(tensor) and not tensor.is_meta):
            by_id[id(tensor)] = leaf, tensor
    return list(by_id.values())


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def main_tensor_statistics(value: Any) -> Statistics | None:
    """Compute the statistics of a value's main tensor: its first floating one, else its first.

        >>> statistics = main_tensor_statistics(torch.tensor([0.0, 1.0, 2.0, float("inf")]))
        >>> statistics.mean, statistics.max, statistics.zeros, statistics.non_finite
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
    moments = measure_moments(tensor)
    shape = str(list(tensor.shape)) if not tensor.is_nested else "nested"
    statistics = moments_to_statistics(moments, shape, tensor.dtype)
    if not moments.finite:
        return statistics
    mean, std = _mean_and_std(tensor, moments)
    return replace(statistics, mean=mean, std=std)


def moments_to_statistics(moments: Moments, shape: str, dtype: torch.dtype) -> Statistics:
    """Convert moments to statistics."""
    has_numbers = moments.finite > 0
    return Statistics(
        mean=moments.mean if has_numbers else None,
        std=moments.std if has_numbers else None,
        min=moments.min if has_numbers else None,
        max=moments.max if has_numbers else None,
        zeros=moments.zero_share if moments.count else None,
        non_finite=moments.non_finite,
        numel=moments.count,
        shape=shape,
        dtype=name_without_torch(dtype),
    )


def _mean_and_std(tensor: Tensor, moments: Moments) -> tuple[float, float]:
    """Return the mean and the standard deviation; by deviations where the sums are too coarse."""
    mean, std, unit = moments.mean, moments.std, moments.max_abs
    is_fine = 1 / _LARGE < unit < _LARGE and std >= abs(mean) * _COARSE
    if is_fine or not unit or moments.min == moments.max:
        return mean, std
    scale = 1.0 if 1 / _LARGE < unit < _LARGE else unit
    finite = (
        piece[piece.isfinite()] if moments.non_finite else piece.reshape(-1)
        for piece in float64_chunks(tensor)
    )
    blocks = (block for part in finite for block in torch.split(part, BLOCK_NUMEL) if len(block))
    mean, std = mean_and_std(block / scale if scale != 1 else block for block in blocks)
    return mean * scale, std * scale


def mean_and_std(parts: Iterable[Tensor]) -> tuple[float, float]:
    """Compute the mean and the standard deviation of all numbers, with their count as divisor.

    `Moments` gives both from sums of powers. This way, by deviations from the mean, is exact also
    where the deviation is small beside the mean. It is faster, where nothing else is asked.

    Args:
        parts: flat tensors of float64. None of them is empty.

    Returns:
        Both; NaN without parts. Where a number is NaN or infinite, neither is finite.
    """
    count, total_mean, squares = 0, 0.0, 0.0
    for part in parts:
        n, mean = len(part), part.mean().item()
        deviations = part - mean
        # Merge two means and two sums of squared deviations (Chan, Golub and LeVeque).
        apart = mean - total_mean
        between = apart * apart * (count * n / (count + n))
        squares += torch.dot(deviations, deviations).item() + between
        count += n
        total_mean += apart * (n / count)
    return (total_mean, math.sqrt(squares / count)) if count else (math.nan, math.nan)


def histogram_and_statistics(tensor: Tensor, bins: int) -> tuple[Array, Array, Statistics]:
    """Count the elements in equal bins from the smallest to the largest finite element.

    The result equals `numpy.histogram` of the finite elements in float64. The tensor is read in
    chunks.

    Returns:
        The counts, shape `(bins,)`; the edges, shape `(bins + 1,)`; the statistics.
    """
    statistics = main_tensor_statistics(tensor)
    if statistics is None:
        raise InputError("the value has no numbers.")
    low, high = statistics.min, statistics.max
    if low is None or high is None:
        return np.zeros(bins, np.int64), np.linspace(0.0, 1.0, bins + 1), statistics
    if low == high:
        low, high = axis_range_around(low)
    # Halved if the range would overflow; enlarged where bins would be finer than float64.
    factor = 0.5 if math.isinf(high - low) else 2.0**200 if high - low < _SMALL else 1.0
    edges = np.linspace(low * factor, high * factor, bins + 1)
    counts = np.zeros(bins, np.int64)
    for piece in float64_chunks(tensor):
        flat = piece.flatten().cpu()
        if statistics.non_finite:
            flat = flat[flat.isfinite()]
        counts += count_in_equal_bins(view_as_array(flat * factor if factor != 1 else flat), edges)
    edges /= factor
    return counts, edges, statistics


def count_in_equal_bins(numbers: NDArray[Any], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """Count numbers in bins, each from its lower edge on; the last one with its upper edge.

    `numpy.histogram` counts the same, in twice the time.

        >>> edges = np.linspace(0.0, 1.0, 5)
        >>> count_in_equal_bins(np.array([0.0, 0.1, 0.25, 1.0]), edges).tolist()
        [2, 1, 0, 1]

    Args:
        numbers: finite numbers from the first edge to the last, shape `(numbers,)`.
        edges: the edges of equal bins, ascending, shape `(bins + 1,)`.

    Returns:
        The counts, shape `(bins,)`.
    """
    n, low, width = len(edges) - 1, edges[0], edges[-1] - edges[0]
    # How far rounding may move a number, in bins. This close to an edge, the edge itself decides.
    blur = 8 * _EPS * n * (1 + max(abs(low), abs(edges[-1])) / width)
    if not blur < _MOST_BLUR:
        places = np.searchsorted(edges[1:-1], numbers, side="right")
        return np.bincount(places, minlength=n)
    counts = np.zeros(n, np.int64)
    for start in range(0, len(numbers), BLOCK_NUMEL):
        block = numbers[start : start + BLOCK_NUMEL]
        places = block.astype(np.float64)
        places -= low
        places *= n / width
        bins = places.astype(np.intp)
        np.minimum(bins, n - 1, out=bins)
        nearest = np.rint(places)
        places -= nearest
        # At the first edge, where the zeros of a ReLU are, there is one bin alone.
        is_close = (np.abs(places, out=places) <= blur) & (nearest > 0)
        n_close = np.count_nonzero(is_close)
        if n_close > _MOST_CLOSE:
            counts += np.histogram(block, n, (low, edges[-1]))[0]
            continue
        if n_close:
            above = nearest[is_close].astype(np.intp)
            above -= block[is_close] < edges[above]
            bins[is_close] = above.clip(0, n - 1)
        counts += np.bincount(bins, minlength=n)
    return counts


def axis_range_around(number: float) -> tuple[float, float]:
    """Return the ends of an axis around a single number, at least 0.5 above and below it."""
    reach = max(0.5, abs(number) * 1e-3)
    return max(number - reach, -sys.float_info.max), min(number + reach, sys.float_info.max)
