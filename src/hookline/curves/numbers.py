"""The single numbers of a statistic's result, by name: what a logger draws as curves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from hookline.statistics import Moments
from hookline.statistics.quantiles import Quantiles


def numbers_of(result: Any) -> dict[str, float]:
    """Return the single numbers of a result, by name.

        >>> numbers_of({"low": -1, "name": "a"})
        {'low': -1.0}

    Moments give their mean, deviation, extremes, norm, share of zeros and count of non-finite
    numbers. Quantiles give theirs as percentiles, such as `p50` and `p99_9`. Other results give
    what is a number: the items of a mapping, the fields of a dataclass or named tuple, the places
    of a tuple, or the result itself under the empty name.
    """
    if isinstance(result, Moments):
        return _of_moments(result)
    if isinstance(result, Quantiles):
        return _of_quantiles(result)
    if isinstance(result, Real):
        return {"": float(result)}
    return {str(name): float(part) for name, part in _parts(result) if isinstance(part, Real)}


def _parts(result: Any) -> list[tuple[Any, Any]]:
    if isinstance(result, Mapping):
        return list(result.items())
    if dataclasses.is_dataclass(result):
        return [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]
    if hasattr(result, "_fields"):
        return list(zip(result._fields, result, strict=True))
    return list(enumerate(result)) if isinstance(result, tuple) else []


def _of_moments(moments: Moments) -> dict[str, float]:
    is_any = moments.finite > 0
    return {
        "mean": moments.mean,
        "std": moments.std,
        "min": moments.min if is_any else math.nan,
        "max": moments.max if is_any else math.nan,
        "norm": moments.norm if is_any else math.nan,
        "zero_share": moments.zero_share,
        "non_finite": float(moments.non_finite),
    }


def _of_quantiles(quantiles: Quantiles) -> dict[str, float]:
    is_any = quantiles.count > quantiles.non_finite
    return {
        **dict(zip(percentile_names(quantiles.q), quantiles.values, strict=True)),
        "min": quantiles.min if is_any else math.nan,
        "max": quantiles.max if is_any else math.nan,
        "non_finite": float(quantiles.non_finite),
    }


def percentile_names(quantiles: Sequence[float]) -> list[str]:
    """Name quantiles as percentiles.

    >>> percentile_names((0.5, 0.999))
    ['p50', 'p99_9']
    """
    return [f"p{100 * q:g}".replace(".", "_") for q in quantiles]
