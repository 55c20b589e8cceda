"""The columns of the page's table: headings, cell texts and sort keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from hookline.display.units import measure, share
from hookline.views.page.tree_rows import Row
from hookline.views.page.values import ValueEntry
from hookline.views.statistics import Statistics

SortKey = str | float | None


@final
@dataclass(frozen=True)
class Column:
    """A column of the table.

    Args:
        key: the column's name in the page's CSS and script.
        title: the heading.
        is_number: True aligns the column right and sorts the largest number first.
        text: returns a cell's text.
        sort_key: returns a cell's sort key; None sorts last.
    """

    key: str
    title: str
    is_number: bool
    text: Callable[[Row], str]
    sort_key: Callable[[Row], SortKey]


def columns(rows: list[Row], *, is_compared: bool = False) -> list[Column]:
    """Choose the columns that rows need: calls, passes and maps only if some row has them."""
    seen = [row.seen for row in rows if row.seen is not None]
    gap = [_of_value("gap", "Difference", _gap_text, _gap_key)] if is_compared else []
    chosen = [
        Column("path", "Module", False, lambda row: row.label, lambda row: row.label),
        Column("type", "Type", False, lambda row: row.module_type, lambda row: row.module_type),
        *gap,
        _of_value("shape", "Shape", _shape, _numel),
        _of_value("dtype", "Dtype", _dtype, _dtype, is_number=False),
        _of_statistics("mean", "Mean", lambda found: found.mean),
        _of_statistics("std", "Std", lambda found: found.std),
        _of_statistics("min", "Min", lambda found: found.min),
        _of_statistics("max", "Max", lambda found: found.max),
        _of_statistics("zeros", "Zeros", lambda found: found.zeros, share),
        _of_value("non-finite", "NaN, inf", lambda entry: entry.non_finite_text, _non_finite),
        _of_value("order", "Order", lambda one: str(one.order), lambda one: one.order),
    ]
    if any(row.call is not None for row in rows):
        call = Column("call", "Call", True, lambda row: _whole(row.call), lambda row: row.call)
        chosen += [call]
    if len({one.pass_number for one in seen}) > 1:
        number = _of_value(
            "pass", "Pass", lambda one: str(one.pass_number), lambda one: one.pass_number
        )
        chosen += [number]
    if any(one.form for one in seen):
        chosen += [_of_value("maps", "Feature maps", lambda _: "", _n_channels)]
    return chosen


def _of_value(
    key: str,
    title: str,
    text: Callable[[ValueEntry], str],
    sort_key: Callable[[ValueEntry], SortKey],
    *,
    is_number: bool = True,
) -> Column:
    """Create a column that is empty in rows without a value."""
    return Column(
        key,
        title,
        is_number,
        lambda row: text(row.seen) if row.seen else "",
        lambda row: sort_key(row.seen) if row.seen else None,
    )


def _of_statistics(
    key: str,
    title: str,
    number: Callable[[Statistics], float | None],
    text: Callable[[float | None], str] = measure,
) -> Column:
    """Create a column of a statistic that is empty in rows without statistics."""

    def found(one: ValueEntry) -> float | None:
        measured = one.whole or one.statistics
        return number(measured) if measured else None

    return _of_value(key, title, lambda one: text(found(one)), found)


def _shape(one: ValueEntry) -> str:
    return one.whole.shape if one.whole else one.shape


def _dtype(one: ValueEntry) -> str:
    return one.dtype if one.shape else ""


def _numel(one: ValueEntry) -> int | None:
    return one.numel if one.shape else None


def _non_finite(entry: ValueEntry) -> int | None:
    return entry.non_finite if entry.non_finite_text else None


def _n_channels(one: ValueEntry) -> int | None:
    return one.form.channels if one.form and not one.problem else None


def _gap_text(one: ValueEntry) -> str:
    if one.difference is None:
        return ""
    return one.difference.problem or (
        "0" if not one.difference.differs else measure(one.difference.relative)
    )


def _gap_key(one: ValueEntry) -> float | None:
    return None if one.difference is None else one.difference.relative


def _whole(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"
