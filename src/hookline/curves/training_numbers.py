"""The numbers of a training, and when each site began to deviate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves.downsampled_table import DownsampledTable, numbers_at_reports
from hookline.curves.ports import STAGES, path_and_port
from hookline.curves.slot_layout import NO_TURN, Layout
from hookline.curves.step_reports import StepReport, split_by_layout
from hookline.engine import ROOT

_WEIGHT_PORTS = ("value", "update", "grad")
OF_OUTPUTS = ("grad_output", "grad_input")
GRADIENTS = {*OF_OUTPUTS, "grad"}
# What a value is called; others are called by their port.
_NOUNS = {"value": "weight"} | dict.fromkeys(GRADIENTS, "gradient")
BEGUN = 3.0  # times the greatest norm so far: a jump began there

Array = NDArray[Any]


@final
@dataclass(frozen=True)
class Onset:
    """Hold when and where a site began to deviate. Onsets compare by their time in the training."""

    step: int
    stage: int
    turn: int
    site: str
    factor: float
    is_over: bool = False
    usual: float = math.nan  # the greatest norm before
    is_sudden: bool = True  # whether it jumped in its first step, and did not grow over several
    is_alone: bool = False  # whether no other parameter's gradient has grown in its first step

    @property
    def time(self) -> tuple[int, int, int]:
        """Tell when it began: its step, and its place in the step."""
        return self.step, self.stage, self.turn

    @property
    def port(self) -> str:
        """Return the port of its site."""
        return path_and_port(self.site)[1]

    @property
    def noun(self) -> str:
        """Name the kind of its value, such as "weight"."""
        return _NOUNS.get(self.port, self.port)


@final
class TrainingNumbers:
    """The numbers of a training, and the order in which its sites fired."""

    def __init__(self, reports: Sequence[StepReport], table: DownsampledTable | None) -> None:
        self.reports = reports
        self.table = _make_table(reports) if table is None else table
        self.sites = self.table.sites
        self.steps = [column.first for column in self.table.columns]
        self._layout_rows: tuple[Layout | None, dict[str, int]] = (None, {})
        self.is_harmless = self._find_harmless_non_finite()

    @property
    def harmful_since(self) -> Array:
        """The first step with a non-finite number by site; -1 without one, or if it is harmless."""
        return np.where(self.is_harmless, -1, self.table.non_finite_since)

    @cached_property
    def weight_sites(self) -> list[int]:
        """The sites of weights, their gradients and updates."""
        return self.site_indices(*_WEIGHT_PORTS)

    @cached_property
    def weight_or_output_sites(self) -> list[int]:
        """The sites that a fault reaches: weights, or if none is measured, the model's outputs."""
        outputs = self.site_indices("output")
        return self.weight_sites or [k for k in outputs if path_of_site(self.sites[k]) == ROOT]

    def last_min_max(self, name: str) -> Array | None:
        """Return the last, least and greatest of a number by column and site; None without it."""
        return self.table.last_min_max(name) if name in self.table.names else None

    def _find_harmless_non_finite(self) -> NDArray[np.bool_]:
        """Tell of which sites the non-finite numbers have reached no weight.

        Where no weights are measured, the outputs of the model tell: those behind it hold numbers.
        Masks of -inf in outputs and inputs are so, and gradients in a step that a `GradScaler`
        skips. An output whose gradients are not finite in this step either is broken.
        """
        since, of_outputs = self.table.non_finite_since, self.site_indices(*OF_OUTPUTS)
        bad_ends = [int(since[k]) for k in self.weight_or_output_sites if since[k] >= 0]
        bad_gradients = {int(since[k]) for k in of_outputs} - {self.steps[0]}
        is_harmless = np.zeros(len(since), np.bool_)
        until = min(bad_ends, default=math.inf)
        for step in np.unique(since[(since >= 0) & (since < until)]).tolist():
            if not self._has_weight_change(step, until):
                continue
            is_harmless[of_outputs] |= since[of_outputs] == step
            if step not in bad_gradients:
                sites = [k for k in self.site_indices("input", "output") if since[k] == step]
                is_harmless[sites] = self._have_finite_numbers(step, sites)
        broken = since[(since >= 0) & ~is_harmless]
        is_harmless &= ~np.isin(since, broken) | (since == self.steps[0])
        return is_harmless

    def _has_weight_change(self, step: int, until: float) -> bool:
        """Tell whether finite numbers change weights from a step on, and before another."""
        columns = enumerate(self.table.columns)
        later = [c for c, span in columns if step <= span.first and span.last < until]
        norms = self.last_min_max("norm")
        if norms is None or not later or not self.weight_or_output_sites:
            return False
        if not self.weight_sites:
            return True
        _, least, greatest = norms[:, later][:, :, self.site_indices("value")]
        has_gradients = (norms[2][later][:, self.site_indices("update", "grad")] >= 0).any()
        return bool(has_gradients or (least.min(axis=0) < greatest.max(axis=0)).any())

    def has_step(self, step: int) -> bool:
        """Tell whether a step was measured."""
        return any(report.step == step for report in self.reports)

    def norms_of_step(self, step: int) -> dict[str, float]:
        """Return the norms by site in a step that was measured."""
        table = _make_table([next(report for report in self.reports if report.step == step)])
        return dict(zip(table.sites, table.last_min_max("norm")[0, 0].tolist(), strict=True))

    def _have_finite_numbers(self, step: int, sites: Sequence[int]) -> list[bool]:
        """Tell of sites whether they have finite numbers in a step, too."""
        norms = self.norms_of_step(step)
        return [not math.isnan(norms.get(self.sites[k], math.nan)) for k in sites]

    def site_indices(self, *ports: str) -> list[int]:
        """Return the indices of the sites of some ports."""
        return [k for k, site in enumerate(self.sites) if path_and_port(site)[1] in ports]

    def find_onset(self, site_index: int, column: int, factor: float, usual: float = 0.0) -> Onset:
        """Return the onset of a site in a column: its first step far above its usual norm."""
        reports, site = self._reports_of_column(column), self.sites[site_index]
        first = 0 if len(reports) == 1 else int(np.argmax(_norms(reports, site) > BEGUN * usual))
        return self._onset_at_report(reports[first], site_index, factor, usual)

    def onset_at_step(self, site_index: int, step: int) -> Onset:
        """Return the onset of a site at a step."""
        columns = self.table.columns
        column = next((c for c, span in enumerate(columns) if step <= span.last), len(columns) - 1)
        reports = self._reports_of_column(column)
        report = next((report for report in reports if report.step == step), reports[0])
        return replace(self._onset_at_report(report, site_index, math.nan, math.nan), step=step)

    def _reports_of_column(self, column: int) -> Sequence[StepReport]:
        span = self.table.columns[column]
        return self.reports[span.index - span.n_reports + 1 : span.index + 1]

    def _onset_at_report(
        self, report: StepReport, site_index: int, factor: float, usual: float
    ) -> Onset:
        site = self.sites[site_index]
        stage, turn = STAGES[path_and_port(site)[1]], self._firing_turn(report, site, site_index)
        return Onset(report.step, stage, turn, site, factor, usual=usual)

    def _firing_turn(self, report: StepReport, site: str, default: int) -> int:
        """Return the turn of a site in a step; that of its registration if not known."""
        if report.order is None:
            return default
        if self._layout_rows[0] is not report.layout:
            rows = {name: row for row, name in enumerate(report.layout.by_site)}
            self._layout_rows = report.layout, rows
        row = self._layout_rows[1].get(site)
        turn = NO_TURN if row is None else int(report.order[row])
        return default if turn == NO_TURN else turn


def _make_table(reports: Sequence[StepReport]) -> DownsampledTable:
    table = DownsampledTable()
    table.add(reports)
    return table


def _norms(reports: Sequence[StepReport], site: str) -> Array:
    """Return the norms of a site by report; NaN without them."""
    return np.concatenate(
        [
            numbers_at_reports(block, site).get("norm", np.full(len(block), np.nan))
            for block in split_by_layout(reports, len(reports))
        ]
    )


def path_of_site(site: str) -> str:
    """Return the path of a site."""
    return path_and_port(site)[0]


def sites_of(onsets: Iterable[Onset]) -> tuple[str, ...]:
    """Return the sites of onsets."""
    return tuple(onset.site for onset in onsets)


def median_without_nan(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return the median over the first axis without NaN; NaN where nothing else is."""
    ordered = np.sort(numbers, axis=0)  # NaN comes last
    counts = np.count_nonzero(~np.isnan(numbers), axis=0)
    at = np.maximum(counts - 1, 0) // 2
    return np.where(counts > 0, np.take_along_axis(ordered, at[None], axis=0)[0], np.nan)
