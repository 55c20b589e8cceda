"""Quantiles with a bound on their relative error, by a sketch that adds up.

The sketch is that of Masson, Rim and Lee, "DDSketch: a fast and fully-mergeable quantile sketch
with relative-error guarantees", VLDB 2019. Its range of bins is fixed here. Within an octave, bins
have equal widths, so that no logarithm is computed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookline.display.units import measure
from hookline.errors import InputError
from hookline.statistics.flat_numbers import check_slots
from hookline.statistics.histogram import BinnedStatistic

_N_TAIL = 3  # the slots after the counts of finite elements
_NEARLY_ALL = 0.999999  # above it, six digits of a percentage may round to 100


@final
@dataclass(frozen=True)
class Quantiles:
    """Quantiles of elements, each with a bounded relative error: the result of `quantiles()`.

        >>> statistic = hl.stats.quantiles((0.0, 0.5))
        >>> x = torch.tensor([1.0, 2.0, 4.0])
        >>> result = statistic.result(statistic.update(statistic.start(x), x))
        >>> result[0.0], round(result[0.5], 1), result.count
        (1.0, 2.0, 3)

    Args:
        q: which quantiles, from 0 to 1.
        values: the quantiles of the finite elements. A value is NaN without finite elements, and
            where it lies beyond the range of the sketch.
        error: the bound of the relative error, at most the one that was asked for. Quantiles nearer
            to 0 than the lowest magnitude of the sketch are 0.
        count: how many elements there are.
        non_finite: how many of them are NaN or infinite. The quantiles leave these out.
        min: the smallest finite element; inf without any.
        max: the greatest finite element; -inf without any.

    Raises:
        KeyError: by `result[q]`: it is not one of `q`.
    """

    q: tuple[float, ...]
    values: tuple[float, ...]
    error: float
    count: int
    non_finite: int
    min: float
    max: float

    def __getitem__(self, q: float) -> float:
        """Return one of the quantiles.

        Raises:
            KeyError: it is not one of `q`.
        """
        if q not in self.q:
            raise KeyError(f"q must be one of {', '.join(map(str, self.q))}, got {q!r}.")
        return self.values[self.q.index(q)]

    def __str__(self) -> str:
        pairs = zip(self.q, self.values, strict=True)
        numbers = ", ".join(f"{percent_text(q)} % {measure(value)}" for q, value in pairs)
        return (
            f"{self.count:,} elements, {self.non_finite:,} non-finite"
            f"\nwithin {100 * self.error:.2g} %: {numbers}"
        )


@final
class QuantilesStatistic(BinnedStatistic):
    """A `Statistic` whose result is `Quantiles`."""

    def __init__(self, q: Sequence[float], error: float, low: float, high: float) -> None:
        if not isinstance(q, Iterable) or not q or not all(map(_is_from_0_to_1, q)):
            raise InputError(
                f"q must be numbers from 0 to 1, got {q!r}.\nGive q=(0.01, 0.5, 0.99)."
            )
        if not (_is_from_0_to_1(error) and 0.00025 <= error < 1):
            raise InputError(
                f"error must be at least 0.00025 and less than 1, got {error!r}.\nGive error=0.01."
            )
        per_octave = 1
        while _relative_error(per_octave) > error:
            per_octave *= 2
        super().__init__(low, high, per_octave)
        self.options: dict[str, Any] = {"q": list(q), "error": error, "low": low, "high": high}
        self.q: tuple[float, ...] = tuple(map(float, q))
        self.error: float = _relative_error(per_octave)

    def result(self, slots: Tensor) -> Quantiles:
        """Read slots."""
        check_slots(slots, self.n_slots)
        *_, non_finite, negated_min, greatest = slots.tolist()
        (n,), (values,) = (
            numbers.tolist() for numbers in self.results_of_many(slots.cpu().numpy()[None])
        )
        counts = int(n + non_finite), int(non_finite)
        return Quantiles(self.q, tuple(values), self.error, *counts, -negated_min, greatest)

    def results_of_many(self, slots: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Compute the quantiles of many slots, which `result` gives for each.

        Args:
            slots: the slots, shape `(n, width)`.

        Returns:
            The counts of finite elements, shape `(n,)`, and the quantiles, shape `(n, len(q))`.
        """
        totals = np.cumsum(slots[:, :-_N_TAIL], axis=1)
        counts, ends = totals[:, -1:], np.stack([-slots[:, -2], slots[:, -1]], axis=1)
        ranks = np.floor(np.array(self.q) * (counts - 1))
        bins = [
            np.searchsorted(row, rank, "right") for row, rank in zip(totals, ranks, strict=True)
        ]
        places = np.minimum(np.array(bins, np.intp).reshape(ranks.shape), totals.shape[1] - 1)
        values = np.clip(np.array(self._bin_representatives)[places], ends[:, :1], ends[:, 1:])
        values = np.where(ranks == counts - 1, ends[:, 1:], values)
        values = np.where(ranks == 0, ends[:, :1], values)
        return counts[:, 0], np.where(counts > 0, values, math.nan)

    @functools.cached_property
    def _bin_representatives(self) -> list[float]:
        """Return the number that stands for each bin: the relative error is that of both edges."""
        edges = self.edges()
        upper = [0.0, *(2 * a * b / (a + b) for a, b in itertools.pairwise(edges[1:-1])), math.nan]
        return [*(-middle for middle in reversed(upper[1:])), 0.0, 0.0, *upper]


def percent_text(q: float) -> str:
    """Format a share as percent; 100 is exact.

    >>> percent_text(0.999), percent_text(0.9999999), percent_text(1)
    ('99.9', '99.99999', '100')
    """
    return f"{100 * q:.{12 if _NEARLY_ALL < q < 1 else 6}g}"


def _is_from_0_to_1(number: Any) -> bool:
    return isinstance(number, int | float) and 0 <= number <= 1


def _relative_error(per_octave: int) -> float:
    """Return the relative error of the number that stands for the widest bin."""
    return 1 / (2 * per_octave + 1)
