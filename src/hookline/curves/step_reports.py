"""Reports of steps, in memory or read from a folder that grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from numpy.typing import NDArray

from hookline.curves.layout import Layout
from hookline.curves.numbers import numbers_of


@final
@dataclass(frozen=True)
class StepReport:
    """The slots of all sites at one step.

    Args:
        step: the number of the step.
        seconds: when it ended, in seconds since the epoch.
        layout: what the slots are.
        slots: the slots of each rank, float64, of shape [ranks, width]; of one rank where the ranks
            did not meet.
    """

    step: int
    seconds: float
    layout: Layout
    slots: NDArray[Any]
    _known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def results(self, site: str, rank: int | None = None) -> list[Any]:
        """Return the result of each statistic at a site; nothing where no value came.

        Args:
            site: the site.
            rank: the rank; None merges the ranks.
        """
        known = self._known.get((site, rank))
        if known is None:
            known = self._known[site, rank] = self.layout.results(site, self.slots, rank)
        return known

    def numbers(self, rank: int | None = None) -> dict[str, float]:
        """Return every single number of the step by name, such as `h.0/std`.

        An update also has its `ratio` to the weight: the ratio of their norms.
        """
        found: dict[str, float] = {}
        for site in self.layout.by_site:
            for result in self.results(site, rank):
                for name, number in numbers_of(result).items():
                    found.setdefault(f"{site}/{name}" if name else site, number)
            ratio = self.ratio(site, rank)
            if ratio is not None:
                found[f"{site}/ratio"] = ratio
        return found

    def ratio(self, site: str, rank: int | None = None) -> float | None:
        """Return the ratio of an update's norm to the weight's; None where it is not known."""
        path, _, port = site.rpartition(":")
        if port != "update":
            return None
        norms = [
            numbers_of(result).get("norm", math.nan)
            for one in (site, f"{path}:value")
            for result in self.results(one, rank)[:1]
        ]
        if len(norms) < 2:
            return None
        return norms[0] / norms[1] if norms[1] else math.nan


class Source(Protocol):
    """Reports that may become more while they are read."""

    def read(self) -> Sequence[StepReport]:
        """Return the reports so far, in order."""
        ...


@final
class Reports:
    """Reports kept in memory."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        """Add the report of a step."""
        self._reports.append(report)

    def read(self) -> Sequence[StepReport]:
        """Return the reports so far, in order."""
        return self._reports
