"""Format curves as a table: the last step, and the trend of each site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hookline.curves.numbers import numbers_of
from hookline.curves.step_reports import StepReport
from hookline.display import html, units
from hookline.display.terminal import Table, text_of
from hookline.display.text import plural

_MOST_ROWS = 40
_TREND_STEPS = 12
_BARS = "▁▂▃▄▅▆▇█"
# The first of these that a site's results have is drawn as its trend.
_TREND_OF = ("std", "norm", "mean")


def curves_text(reports: Sequence[StepReport], sites: Sequence[str], rank: int | None) -> str:
    """Format curves as text."""
    if not reports:
        return "Curves: no step was reported yet"
    names, rows = _table(reports, sites[:_MOST_ROWS], rank)
    parts: list[Any] = [_title(reports, sites), Table(names, rows)]
    if len(sites) > _MOST_ROWS:
        parts.append(f"… and {len(sites) - _MOST_ROWS} more sites; curves.sites has all")
    return text_of(parts, width=None)


def curves_html(reports: Sequence[StepReport], sites: Sequence[str], rank: int | None) -> str:
    """Format curves as HTML."""
    if not reports:
        return "<p>Curves: no step was reported yet</p>"
    names, rows = _table(reports, sites[: html.MOST_ROWS], rank)
    title = f"<b>{_title(reports, sites)}</b>"
    return html.table(title, [name.lstrip(">") for name in names], rows, len(sites))


def _title(reports: Sequence[StepReport], sites: Sequence[str]) -> str:
    first, last = reports[0].step, reports[-1].step
    steps = plural(len(reports), "step")
    return f"Curves of {plural(len(sites), 'site')}: {steps}, {first} to {last}; the last:"


def _table(
    reports: Sequence[StepReport], sites: Sequence[str], rank: int | None
) -> tuple[list[str], list[list[str]]]:
    last = {site: _numbers(reports, site, rank) for site in sites}
    names = list(dict.fromkeys(name for numbers in last.values() for name in numbers))
    shown = _spread(reports, _TREND_STEPS)
    rows = [
        [
            site,
            *[units.measure(last[site].get(name)) for name in names],
            _trend([_trended(one, site, rank) for one in shown]),
        ]
        for site in sites
    ]
    return ["site", *[f">{name or 'value'}" for name in names], "trend"], rows


def _numbers(reports: Sequence[StepReport], site: str, rank: int | None) -> dict[str, float]:
    """Return the numbers of a site at the last step that has any."""
    for report in reversed(reports):
        results = report.results(site, rank)
        if results:
            found = {
                name: number for result in results for name, number in numbers_of(result).items()
            }
            ratio = report.ratio(site, rank)
            return found if ratio is None else {**found, "ratio": ratio}
    return {}


def _spread(reports: Sequence[StepReport], n: int) -> list[StepReport]:
    """Choose evenly spaced reports, the last one included."""
    if len(reports) <= n:
        return list(reports)
    return [reports[round(k * (len(reports) - 1) / (n - 1))] for k in range(n)]


def _trended(report: StepReport, site: str, rank: int | None) -> float:
    numbers = {
        name: number
        for result in report.results(site, rank)[:1]
        for name, number in numbers_of(result).items()
    }
    known = [numbers[name] for name in _TREND_OF if name in numbers] or [*numbers.values()]
    return known[0] if known else math.nan


def _trend(numbers: list[float]) -> str:
    """Draw numbers as bars; a number that is not finite is drawn as `!`."""
    finite = [number for number in numbers if math.isfinite(number)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((number - low) * scale)] if math.isfinite(number) else "!" for number in numbers
    )
