"""Judge a store by the statistics of its sites, which were computed when it was written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hookline.display.text import listed, plural
from hookline.display.units import measure, share
from hookline.findings import Finding, Findings
from hookline.findings.finding import Level, in_order
from hookline.statistics import Moments

_MOST_NAMED = 3


def findings_of_store(
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
    one_value = measure(measured[constant[0]].min) if constant else ""
    rows = [
        *_non_finite(broken, measured, dtypes),
        *_alike("dead", "is zero in every item", zero, "warning", "100 % zero"),
        *_alike("constant", "has one number in every item", constant, "note", one_value),
        *_skipped(skipped, n_items),
    ]
    facts = f"{plural(len(statistics), 'site')}, {plural(n_items, 'item')}"
    empty = listed([site for site in statistics if site not in measured], _MOST_NAMED)
    notes = [f"Not judged, because they hold no numbers: {empty}."] if empty else []
    return Findings(in_order(rows), facts, notes)


def _non_finite(
    sites: Sequence[str], statistics: Mapping[str, Moments], dtypes: Mapping[str, torch.dtype]
) -> list[Finding]:
    if not sites:
        return []
    first = statistics[sites[0]]
    # torch has no isfinite of most dtypes of 8 bits.
    cast = ".float()" * (dtypes[sites[0]].itemsize == 1)
    return [
        Finding(
            "non-finite",
            f"{sites[0]} has {first.non_finite:,} NaN or infinite of"
            f" {plural(first.count, 'element')}.",
            sites[0],
            "error",
            f"{share(first.non_finite / first.count)} NaN, inf",
            _others(sites),
            f"Find the items: store[{sites[0]!r}][:]{cast}.isfinite() tells them.",
            tuple(sites[1:]),
        )
    ]


def _alike(kind: str, what: str, sites: Sequence[str], level: Level, number: str) -> list[Finding]:
    if not sites:
        return []
    return [
        Finding(
            kind,
            f"{sites[0]} {what}.",
            sites[0],
            level,
            number,
            _others(sites),
            follows=tuple(sites[1:]),
        )
    ]


def _others(sites: Sequence[str]) -> str:
    return f"So it is at {listed(sites[1:], _MOST_NAMED)}." if len(sites) > 1 else ""


def _skipped(skipped: Sequence[tuple[int, str]], n_items: int) -> list[Finding]:
    if not skipped:
        return []
    number, reason = skipped[0]
    verb = "has" if len(skipped) == 1 else "have"
    return [
        Finding(
            "skipped",
            f"{plural(len(skipped), 'item')} of the data set {verb} no row.",
            level="warning",
            number=f"{len(skipped):,} of {n_items + len(skipped):,}",
            why=f"The first is item {number:,}: {reason}",
            advice="store.skipped lists them.",
        )
    ]
