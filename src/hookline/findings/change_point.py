"""Find where numbers jump, or change steadily, from block to block."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_LEAST_JUMP = math.log(100.0)  # of one step
_USUAL_STEPS = 4  # a jump is also so many times the usual step
_STEADY = math.log(1.25)  # each step of a steady stretch
_LEAST_TOTAL = math.log(1e3)  # of all steps of such a stretch


class Change(NamedTuple):
    """A jump, or a steady stretch of steps: where it starts and ends, and its whole size."""

    start: int
    end: int
    logarithm: float


def find_change(steps: Sequence[float]) -> Change | None:
    """Return the first jump, else the first steady stretch; None without either.

    >>> find_change([0.1, 0.0, 6.0, 0.1])
    Change(start=2, end=3, logarithm=6.0)

    Args:
        steps: the logarithm of the factor from each block to the next.
    """
    usual = statistics.median(map(abs, steps))
    for k, step in enumerate(steps):
        if abs(step) > max(_LEAST_JUMP, _USUAL_STEPS * usual):
            return Change(k, k + 1, step)
    return _find_steady_stretch(steps, 1) or _find_steady_stretch(steps, -1)


def _find_steady_stretch(steps: Sequence[float], sign: int) -> Change | None:
    start = 0
    for k in range(len(steps) + 1):
        if k < len(steps) and sign * steps[k] > _STEADY:
            continue
        total = sum(steps[start:k])
        if sign * total > _LEAST_TOTAL:
            return Change(start, k, total)
        start = k + 1
    return None
