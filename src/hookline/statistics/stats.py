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
from hookline.statistics.moments import Moments, MomentsStatistic
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

        >>> statistic = hl.stats.moments()
        >>> slots = statistic.start(torch.empty(0))
        >>> slots = statistic.update(slots, torch.tensor([0.0, 1.0, 2.0, float("nan")]))
        >>> result = statistic.result(slots)
        >>> result.mean, result.zeros, result.non_finite, result.max_abs
        (1.0, 1, 1, 2.0)

    Sums are in float64. NaN and infinity are counted and left out of everything else. For complex
    numbers the magnitude is measured.

    Args:
        compile: whether floating tensors are measured by a compiled function, which is faster,
            because it reads each tensor once. None has the system's C compiler make it for tensors
            on a CPU, after 1,048,576 elements; this takes some tenths of a second, once in a
            process. On other devices, and without a C compiler, None compiles by inductor, when
            tensors of 16,384 elements or more add up to 2,147,483,648 elements. True compiles by
            inductor for the first tensor of 16,384 elements or more. This takes about 4 seconds,
            once for each dtype, device and number of torch's threads, and needs a C++ compiler.
            False never compiles.

    Returns:
        A statistic whose result is `Moments`. It keeps 8 numbers, its slots.

    Raises:
        InputError: `compile` is none of None, True and False.
        StructureError: at an update, the value is a meta tensor.
    """
    return MomentsStatistic(compile)


def histogram(*, low: float = 1e-9, high: float = 1e9, per_octave: int = 1) -> Statistic[Histogram]:
    """Count elements by sign and magnitude, in bins with fixed edges.

        >>> statistic = hl.stats.histogram(low=0.25, high=4)
        >>> slots = statistic.start(torch.empty(0))
        >>> slots = statistic.update(slots, torch.tensor([0.0, 1.0, 1.5, -3.0, 100.0]))
        >>> print(statistic.result(slots))
        5 elements, 1 zeros, 0 non-finite
        -4 ▅       █ ▅ inf

    The edges do not depend on the values. So histograms add up exactly, over steps and ranks. The
    bins of positive and of negative elements have the same magnitudes.

    Args:
        low: all elements of a smaller magnitude, other than 0, are in one bin of each sign. `low`
            is rounded down to a power of two.
        high: all elements of a larger magnitude are in one bin of each sign. `high` is rounded up
            to a power of two.
        per_octave: the number of bins between a power of two and the next. It is a power of two
            itself, from 1 to 1024.

    Returns:
        A statistic whose result is a `Histogram`. By default it keeps 128 numbers, its slots.

    Raises:
        InputError: `low` and `high` are not `2**-126 <= low < high <= 2**127`, or `per_octave` is
            not such a power of two.
        StructureError: at an update, the value is a meta tensor.
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

        >>> statistic = hl.stats.quantiles((0.5, 1.0))
        >>> slots = statistic.start(torch.empty(0))
        >>> for batch in torch.arange(1.0, 1001.0).split(100):
        ...     slots = statistic.update(slots, batch)
        >>> result = statistic.result(slots)
        >>> abs(result[0.5] - 500) < 0.01 * 500, result[1.0]
        (True, 1000.0)

    The quantile `q` of n finite elements is the element of rank `floor(q * (n - 1))`, counted from
    0. The estimate differs from this element by at most `error` times the element. The smallest and
    the greatest element are exact. The sketch is that of Masson, Rim and Lee, "DDSketch", VLDB
    2019, in the form with a fixed range. An error of 0.01 takes 7,688 numbers, which are 60 KiB.
    `hl.monitor` names the quantiles as percentiles: `p1`, `p50`, `p99_9`.

    Args:
        q: which quantiles, from 0 to 1.
        error: the bound of the relative error, from 0.00025 to less than 1.
        low: a quantile of a smaller magnitude is estimated as 0.
        high: a quantile of a larger magnitude is NaN, unless it is the smallest or the greatest
            element.

    Returns:
        A statistic whose result is `Quantiles`.

    Raises:
        InputError: a number is outside its range, or `low` and `high` are not
            `2**-126 <= low < high <= 2**127`.
        StructureError: at an update, the value is a meta tensor.
    """
    return QuantilesStatistic(q, error, low, high)


def covariance() -> Statistic[Covariance]:
    """Measure the mean and the covariance of the features in the last dimension.

        >>> statistic = hl.stats.covariance()
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
        >>> result = statistic.result(statistic.update(statistic.start(x), x))
        >>> result.mean.tolist(), result.matrix.tolist()
        ([2.0, 4.0], [[1.0, 2.0], [2.0, 4.0]])

    All other dimensions are rows. Rows with a NaN or infinity are counted and left out. For n
    features, the statistic keeps n² + n + 2 numbers, its slots.

    Returns:
        A statistic whose result is a `Covariance`.

    Raises:
        StructureError: at a start or an update, the value has no dimension, is complex, is a meta
            tensor, or has another number of features than the first one.

    Source: the formula that merges two parts is that of Chan, Golub and LeVeque, "Updating Formulae
    and a Pairwise Algorithm for Computing Sample Variances", 1979.
    """
    return CovarianceStatistic()
