"""Histograms with fixed edges, which add up."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from hookline.display.units import measure
from hookline.statistics.bins import LogBins

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 64


@final
@dataclass(frozen=True)
class Histogram:
    """Count the numbers between fixed edges.

        >>> statistic = hl.stats.histogram(low=1, high=4)
        >>> x = torch.tensor([0.5, 2.0, 3.0])
        >>> found = statistic.result(statistic.update(statistic.start(x), x))
        >>> found.edges
        (-inf, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, inf)
        >>> found.counts
        (0, 0, 0, 0, 1, 0, 2, 0)

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

    def __str__(self) -> str:
        filled = [place for place, count in enumerate(self.counts) if count]
        text = f"{self.count:,} elements, {self.zeros:,} zeros, {self.non_finite:,} non-finite"
        if not filled:
            return text
        n = filled[-1] + 1 - filled[0]
        each = -(-n // _MOST_BARS)  # bins to a bar
        shown = [
            sum(self.counts[start : start + each])
            for start in range(filled[0], filled[-1] + 1, each)
        ]
        top = max(shown)
        bars = "".join(_BARS[-(-7 * count // top)] if count else " " for count in shown)
        ends = (measure(self.edges[place]) for place in (filled[0], filled[-1] + 1))
        return f"{text}\n{next(ends)} {bars} {next(ends)}"


@final
class HistogramStatistic:
    """A `Statistic` whose result is a `Histogram`."""

    def __init__(self, low: float, high: float, per_octave: int) -> None:
        self.options: dict[str, Any] = {"low": low, "high": high, "per_octave": per_octave}
        self._bins = bins = LogBins(low, high, per_octave)
        self.start = bins.start
        self.update = bins.update
        self.merge = bins.merge

    def result(self, slots: Tensor) -> Histogram:
        """Read slots."""
        bins, (*counts, negated_min, greatest) = self._bins, slots.tolist()
        whole = [int(count) for count in counts]
        upper = bins.edges()
        return Histogram(
            counts=(*whole[: bins.zero], *whole[bins.zero + 1 : bins.non_finite]),
            edges=tuple(itertools.chain((-edge for edge in reversed(upper[1:])), upper)),
            zeros=whole[bins.zero],
            non_finite=whole[bins.non_finite],
            min=-negated_min,
            max=greatest,
        )
