"""Ready-made statistics that add up, for `hl.monitor` and for loops of your own.

Each function makes a statistic: an object with the four methods of `Statistic`. It may be shared
between sites, because it keeps nothing: what was seen is in the slots.

    >>> import hookline as hl
    >>> moments = hl.stats.moments()
    >>> slots = moments.start(torch.empty(0))
    >>> for batch in (torch.ones(3), torch.zeros(1)):
    ...     slots = moments.update(slots, batch)
    >>> moments.result(slots).mean
    0.75
"""

from __future__ import annotations

from collections.abc import Sequence

from hookline.statistics.covariance import Covariance, CovarianceStatistic
from hookline.statistics.histogram import Histogram, HistogramStatistic
from hookline.statistics.moments import Moments
from hookline.statistics.moments_statistic import MomentsStatistic
from hookline.statistics.quantiles import Quantiles, QuantilesStatistic
from hookline.statistics.statistic import Statistic

__all__ = [
    "Covariance", "Histogram", "Moments", "Quantiles", "Statistic", "covariance", "histogram",
    "moments", "quantiles",
]  # fmt: skip


def __dir__() -> list[str]:
    """List the statistics alone, for completion in editors."""
    return [*__all__]


def moments(*, compile: bool | None = None) -> Statistic[Moments]:
    """Measure the count, the sums of powers and the extremes of all elements.

        >>> found = moments()
        >>> slots = found.start(torch.empty(0))
        >>> slots = found.update(slots, torch.tensor([0.0, 1.0, 2.0, float("nan")]))
        >>> result = found.result(slots)
        >>> result.mean, result.zeros, result.non_finite, result.max_abs
        (1.0, 1, 1, 2.0)

    Sums are in float64. NaN and infinity are counted and left out of everything else. For complex
    numbers the magnitude is measured.

    Args:
        compile: whether floating tensors are measured by a function that inductor compiles once,
            in about 4 seconds. It reads each tensor once. True compiles it for the first tensor of
            16,384 elements or more. None compiles it when such tensors add up to 2,147,483,648
            elements, because that is when it has paid. False never compiles it.
    """
    return MomentsStatistic(compile)


def histogram(*, low: float = 1e-9, high: float = 1e9, per_octave: int = 1) -> Statistic[Histogram]:
    """Count elements by sign and magnitude, in bins with fixed edges.

        >>> found = histogram(low=0.25, high=4)
        >>> slots = found.start(torch.empty(0))
        >>> slots = found.update(slots, torch.tensor([0.0, 1.0, 1.5, -3.0, 100.0]))
        >>> print(found.result(slots))
        5 elements, 1 zeros, 0 non-finite
        -4 ▅       █ ▅ inf

    The edges do not depend on the values. So histograms add up exactly, over steps and ranks.

    Args:
        low: the magnitude below which one bin holds all elements other than 0. It is rounded down
            to a power of two.
        high: the magnitude above which one bin holds all elements. It is rounded up likewise.
        per_octave: the number of bins between a power of two and the next, itself a power of two.

    Raises:
        InputError: the range is empty or leaves float32, or `per_octave` is not a power of two.
    """
    return HistogramStatistic(low, high, per_octave)


def quantiles(
    q: Sequence[float] = (0.01, 0.25, 0.5, 0.75, 0.99),
    *,
    error: float = 0.01,
    low: float = 1e-9,
    high: float = 1e9,
) -> Statistic[Quantiles]:
    """Estimate quantiles of all elements, with a bound on the relative error.

        >>> found = quantiles((0.5, 1.0))
        >>> slots = found.start(torch.empty(0))
        >>> for batch in torch.arange(1.0, 1001.0).split(100):
        ...     slots = found.update(slots, batch)
        >>> result = found.result(slots)
        >>> abs(result[0.5] - 500) < 0.01 * 500, result[1.0]
        (True, 1000.0)

    The estimate of a quantile differs from the element of rank `floor(q * (n - 1))` by less than
    `error` times that element. The sketch is that of Masson, Rim and Lee, "DDSketch", VLDB 2019, in
    the form with a fixed range. An error of 0.01 takes 7,688 slots, which are 60 KiB.

    Args:
        q: which quantiles, from 0 to 1.
        error: the bound of the relative error.
        low: the magnitude below which quantiles count as 0.
        high: the magnitude above which quantiles are NaN, except the least and the greatest one.

    Raises:
        InputError: a number is outside its range.
    """
    return QuantilesStatistic(q, error, low, high)


def covariance() -> Statistic[Covariance]:
    """Measure the mean and the covariance of the last dimension, over all others.

        >>> found = covariance()
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        >>> result = found.result(found.update(found.start(x), x))
        >>> result.mean.tolist(), result.matrix.tolist()
        ([2.0, 4.0], [[1.0, 2.0], [2.0, 4.0]])

    Rows with a NaN or infinity are counted and left out. For n features there are n² + n + 2 slots.

    Raises:
        StructureError: at an update, the value has no dimension, is complex, or has another number
            of features than the first one.
    """
    return CovarianceStatistic()
