"""Judge estimates by a sample of measured effects: how they correlate, and where they fail."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hookline.verbs.sweep.grid import Label

Array = NDArray[np.float64]

_MISSED = 0.9  # of an effect
# Where a ReLU follows, about half of the estimates miss, and the rest still rank the effects.
_MOST_MISSED = 2 / 3
_LEVEL = 0.05  # of a false alarm at any site
# Smaller effects do not matter: as a part of the root mean square at the site, and of the largest.
_SMALL_AT_SITE, _SMALL = 0.5, 0.01


class Verdict(NamedTuple):
    """Hold the verdict of a site's measured effects on its estimates."""

    label: Label  # the site
    is_failing: bool  # whether more than two thirds of the estimates that matter miss their effect
    is_known: bool  # whether the sample is large enough to say so


def judge_sites(labels: Sequence[Label], estimates: Array, measured: Array) -> list[Verdict]:
    """Judge the estimates of each site; without measured effects, of none.

    Args:
        labels: the sites.
        estimates: the estimates, shape `(sites, ...)`; NaN where a site has no such change.
        measured: the measured effects; NaN where none was measured.
    """
    if np.isnan(measured).all():
        return []
    least = max(_SMALL * float(np.nanmax(np.abs(measured))), 1e-300)
    level = _LEVEL / len(labels)
    rows = zip(labels, estimates, measured, strict=True)
    return [_judge_site(label, (ours, effects), least, level) for label, ours, effects in rows]


def _judge_site(label: Label, of_site: tuple[Array, Array], least: float, level: float) -> Verdict:
    estimates, measured = of_site
    is_measured = ~np.isnan(measured)
    estimate, effect = estimates[is_measured], measured[is_measured]
    if not len(effect):
        return Verdict(label, is_failing=False, is_known=False)
    least = max(least, _SMALL_AT_SITE * math.sqrt(float(np.square(effect).mean())))
    matters = np.maximum(np.abs(estimate), np.abs(effect)) >= least
    is_missed = ~(np.abs(estimate - effect) < _MISSED * np.abs(effect)) & matters
    n, n_missed = int(matters.sum()), int(is_missed.sum())
    # Of the changes that were not measured, all may matter.
    n_all = int((~np.isnan(estimates)).sum()) - len(effect) + n
    is_known = n == 0 or _chance_of_misses(n, n, n_all) <= level
    return Verdict(label, n > 0 and _chance_of_misses(n_missed, n, n_all) <= level, is_known)


def _chance_of_misses(n_missed: int, n: int, n_all: int) -> float:
    """Return how likely so many of a sample are missed, if two thirds of all are."""
    most = int(_MOST_MISSED * n_all + 1e-9)
    ways = sum(math.comb(most, k) * math.comb(n_all - most, n - k) for k in range(n_missed, n + 1))
    return ways / math.comb(n_all, n)


def spearman(a: Array, b: Array) -> float:
    """Return the correlation of the ranks of two arrays; equal numbers share a rank."""
    if len(a) < 2:
        return math.nan
    ranks = np.stack([_ranks(numbers) for numbers in (a, b)])
    if (np.ptp(ranks, 1) == 0).any():
        return math.nan
    matrix: Array = np.asarray(np.corrcoef(ranks))
    return float(matrix[0, 1])


def _ranks(numbers: Array) -> Array:
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Array = (ends - (counts - 1) / 2.0)[inverse]
    return ranks
