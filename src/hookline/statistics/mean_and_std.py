"""The mean and the standard deviation of numbers, by deviations from their mean.

`Moments` gives both from sums of powers. This way is exact also where the deviation is small beside
the mean. It is faster, where nothing else is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK_NUMEL = 2**16  # elements whose float64 copy, of 512 KiB, stays in a core's cache


def mean_and_std(parts: Iterable[Tensor]) -> tuple[float, float]:
    """Compute the mean and the standard deviation of all numbers, with their count as divisor.

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
