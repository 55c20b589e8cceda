"""Statistics of a value at a site, for tables and figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.pytree import tree
from hookline.engine.pytree.tree import Leaf
from hookline.statistics import Moments, measure
from hookline.statistics.spread import BLOCK_NUMEL, mean_and_std
from hookline.statistics.to_numbers import pieces

# Between these magnitudes neither squares nor fourth powers overflow or vanish.
_LARGE = 1e75

# Below this share of the mean, sums of squares give fewer than eight digits of the deviation.
_COARSE = 1e-4


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


def measured_tensors(value: Any) -> list[tuple[Leaf, Tensor]]:
    """Return the tensors of a value that are measured, each with its place in the value.

        >>> measured_tensors((torch.arange(2), torch.zeros(3), {"a": torch.ones(1)}))
        [((1,), tensor([0., 0., 0.])), ((2, 'a'), tensor([1.]))]

    Returns:
        The floating and complex tensors, the main tensor first of all. A value without any has its
        main tensor alone.
    """
    main = main_tensor(value)
    by_id = {
        id(tensor): (leaf, tensor)
        for leaf, tensor in tree.tensors(value)
        if tensor is main
        or (not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()))
    }
    return list(by_id.values())


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
    found = measure(tensor)
    mean, std = _mean_and_std(tensor, found)
    has_numbers = found.finite > 0
    return Statistics(
        mean=mean if has_numbers else None,
        std=std if has_numbers else None,
        min=found.min if has_numbers else None,
        max=found.max if has_numbers else None,
        zeros=found.zero_share if found.count else None,
        non_finite=found.non_finite,
        numel=found.count,
        shape=str(list(tensor.shape)) if not tensor.is_nested else "nested",
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


def _mean_and_std(tensor: Tensor, found: Moments) -> tuple[float, float]:
    """Return the mean and the standard deviation; by deviations where the sums are too coarse."""
    mean, std, unit = found.mean, found.std, found.max_abs
    is_fine = 1 / _LARGE < unit < _LARGE and std >= abs(mean) * _COARSE
    if is_fine or not unit or found.min == found.max:
        return mean, std
    scale = 1.0 if 1 / _LARGE < unit < _LARGE else unit
    finite = (
        piece[piece.isfinite()] if found.non_finite else piece.reshape(-1)
        for piece in pieces(tensor)
    )
    blocks = (block for part in finite for block in torch.split(part, BLOCK_NUMEL) if len(block))
    mean, std = mean_and_std(block / scale if scale != 1 else block for block in blocks)
    return mean * scale, std * scale
