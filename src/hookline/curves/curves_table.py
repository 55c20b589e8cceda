"""Format curves as a table: the last step, and the trend of each site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hookline.curves.numbers_of_statistic import numbers_of, numbers_of_site
from hookline.curves.step_reports import StepReport
from hookline.display import units
from hookline.display.results import Printout
from hookline.display.text import pick_evenly, plural
from hookline.display.text_table import Heading

_MOST_ROWS = 40
_TREND_STEPS = 12
_BARS = "▁▂▃▄▅▆▇█"
# The first of these that a site's results have is drawn as its trend.
_TREND_OF = ("std", "norm", "mean")


def curves_printout(
    reports: Sequence[StepReport], sites: Sequence[str], rank: int | None
) -> Printout:
    """Describe curves: a row for each site."""
    if not reports:
        return Printout(title="Curves", head=": no step was reported yet")
    first, last = reports[0].step, reports[-1].step
    steps = f"{plural(len(reports), 'step')}, {first} to {last}; the last:"
    shown = sites[:_MOST_ROWS]
    numbers = {site: _last_numbers(reports, site, rank) for site in shown}
    names = list(dict.fromkeys(name for named in numbers.values() for name in named))
    trend = pick_evenly(reports, _TREND_STEPS)
    columns = [
        Heading(name or "value", "number", len(names) - place) for place, name in enumerate(names)
    ]
    return Printout(
        title="Curves",
        head=f" of {plural(len(sites), 'site')}: {steps}",
        headings=[Heading("site", "path"), *columns, Heading("trend")],
        rows=[
            (
                site,
                *[units.measure(numbers[site].get(name)) for name in names],
                _trend_bars([_number_for_trend(report, site, rank) for report in trend]),
            )
            for site in shown
        ],
        n_rows=len(sites),
        more="sites: curves.sites",
    )


def last_numbers_by_site(
    reports: Sequence[StepReport], sites: Sequence[str], rank: int | None
) -> list[dict[str, Any]]:
    """Return the numbers of each site at the last step that has any."""
    return [
        {"site": site}
        | {key or "value": n for key, n in _last_numbers(reports, site, rank).items()}
        for site in sites
    ]


def _last_numbers(reports: Sequence[StepReport], site: str, rank: int | None) -> dict[str, float]:
    """Return the numbers of a site at the last step that has any."""
    for report in reversed(reports):
        results = report.results(site, rank)
        if results:
            numbers = numbers_of_site(results)
            ratio = report.update_ratio(site, rank)
            return numbers if ratio is None else {**numbers, "ratio": ratio}
    return {}


def _number_for_trend(report: StepReport, site: str, rank: int | None) -> float:
    numbers = {
        name: number
        for result in report.results(site, rank)[:1]
        for name, number in numbers_of(result).items()
    }
    known = [numbers[name] for name in _TREND_OF if name in numbers] or [*numbers.values()]
    return known[0] if known else math.nan


def _trend_bars(numbers: list[float]) -> str:
    """Draw numbers as bars; a number that is not finite is drawn as `!`."""
    finite = [number for number in numbers if math.isfinite(number)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((number - low) * scale)] if math.isfinite(number) else "!" for number in numbers
    )
