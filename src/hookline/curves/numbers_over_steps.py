"""Compute the numbers of a site at many steps as arrays.

Each statistic of hookline is computed once, from the slots of all steps together. The result of
another statistic is computed once a step, for all of its numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves.numbers_of_statistic import OF_MOMENTS, numbers_of, percentile_names
from hookline.curves.slot_layout import ABSENT, Entry, Layout, hold_values
from hookline.curves.step_reports import StepReport, split_by_layout
from hookline.statistics.histogram import HistogramStatistic
from hookline.statistics.moments import MomentsStatistic
from hookline.statistics.quantiles import QuantilesStatistic

Array = NDArray[np.float64]

_N_EXTREMES = 2  # the last slots of each statistic here; of ranks the greatest counts
_BLOCK = 16  # steps that are computed together, whose slots stay in the cache


def moments_from_slots(slots: Array) -> dict[str, Array]:
    """Compute the numbers of moments by name, from slots of shape `(..., 8)`.

    They are those of `Moments`, in its order. The extremes and the norm are NaN without finite
    numbers.
    """
    count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = np.moveaxis(slots, -1, 0)
    with np.errstate(all="ignore"):
        finite = count - non_finite
        is_any, has_squares = finite > 0, sum2 != 0
        mean, square = sum1 / finite, sum2 / finite
        std = np.sqrt(np.maximum(square - mean * mean, 0.0))
        least = -negated_min
        kurtosis = sum4 / sum2 * finite / sum2
        return {
            "count": count, "non_finite": non_finite, "zeros": zeros,
            "sum": sum1, "sum2": sum2, "sum4": sum4,
            "min": np.where(is_any, least, math.nan),
            "max": np.where(is_any, greatest, math.nan),
            "finite": finite,
            "zero_share": zeros / count,
            "mean": np.where(is_any, mean, math.nan),
            "std": np.where(is_any, np.where(least == greatest, 0.0, std), math.nan),
            "rms": np.where(is_any, np.sqrt(square), math.nan),
            "norm": np.where(is_any, np.sqrt(sum2), math.nan),
            "kurtosis": np.where(has_squares, kurtosis, math.nan),
            "max_abs": np.where(is_any, np.maximum(np.abs(least), np.abs(greatest)), math.nan),
        }  # fmt: skip


def _histogram_from_slots(statistic: HistogramStatistic, slots: Array) -> dict[str, Array]:
    counts = slots[:, :-_N_EXTREMES]
    return {
        "zeros": counts[:, statistic.zero],
        "non_finite": counts[:, statistic.non_finite],
        "min": -slots[:, -2],
        "max": slots[:, -1],
        "count": counts.sum(axis=1),
    }


def _quantiles_from_slots(statistic: QuantilesStatistic, slots: Array) -> dict[str, Array]:
    n_finite, values = statistic.results_of_many(slots)
    non_finite, is_any = slots[:, -_N_EXTREMES - 1], n_finite > 0
    return {
        "error": np.full(len(slots), statistic.error),
        "count": n_finite + non_finite,
        "non_finite": non_finite,
        "min": np.where(is_any, -slots[:, -2], math.nan),
        "max": np.where(is_any, slots[:, -1], math.nan),
        **dict(zip(percentile_names(statistic.q), values.T, strict=True)),
    }


def _numbers_function(layout: Layout, entry: Entry) -> Callable[[Array], dict[str, Array]] | None:
    """Return the function that computes an entry's numbers from slots of shape `(steps, width)`."""
    statistic = layout.statistics[entry.statistic]
    if type(statistic) is MomentsStatistic and entry.width == statistic.n_slots:
        return moments_from_slots
    if type(statistic) is HistogramStatistic and entry.width == statistic.n_slots:
        return lambda slots: _histogram_from_slots(statistic, slots)
    if type(statistic) is QuantilesStatistic and entry.width == statistic.n_slots:
        return lambda slots: _quantiles_from_slots(statistic, slots)
    return None


def names_of_numbers(statistic: Any) -> tuple[str, ...]:
    """Return the names that `numbers_of` gives for the results of a statistic of hookline."""
    if isinstance(statistic, QuantilesStatistic):
        return (*percentile_names(statistic.q), "min", "max", "non_finite")
    if isinstance(statistic, HistogramStatistic):
        return ("zeros", "non_finite", "min", "max")
    return OF_MOMENTS


def has_numbers_functions(layout: Layout, site: str) -> bool:
    """Tell whether arrays give the numbers of all statistics at a site."""
    entries = layout.by_site.get(site, ())
    return all(_numbers_function(layout, entry) for entry, _ in entries)


def numbers_by_statistic(
    block: Sequence[StepReport], site: str, rank: int | None = None
) -> Iterator[tuple[NDArray[np.bool_], dict[str, Array]]]:
    """Compute the numbers of each statistic at a site in reports of one layout.

    Args:
        block: the reports.
        site: a site of which `has_numbers_functions` is true.
        rank: the rank; None merges the ranks that count.

    Yields:
        At which reports the site has a value, and the numbers at these by name.
    """
    layout = block[0].layout
    for entry, place in layout.by_site.get(site, ()):
        function = _numbers_function(layout, entry)
        assert function is not None
        slots = np.stack([_merge_ranks(report, entry, place, rank) for report in block])
        has_value = hold_values(slots)
        yield has_value, function(slots[has_value])


def _merge_ranks(report: StepReport, entry: Entry, place: slice, rank: int | None) -> NDArray[Any]:
    """Return the slots of one statistic; those of an absent value if no rank has one."""
    slots: Array = report.slots[:, place] if rank is None else report.slots[rank : rank + 1, place]
    if entry.ranks is not None and rank is None:
        slots = slots[[number for number in entry.ranks if number < len(slots)]]
    if len(slots) > 1:
        has_value = hold_values(slots)
        if has_value.any():
            parts = slots[has_value]
            sums = parts[:, :-_N_EXTREMES].sum(axis=0)
            return np.concatenate([sums, parts[:, -_N_EXTREMES:].max(axis=0)])
    return slots[0] if len(slots) else np.full(entry.width, ABSENT)


def numeric_attributes(result: Any) -> list[str]:
    """Return the fields and properties of a result that hold a number."""
    is_record = dataclasses.is_dataclass(result) and not isinstance(result, type)
    names = [field.name for field in dataclasses.fields(result)] if is_record else []
    names += [name for name, part in vars(type(result)).items() if isinstance(part, property)]
    return [name for name in names if isinstance(getattr(result, name), int | float)]


def _all_numbers(result: Any) -> dict[str, float]:
    attributes = {name: float(getattr(result, name)) for name in numeric_attributes(result)}
    return {**attributes, **{name: number for name, number in numbers_of(result).items() if name}}


def _block_numbers(
    block: Sequence[StepReport], site: str, rank: int | None
) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Compute every number of a site in reports of one layout.

    Of several statistics with a number of one name, the first that has a value gives it.

    Returns:
        The names at the last report that has any, and the numbers by name.
    """
    if has_numbers_functions(block[0].layout, site):
        parts = list(numbers_by_statistic(block, site, rank))
    else:
        parts = [
            (
                np.arange(len(block)) == at,
                {k: np.array([n]) for k, n in _all_numbers(result).items()},
            )
            for at, report in enumerate(block)
            for result in report.results(site, rank)
        ]
    columns: dict[str, Array] = {}
    is_filled: dict[str, NDArray[np.bool_]] = {}
    last = max((int(np.flatnonzero(has)[-1]) for has, _ in parts if has.any()), default=-1)
    names = dict.fromkeys(name for has, part in parts if has[last] for name in part)
    for has_value, numbers in parts:
        for name, values in numbers.items():
            column = columns.setdefault(name, np.full(len(block), math.nan))
            filled = is_filled.setdefault(name, np.zeros(len(block), np.bool_))
            is_new = has_value & ~filled
            column[is_new] = values[is_new[has_value]]
            filled |= has_value
    return tuple(names) if last >= 0 else (), columns


@final
class CurveColumns:
    """Hold the numbers of one site by name; they grow with the reports.

    Args:
        site: the site.
        rank: the rank; None merges the ranks.

    Attributes:
        names: the names of the numbers at the last report that has any.
    """

    def __init__(self, site: str, rank: int | None) -> None:
        self.names: tuple[str, ...] = ()
        self._site = site
        self._rank = rank
        self._n_reports = 0
        self._columns: dict[str, Array] = {}

    def extend(self, reports: Sequence[StepReport]) -> None:
        """Compute the numbers of the reports that are new."""
        new_reports = reports[self._n_reports : len(reports)]
        if not new_reports:
            return
        parts: list[tuple[int, dict[str, Array]]] = []
        for block in split_by_layout(new_reports, _BLOCK):
            names, columns = _block_numbers(block, self._site, self._rank)
            self.names = names or self.names
            parts.append((len(block), columns))
        for name in dict.fromkeys([*self._columns, *(name for _, part in parts for name in part)]):
            arrays = [part.get(name, np.full(n, math.nan)) for n, part in parts]
            self._columns[name] = np.concatenate([self.number(name), *arrays])
        self._n_reports += len(new_reports)

    def number(self, name: str) -> Array:
        """Return a number at each report, shape `(reports,)`; NaN where there is none."""
        column = self._columns.get(name)
        return np.full(self._n_reports, math.nan) if column is None else column
