"""The numbers of a run by site and column, few enough columns to draw.

A column stands for one reported step, or for several in a row once there are more steps than
columns. It keeps the last number, the least and the greatest of its steps, so that a peak of one
step is never lost.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves.numbers_of_statistic import OF_MOMENTS, numbers_of_site
from hookline.curves.numbers_over_steps import (
    has_numbers_functions,
    moments_from_slots,
    names_of_numbers,
    numbers_by_statistic,
)
from hookline.curves.slot_layout import NO_TURN, Entry, Layout
from hookline.curves.step_reports import StepReport, split_by_layout, weight_of_update
from hookline.errors import FolderError
from hookline.statistics.moments import MomentsStatistic

MOST_COLUMNS = 512
RECENT = 10  # the reports that findings look back on
_LEAST_COLUMNS = 64  # that findings need, however many sites there are
_MOST_CELLS = 2**22  # of columns and sites, beyond which there are fewer columns
_BLOCK = 64  # reports that are read at once
_BLOCK_CELLS = 2**20  # of reports and sites that are read at once
_N_SLOTS = 8
_N_SUMS = 6
_LARGEST = float(np.finfo(np.float32).max)

Array = NDArray[Any]


@final
@dataclass(slots=True)
class StepSpan:
    """The steps that a column stands for."""

    first: int  # the number of the first step
    last: int  # the number of the last step
    index: int  # the index of the last step's report
    n_reports: int = 1  # how many reports there are in it


@final
class DownsampledTable:
    """The numbers of a run, which grow by reports.

    Args:
        most: the greatest number of columns. When they are full, each two become one. Of many
            sites there are fewer, so that the memory stays bounded.

    Attributes:
        sites: the sites in the order of registration; a later one is appended.
        names: the names of the numbers.
        columns: the columns.
        stride: how many reports a full column stands for.
        now: the numbers of each site's last step that has any, of shape [names, sites].
        non_finite_since: the first step with a non-finite number, by site; -1 if there is none.
        bad_turn: the rank of a site in the order of firing of that step; `NO_TURN` if not known.
        n_zero: at how many of the last reports a site was all zero, without a break.
        zero_since: the step at which that began.
        recent: `now` of the last reports, each NaN where the site had no value.
    """

    def __init__(self, most: int = MOST_COLUMNS) -> None:
        self.sites: list[str] = []
        self.names: list[str] = []
        self.columns: list[StepSpan] = []
        self.stride: int = 1
        self.n_reports: int = 0
        self._most = most
        # The last, least and greatest numbers, of shape [3, columns, names, sites].
        self._numbers: Array = np.empty((3, 0, 0, 0), np.float32)
        self.now: Array = np.empty((0, 0), np.float32)
        self.non_finite_since: Array = np.empty(0, np.int64)
        self.bad_turn: Array = np.empty(0, np.int64)
        self.n_zero: Array = np.empty(0, np.int64)
        self.zero_since: Array = np.empty(0, np.int64)
        self.recent: deque[Array] = deque(maxlen=RECENT)
        self._site_of: dict[str, int] = {}
        self._layout_numbers: _LayoutNumbers | None = None

    def add(self, reports: Sequence[StepReport]) -> None:
        """Add reports that follow those that are here."""
        n_sites = len(reports[-1].layout.by_site) if reports else 0
        for block in split_by_layout(reports, min(_BLOCK, _BLOCK_CELLS // (n_sites + 1) + 1)):
            self._add_block(block)

    def last_min_max(self, name: str, start: int = 0) -> Array:
        """Return the last, least and greatest numbers of columns, of shape [3, columns, sites].

        Args:
            name: the name of the number.
            start: the first column.
        """
        return self._numbers[:, start : len(self.columns), self.names.index(name)]

    def have_non_finite(self, start: int = 0) -> Array:
        """Tell where non-finite numbers were, of shape [columns, sites]."""
        if "non_finite" not in self.names:
            return np.zeros((len(self.columns) - start, len(self.sites)), np.bool_)
        return np.asarray(self.last_min_max("non_finite", start)[2] > 0)

    def _add_block(self, block: list[StepReport]) -> None:
        if self._layout_numbers is None or self._layout_numbers.layout is not block[0].layout:
            self._layout_numbers = _LayoutNumbers(block[0].layout)
        names, numbers = self._layout_numbers.names_and_numbers(block)
        self._add_names_and_sites(names, self._layout_numbers.sites)
        at_sites = [self._site_of[site] for site in self._layout_numbers.sites]
        rows = np.full((len(block), len(self.names), len(self.sites)), np.nan, np.float32)
        at = [self.names.index(name) for name in names]
        rows[:, np.array(at, np.intp)[:, None], at_sites] = np.clip(numbers, -_LARGEST, _LARGEST)
        for report, row in zip(block, rows, strict=True):
            self._add_row(report.step, row)
            self._update_non_finite_and_zero_steps(report, row, at_sites)

    def _add_names_and_sites(self, names: Sequence[str], sites: Sequence[str]) -> None:
        new_names = [name for name in names if name not in self.names]
        new_sites = [site for site in sites if site not in self._site_of]
        if not new_names and not new_sites:
            return
        self.names += new_names
        for site in new_sites:
            self._site_of[site] = len(self.sites)
            self.sites.append(site)
        while len(self.columns) > self._most_columns():
            self._merge_column_pairs()
        grown = ((0, len(new_names)), (0, len(new_sites)))
        used = self._numbers[:, : len(self.columns)]
        self._numbers = np.pad(used, ((0, 0), (0, 0), *grown), constant_values=np.nan)
        self.now = np.pad(self.now, grown, constant_values=np.nan)
        self.recent = deque(
            (np.pad(row, grown, constant_values=np.nan) for row in self.recent), RECENT
        )
        self.non_finite_since = np.pad(self.non_finite_since, grown[1], constant_values=-1)
        self.bad_turn = np.pad(self.bad_turn, grown[1], constant_values=NO_TURN)
        self.n_zero = np.pad(self.n_zero, grown[1])
        self.zero_since = np.pad(self.zero_since, grown[1])

    def _add_row(self, step: int, row: Array) -> None:
        columns, most = self.columns, self._most_columns()
        if len(columns) >= most and columns[-1].n_reports == self.stride:
            self._merge_column_pairs()
        if not columns or columns[-1].n_reports == self.stride:
            if len(columns) == self._numbers.shape[1]:
                n_more = min(max(len(columns), _LEAST_COLUMNS), most - len(columns))
                self._numbers = np.pad(self._numbers, ((0, 0), (0, n_more), (0, 0), (0, 0)))
            self._numbers[:, len(columns)] = row
            columns.append(StepSpan(step, step, self.n_reports))
        else:
            last, least, greatest = self._numbers[:, len(columns) - 1]
            np.copyto(last, row, where=~np.isnan(row))
            np.fmin(least, row, out=least)
            np.fmax(greatest, row, out=greatest)
            column = columns[-1]
            column.last, column.index = step, self.n_reports
            column.n_reports += 1
        self.n_reports += 1
        has_value = ~np.isnan(row).all(axis=0)
        self.now[:, has_value] = row[:, has_value]
        self.recent.append(row)

    def _update_non_finite_and_zero_steps(
        self, report: StepReport, row: Array, at_sites: list[int]
    ) -> None:
        """Note what findings need of each step."""
        step = report.step
        if "non_finite" in self.names:
            is_new = (row[self.names.index("non_finite")] > 0) & (self.non_finite_since < 0)
            self.non_finite_since[is_new] = step
            if report.order is not None and is_new.any():
                turns = np.full(len(self.sites), NO_TURN)
                turns[at_sites] = report.order
                self.bad_turn[is_new] = turns[is_new]
        if "zero_share" in self.names:
            share = row[self.names.index("zero_share")]
            self.zero_since[(share == 1) & (self.n_zero == 0)] = step
            self.n_zero[share == 1] += 1
            self.n_zero[share < 1] = 0

    def _most_columns(self) -> int:
        """Return how many columns there may be, of the sites so far."""
        return min(self._most, max(_LEAST_COLUMNS, _MOST_CELLS // max(len(self.sites), 1)))

    def _merge_column_pairs(self) -> None:
        """Join each two columns; a last one without another stays."""
        n_columns, half = len(self.columns), len(self.columns) // 2
        alone = self._numbers[:, 2 * half : n_columns].copy()
        earlier = self._numbers[:, : 2 * half : 2].copy()
        later = self._numbers[:, 1 : 2 * half : 2].copy()
        self._numbers[0, :half] = np.where(np.isnan(later[0]), earlier[0], later[0])
        self._numbers[1, :half] = np.fmin(earlier[1], later[1])
        self._numbers[2, :half] = np.fmax(earlier[2], later[2])
        self._numbers[:, half : n_columns - half] = alone
        self.columns[:] = [
            StepSpan(
                pair[0].first, pair[-1].last, pair[-1].index, sum(span.n_reports for span in pair)
            )
            for pair in (self.columns[k : k + 2] for k in range(0, n_columns, 2))
        ]
        self.stride *= 2


@final
class _LayoutNumbers:
    """Hold where the slots of a layout are, for reports that share it.

    The numbers are those of `numbers_of`: by NumPy for moments, which most sites have, and one by
    one for other statistics.

    Args:
        layout: the layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.sites = list(layout.by_site)
        moments = {
            k: entry
            for k, site in enumerate(self.sites)
            if (entry := _moments_entry(layout, site)) is not None
        }
        # The sites that have moments, where their slots are, and the ranks that count.
        self._at = np.array([*moments], np.intp)
        slots = [np.arange(place.start, place.stop) for _, place in moments.values()]
        self._slots = np.concatenate([*slots, np.empty(0, np.intp)])
        self._ranks = [entry.ranks for entry, _ in moments.values()]
        self._others = [
            (k, site)
            for k, site in enumerate(self.sites)
            if len(layout.by_site[site]) > 1 or k not in moments
        ]
        number_of = {site: k for k, site in enumerate(self.sites)}
        self._updates = [
            (number_of[site], number_of[weight])
            for site in self.sites
            if (weight := weight_of_update(site)) in number_of
        ]

    def names_and_numbers(self, block: Sequence[StepReport]) -> tuple[list[str], Array]:
        """Return the names of the numbers, and the numbers, of shape [reports, names, sites]."""
        others = {k: numbers_at_reports(block, site) for k, site in self._others}
        names = [*OF_MOMENTS, *["ratio"] * bool(self._updates)] if len(self._at) else []
        names = list(dict.fromkeys([*names, *itertools.chain.from_iterable(others.values())]))
        numbers = np.full((len(block), len(names), len(self.sites)), np.nan)
        if len(self._at):
            with np.errstate(all="ignore"):
                moments = moments_from_slots(self._merge_ranks(block))
                columns = np.stack([moments[name] for name in OF_MOMENTS], axis=1)
                numbers[:, : len(OF_MOMENTS), self._at] = columns
                norms = numbers[:, names.index("norm")]
                for k, weight in self._updates:
                    ratio = norms[:, k] / norms[:, weight]
                    ratios = np.where(norms[:, weight] == 0, np.nan, ratio)
                    numbers[:, names.index("ratio"), k] = ratios
        for k, named in others.items():
            for name, column in named.items():
                numbers[:, names.index(name), k] = column
        return names, numbers

    def _merge_ranks(self, block: Sequence[StepReport]) -> Array:
        """Return the slots of moments, ranks merged, of shape [reports, sites, slots].

        Where no value came, the slots are NaN.
        """
        n_ranks = len(block[0].slots)
        slots = np.stack([report.slots[:, self._slots] for report in block])
        slots = slots.reshape(len(block), n_ranks, -1, _N_SLOTS)
        for at, ranks in enumerate(self._ranks):
            if ranks is not None:
                slots[:, [rank for rank in range(n_ranks) if rank not in ranks], at] = np.nan
        if n_ranks == 1:
            return slots[:, 0]
        merged = np.concatenate(
            [np.nansum(slots[..., :_N_SUMS], 1), np.fmax.reduce(slots[..., _N_SUMS:], 1)], axis=-1
        )
        merged[np.isnan(slots[..., 0]).all(1)] = np.nan
        return merged


def _moments_entry(layout: Layout, site: str) -> tuple[Entry, slice] | None:
    for entry, place in layout.by_site[site]:
        is_moments = isinstance(layout.statistics[entry.statistic], MomentsStatistic)
        if is_moments and entry.width == _N_SLOTS:
            return entry, place
    return None


def _results_of_working_statistics(layout: Layout, site: str, report: StepReport) -> list[Any]:
    """Return the results of a site; a statistic that raises is left out, and said once."""
    try:
        return layout.results(site, report.slots, None)
    except FolderError:  # the class that merges the ranks is not known here
        return []
    except Exception:
        return layout.results(site, report.slots, None, is_lenient=True)


def numbers_at_reports(block: Sequence[StepReport], site: str) -> dict[str, Array]:
    """Return the single numbers of a site by name, one for each report of one layout."""
    layout = block[0].layout
    columns: dict[str, Array] = {}
    if has_numbers_functions(layout, site):
        entries = layout.by_site[site]
        for (entry, _), (has_value, numbers) in zip(
            entries, numbers_by_statistic(block, site), strict=True
        ):
            for name in names_of_numbers(layout.statistics[entry.statistic]):
                column = columns.setdefault(name, np.full(len(block), np.nan))
                is_new = has_value & np.isnan(column)
                column[is_new] = numbers[name][is_new[has_value]]
        return columns
    for k, report in enumerate(block):
        for name, number in numbers_of_site(
            _results_of_working_statistics(layout, site, report)
        ).items():
            column = columns.setdefault(name or "value", np.full(len(block), np.nan))
            if np.isnan(column[k]):
                column[k] = number
    return columns
