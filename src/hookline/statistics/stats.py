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

from hookline.statistics.moments import Moments
from hookline.statistics.moments_statistic import MomentsStatistic
from hookline.statistics.statistic import Statistic

__all__ = ["Moments", "Statistic", "moments"]


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
