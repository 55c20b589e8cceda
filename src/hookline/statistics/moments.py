"""Moments of numbers, which add up: two halves give the moments of the whole.

They are computed by NumPy, block by block in float64. So equal numbers in equal order give equal
bits, whatever the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.display.units import measure

_BLOCK = 65_536  # numbers: as float64, they fit into the cache


@final
@dataclass(frozen=True, slots=True)
class Moments:
    """The count, the sums of powers and the extremes of numbers: the result of `moments()`.

        >>> import numpy as np
        >>> from hookline.statistics import Moments
        >>> both = Moments.of(np.array([1.0, 2.0])) + Moments.of(np.array([3.0, np.nan]))
        >>> both.count, both.non_finite, both.mean
        (4, 1, 2.0)

    Further attributes are `finite` (the count of finite numbers), `zero_share` (from 0 to 1),
    `mean`, `std`, `rms`, `norm`, `kurtosis` and `max_abs`. `std` divides by the count, not by the
    count minus 1. `rms` is the root of the mean square, and `norm` the L2 norm. `kurtosis` is the
    mean of the fourth powers over the squared mean of the squares: 3 for normal numbers of mean 0.

    Sums are in float64. So of float64 numbers above 1.3e154 the squares overflow, and `norm` and
    `rms` are inf; of those below 2e-162 the squares vanish, and both are 0. `min`, `max` and
    `max_abs` are right.

    Args:
        count: how many numbers there are.
        non_finite: how many of them are NaN or infinite. The fields below leave these out.
        zeros: how many are exactly 0.
        sum: the sum.
        sum2: the sum of squares.
        sum4: the sum of fourth powers.
        min: the least number; inf without finite numbers.
        max: the greatest number; -inf without finite numbers.
    """

    count: int = 0
    non_finite: int = 0
    zeros: int = 0
    sum: float = 0.0
    sum2: float = 0.0
    sum4: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @staticmethod
    def of(numbers: NDArray[Any]) -> Moments:
        """Measure an array of real numbers of any shape."""
        flat = np.ascontiguousarray(numbers).reshape(-1)
        if len(flat) <= _BLOCK:
            return _block_moments(flat)
        moments = Moments()
        for start in range(0, len(flat), _BLOCK):
            moments = moments + _block_moments(flat[start : start + _BLOCK])
        return moments

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.non_finite + other.non_finite,
            self.zeros + other.zeros,
            self.sum + other.sum,
            self.sum2 + other.sum2,
            self.sum4 + other.sum4,
            min(self.min, other.min),
            max(self.max, other.max),
        )

    @property
    def finite(self) -> int:
        """The count of finite numbers."""
        return self.count - self.non_finite

    @property
    def zero_share(self) -> float:
        """The share of all numbers that are exactly 0, from 0 to 1; NaN without any."""
        return self.zeros / self.count if self.count else math.nan

    @property
    def mean(self) -> float:
        """The mean of the finite numbers; NaN without any."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        """The standard deviation of the finite numbers, divided by their count; NaN without any.

        It loses digits where the mean is much larger: at a mean of 10^6 deviations, four remain.
        """
        if not self.finite:
            return math.nan
        if self.min == self.max:
            return 0.0  # exactly, whatever the sums were rounded to
        return math.sqrt(max(self.sum2 / self.finite - self.mean * self.mean, 0.0))

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite numbers; NaN without any."""
        return math.sqrt(self.sum2 / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite numbers."""
        return math.sqrt(self.sum2)

    @property
    def kurtosis(self) -> float:
        """The mean of fourth powers over the squared mean of squares; NaN if all are 0.

        The mean is not subtracted. It is 3 for normal numbers of mean 0, 1 if all magnitudes are
        equal, and large where few numbers stand out.
        """
        return self.sum4 / self.sum2 * self.finite / self.sum2 if self.sum2 else math.nan

    @property
    def max_abs(self) -> float:
        """The greatest magnitude of the finite numbers; NaN without any."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.nan

    def __str__(self) -> str:
        text = f"{self.count:,} elements, {self.zeros:,} zeros, {self.non_finite:,} non-finite"
        if not self.finite:
            return text
        numbers = ", ".join(
            f"{name} {measure(getattr(self, name))}" for name in ("mean", "std", "min", "max")
        )
        return f"{text}\n{numbers}"

    def as_json(self) -> list[Any]:
        """Return the fields as a list that JSON can hold: null stands for a missing extreme."""
        extremes = [self.min, self.max] if self.finite else [None, None]
        counts = [self.count, self.non_finite, self.zeros]
        return [*counts, self.sum, self.sum2, self.sum4, *extremes]

    @staticmethod
    def from_json(fields: list[Any]) -> Moments:
        """Read the list that `as_json` made.

        Raises:
            ValueError, TypeError: it is not such a list.
        """
        count, non_finite, zeros, sum1, sum2, sum4, least, greatest = fields
        return Moments(
            int(count), int(non_finite), int(zeros), float(sum1), float(sum2), float(sum4),
            math.inf if least is None else float(least),
            -math.inf if greatest is None else float(greatest),
        )  # fmt: skip


def _block_moments(block: NDArray[Any]) -> Moments:
    with np.errstate(over="ignore", invalid="ignore"):
        values = block.astype(np.float64)
        squares = values * values
        sum2 = float(squares.sum())
        non_finite = 0
        if not math.isfinite(sum2):  # rarely: so only then are the numbers asked one by one
            is_finite = np.isfinite(values)
            non_finite = len(values) - int(np.count_nonzero(is_finite))
            values, squares = values[is_finite], squares[is_finite]
            sum2 = float(squares.sum())
        if not len(values):
            return Moments(len(block), non_finite)
        return Moments(
            len(block),
            non_finite,
            len(values) - int(np.count_nonzero(values)),
            float(values.sum()) + 0.0,  # zeros without a sign
            sum2,
            float((squares * squares).sum()),
            float(values.min()),
            float(values.max()),
        )


def merge_by_key(
    moments: Mapping[str, Moments], other: Mapping[str, Moments]
) -> dict[str, Moments]:
    """Add up the moments of two mappings, key by key."""
    return {
        key: moments.get(key, Moments()) + other.get(key, Moments()) for key in {**moments, **other}
    }
