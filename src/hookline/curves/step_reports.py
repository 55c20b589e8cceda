"""Reports of steps, in memory or read from a folder that grows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Protocol, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves.numbers_of_statistic import numbers_of_site
from hookline.curves.slot_layout import Layout
from hookline.engine.model_fingerprint import RecordedModel
from hookline.statistics.covariance import Covariance
from hookline.statistics.histogram import Histogram, HistogramStatistic

_Counted = TypeVar("_Counted", Histogram, Covariance)

LOGGED = "logged"  # stands for the site of the user's own numbers


@final
@dataclass(frozen=True)
class StepReport:
    """Hold the slots of all sites at one step, and the user's own numbers of this step."""

    step: int  # the number of the step
    seconds: float  # when it ended, in seconds since the epoch
    layout: Layout  # what the slots are
    # The slots of each rank, float64, of shape [ranks, width]; of one rank where the ranks did not
    # meet.
    slots: NDArray[Any]
    # The rank of each site of the layout, from 0, shape `(sites,)`. Sites are ranked by the time of
    # their first value in the step. The order of sites of equal rank is not known. `NO_TURN` stands
    # for no value. None if no order is known.
    order: NDArray[np.int32] | None = None
    # The user's own numbers by name, from `Curves.log`.
    logged: Mapping[str, float] = field(default_factory=dict)
    # The numbers of all ranks, for several writers; made by the first and forgotten after the last.
    _numbers: dict[tuple[str, str], float] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def from_logged(step: int, seconds: float, logged: Mapping[str, float]) -> StepReport:
        """Make a report of the user's own numbers alone."""
        return StepReport(step, seconds, _NOTHING, np.empty((1, 0)), logged=logged)

    @property
    def is_measured(self) -> bool:
        """Tell whether sites were measured, not only numbers logged."""
        return bool(self.layout.entries)

    def results(self, site: str, rank: int | None = None) -> list[Any]:
        """Return the result of each statistic at a site; nothing where no value came.

        Args:
            site: the site.
            rank: the rank; None merges the ranks.
        """
        return self.layout.results(site, self.slots, rank)

    def numbers(self, rank: int | None = None) -> dict[str, float]:
        """Return every single number of the step by name, such as `h.0/std`."""
        return {
            f"{site}/{name}" if name else site: number
            for (site, name), number in self.numbers_by_site_and_name(rank).items()
        }

    def numbers_by_site_and_name(self, rank: int | None = None) -> dict[tuple[str, str], float]:
        """Return every single number of the step by site and name, such as `("h.0", "std")`.

        The name is empty for a statistic that is a single number. An update also has its `ratio` to
        the weight: the ratio of their norms. The user's own numbers have the site `logged`. A
        statistic whose result raises is left out, and a warning says so once.
        """
        if rank is None and self._numbers:
            return self._numbers
        layout, norms = self.layout, dict[str, float]()
        by_name: dict[tuple[str, str], float] = {
            (LOGGED, name): number for name, number in self.logged.items()
        }
        for site in layout.by_site:
            results = layout.results(site, self.slots, rank, is_lenient=True)
            numbers = numbers_of_site(results)
            if results:
                norms[site] = numbers.get("norm", math.nan)
            by_name.update(((site, name), number) for name, number in numbers.items())
            weight = weight_of_update(site)
            if weight in norms and site in norms:
                by_name[site, "ratio"] = _ratio(norms[site], norms[weight])
        if rank is None:
            self._numbers.update(by_name)
        return by_name

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """Iterate over the histograms of the step that hold a finite number, by site."""
        return self.finite_results_of(HistogramStatistic, Histogram)

    def finite_results_of(
        self, statistic: type[Any], kind: type[_Counted]
    ) -> Iterator[tuple[str, _Counted]]:
        """Iterate over the results of a statistic that hold a finite number, by site."""
        statistics = self.layout.statistics
        for site, entries in self.layout.by_site.items():
            if not any(isinstance(statistics[entry.statistic], statistic) for entry, _ in entries):
                continue
            for result in self.layout.results(site, self.slots, None, is_lenient=True):
                if isinstance(result, kind) and result.count > result.non_finite:
                    yield site, result

    def clear_cached_numbers(self) -> None:
        """Free the numbers, which `numbers` computes again when it is called."""
        self._numbers.clear()

    def update_ratio(self, site: str, rank: int | None = None) -> float | None:
        """Return the ratio of an update's norm to the weight's; None where it is not known."""
        weight = weight_of_update(site)
        if weight is None:
            return None
        norms = [
            numbers_of_site(results).get("norm", math.nan)
            for place in (site, weight)
            if (results := self.results(place, rank))
        ]
        return _ratio(*norms) if len(norms) == 2 else None


def split_by_layout(reports: Iterable[StepReport], max_length: int) -> Iterator[list[StepReport]]:
    """Yield blocks of neighbours with one layout and one number of ranks."""
    for _, alike in groupby(reports, key=lambda report: (id(report.layout), len(report.slots))):
        while block := list(islice(alike, max_length)):
            yield block


def weight_of_update(site: str) -> str | None:
    """Return the site of the weight that an update is of; None for other sites."""
    path, _, port = site.rpartition(":")
    return f"{path}:value" if port == "update" else None


def _ratio(update: float, weight: float) -> float:
    return update / weight if weight else math.nan


_NOTHING = Layout((), ())


class ReportSource(Protocol):
    """Give reports, whose number may grow while they are read."""

    model: RecordedModel | None  # the identity of the model; None if it is not known
    has_ended: bool  # whether the monitor has ended; False of one that goes on or was killed
    version: str  # a text that is another one once the reports are those of another monitor

    def read(self) -> Sequence[StepReport]:
        """Return the reports of measured steps so far, in order."""
        ...

    def read_logged(self) -> Sequence[StepReport]:
        """Return the reports with the user's own numbers so far, in order."""
        ...


@final
class Reports:
    """Keep reports in memory.

    Args:
        model: the identity of the model; None if it is not known.
    """

    def __init__(self, model: RecordedModel | None = None) -> None:
        self.model = model
        self.has_ended, self.version = False, ""
        self._reports: list[StepReport] = []
        self._logged: list[StepReport] = []

    def add(self, report: StepReport) -> None:
        """Add the report of a step."""
        if report.is_measured:
            self._reports.append(report)
        if report.logged:
            self._logged.append(report)

    def read(self) -> Sequence[StepReport]:
        """Return the reports of measured steps so far, in order."""
        return self._reports

    def read_logged(self) -> Sequence[StepReport]:
        """Return the reports with the user's own numbers so far, in order."""
        return self._logged
