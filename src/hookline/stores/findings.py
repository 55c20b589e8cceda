"""Judge a store by the statistics of its sites, which were computed when it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hookline.display.text import listed, plural
from hookline.display.units import measure, share
from hookline.findings import Finding, Findings
from hookline.findings.finding import Level, sort_by_level
from hookline.statistics import Moments

_MOST_NAMED = 3


def judge_store(
    statistics: Mapping[str, Moments],
    dtypes: Mapping[str, torch.dtype],
    skipped: Sequence[tuple[int, str]],
    n_items: int,
) -> Findings:
    """Judge the statistics of each site, and the items that were skipped; no value is read.

    Args:
        statistics: the statistics of all values of each site, in the order of the store.
        dtypes: the dtype of each site.
        skipped: the index of each item without a row, and the reason.
        n_items: the number of items that have a row.
    """
    measured = {site: moments for site, moments in statistics.items() if moments.count}
    broken = [site for site, moments in measured.items() if moments.non_finite]
    zero = [site for site, moments in measured.items() if moments.zeros == moments.count]
    constant = [
        site
        for site, moments in measured.items()
        if moments.finite > 1
        and moments.min == moments.max
        and not moments.non_finite
        and site not in zero
        and not dtypes[site].is_complex  # of one magnitude, which has many phases
    ]
    rows = []
    if broken:
        rows.append(_non_finite_finding(broken, measured[broken[0]], dtypes[broken[0]]))
    if zero:
        rows.append(
            _finding_at_sites(zero, "dead", "is zero in every item", "warning", "100 % zero")
        )
    if constant:
        number = measure(measured[constant[0]].min)
        rows.append(
            _finding_at_sites(constant, "constant", "has one number in every item", "note", number)
        )
    if skipped:
        rows.append(_skipped_items_finding(skipped, n_items))
    facts = f"{plural(len(statistics), 'site')}, {plural(n_items, 'item')}"
    empty = listed([site for site in statistics if site not in measured], _MOST_NAMED)
    notes = [f"Not judged, because they hold no numbers: {empty}."] if empty else []
    return Findings(sort_by_level(rows), facts, notes)


def _non_finite_finding(sites: Sequence[str], first: Moments, dtype: torch.dtype) -> Finding:
    text = f"has {first.non_finite:,} NaN or infinite of {plural(first.count, 'element')}"
    number = f"{share(first.non_finite / first.count)} NaN, inf"
    cast = ".float()" * (dtype.itemsize == 1)  # torch has no isfinite of most dtypes of 8 bits
    advice = f"Find the items: store[{sites[0]!r}][:]{cast}.isfinite() tells them."
    return _finding_at_sites(sites, "non-finite", text, "error", number, advice)


def _finding_at_sites(
    sites: Sequence[str], kind: str, text: str, level: Level, number: str, advice: str = ""
) -> Finding:
    """Tell of the first of the sites what holds at all of them."""
    first, *rest = sites
    why = f"So it is at {listed(rest, _MOST_NAMED)}." if rest else ""
    return Finding(kind, f"{first} {text}.", first, level, number, why, advice, tuple(rest))


def _skipped_items_finding(skipped: Sequence[tuple[int, str]], n_items: int) -> Finding:
    number, reason = skipped[0]
    verb = "has" if len(skipped) == 1 else "have"
    return Finding(
        "skipped",
        f"{plural(len(skipped), 'item')} of the data set {verb} no row.",
        level="warning",
        number=f"{len(skipped):,} of {n_items + len(skipped):,}",
        why=f"The first is item {number:,}: {reason}",
        advice="store.skipped lists them.",
    )
