"""Histograms with fixed edges, which add up."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from hookline.display.units import measure
from hookline.statistics.flat_numbers import check_slots
from hookline.statistics.magnitude_bins import BinnedStatistic

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 64


@final
@dataclass(frozen=True)
class Histogram:
    """The counts of elements between fixed edges: the result of `histogram()`.

        >>> statistic = hl.stats.histogram(low=1, high=4)
        >>> x = torch.tensor([0.5, 2.0, 3.0])
        >>> result = statistic.result(statistic.update(statistic.start(x), x))
        >>> result.edges
        (-inf, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, inf)
        >>> result.counts
        (0, 0, 0, 0, 1, 0, 2, 0)

    `count` is the number of all elements. `finite_bins()` returns counts and finite edges to draw.

    Args:
        counts: the number of elements in each bin, without zeros and non-finite ones.
        edges: the edges, one more than there are bins, from -inf over 0 to inf. A bin includes the
            edge that is nearer to 0.
        zeros: how many elements are exactly 0.
        non_finite: how many are NaN or infinite.
        min: the smallest finite element; inf without any.
        max: the greatest finite element; -inf without any.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    zeros: int
    non_finite: int
    min: float
    max: float

    @property
    def count(self) -> int:
        """The number of elements."""
        return sum(self.counts) + self.zeros + self.non_finite

    def finite_bins(self) -> tuple[list[int], list[float]]:
        """Return the bins from the first to the last that hold a number, with finite edges.

        Zeros count in the bin below 0. An edge at infinity becomes the extreme of the numbers.

        Returns:
            The counts, and the edges, one more.
        """
        counts = list(self.counts)
        counts[self.edges.index(0.0) - 1] += self.zeros
        filled = [place for place, count in enumerate(counts) if count]
        if not filled:
            return [], []
        edges = list(self.edges[filled[0] : filled[-1] + 2])
        if math.isinf(edges[0]):
            edges[0] = min(self.min, math.nextafter(edges[1], -math.inf))
        if math.isinf(edges[-1]):
            edges[-1] = max(self.max, math.nextafter(edges[-2], math.inf))
        return counts[filled[0] : filled[-1] + 1], edges

    def __str__(self) -> str:
        filled = [place for place, count in enumerate(self.counts) if count]
        text = f"{self.count:,} elements, {self.zeros:,} zeros, {self.non_finite:,} non-finite"
        if not filled:
            return text
        n = filled[-1] + 1 - filled[0]
        per_bar = -(-n // _MOST_BARS)  # bins to a bar
        counts = [
            sum(self.counts[start : start + per_bar])
            for start in range(filled[0], filled[-1] + 1, per_bar)
        ]
        top = max(counts)
        bars = "".join(_BARS[-(-7 * count // top)] if count else " " for count in counts)
        ends = (measure(self.edges[place]) for place in (filled[0], filled[-1] + 1))
        return f"{text}\n{next(ends)} {bars} {next(ends)}"


@final
class HistogramStatistic(BinnedStatistic):
    """A `Statistic` whose result is a `Histogram`."""

    def __init__(self, low: float, high: float, per_octave: int) -> None:
        super().__init__(low, high, per_octave)
        self.options: dict[str, Any] = {"low": low, "high": high, "per_octave": per_octave}

    def result(self, slots: Tensor) -> Histogram:
        """Read slots."""
        check_slots(slots, self.n_slots)
        *counts, negated_min, greatest = slots.tolist()
        whole = [int(count) for count in counts]
        upper = self.edges()
        return Histogram(
            counts=(*whole[: self.zero], *whole[self.zero + 1 : self.non_finite]),
            edges=tuple(itertools.chain((-edge for edge in reversed(upper[1:])), upper)),
            zeros=whole[self.zero],
            non_finite=whole[self.non_finite],
            min=-negated_min,
            max=greatest,
        )
