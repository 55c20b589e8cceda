"""The single numbers of a statistic's result, by name: what a logger draws as curves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from hookline.statistics import Moments
from hookline.statistics.quantiles import Quantiles, percent_text

OF_MOMENTS = ("mean", "std", "min", "max", "norm", "zero_share", "non_finite")
_OF_FINITE = ("min", "max", "norm")  # of finite numbers: NaN without any


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
        return _numbers_of_moments(result)
    if isinstance(result, Quantiles):
        return _numbers_of_quantiles(result)
    if isinstance(result, Real):
        return {"": float(result)}
    return {
        str(name): float(part) for name, part in _names_and_parts(result) if isinstance(part, Real)
    }


def numbers_of_site(results: Sequence[Any]) -> dict[str, float]:
    """Return the single numbers of a site's results, by name.

    Of one name, the first result that has it gives the number, as in a curve. So covariances give
    no `count` of rows beside moments, whose `count` is of elements.
    """
    numbers: dict[str, float] = {}
    taken: set[str] = set()
    for result in results:
        new = {name: part for name, part in numbers_of(result).items() if name not in taken}
        numbers.update(new)
        if len(results) > 1:
            taken.update(new, _numeric_attributes(result.__class__))
    return numbers


@functools.cache
def _numeric_attributes(cls: Any) -> frozenset[str]:
    """Return the fields and properties of a class of results that are numbers."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    kinds: dict[str, Any] = {field.name: field.type for field in fields}
    for name, part in vars(cls).items():
        if isinstance(part, property):
            kinds[name] = getattr(part.fget, "__annotations__", {}).get("return")
    return frozenset(name for name, kind in kinds.items() if kind in (int, float, "int", "float"))


def _names_and_parts(result: Any) -> list[tuple[Any, Any]]:
    if isinstance(result, Mapping):
        return list(result.items())
    if dataclasses.is_dataclass(result):
        return [(field.name, getattr(result, field.name)) for field in dataclasses.fields(result)]
    if hasattr(result, "_fields"):
        return list(zip(result._fields, result, strict=True))
    return list(enumerate(result)) if isinstance(result, tuple) else []


def _numbers_of_moments(moments: Moments) -> dict[str, float]:
    numbers = {name: float(getattr(moments, name)) for name in OF_MOMENTS}
    return numbers if moments.finite > 0 else numbers | dict.fromkeys(_OF_FINITE, math.nan)


def _numbers_of_quantiles(quantiles: Quantiles) -> dict[str, float]:
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
    return [f"p{percent_text(q)}".replace(".", "_") for q in quantiles]
