"""Gather the slots of all ranks: one collective for a report."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hookline.curves import ABSENT, Entry, Layout
from hookline.display.text import first_line
from hookline.engine import gather_json, is_grouped, ranks_of
from hookline.errors import RanksError, warn
from hookline.statistics import Statistic
from hookline.verbs.monitor.slots import ALL, FIRST, MINE, SiteSlots, packed

_QUESTION = "hl.monitor"


@final
class GatheredRanks:
    """Turn the slots of a step into a layout and the slots of each rank.

    All ranks agree on a layout when a site appears. Each later report is one all_gather.

    Args:
        statistics: the statistics of each site.
    """

    def __init__(self, statistics: tuple[Statistic[Any], ...]) -> None:
        self._statistics = statistics
        self._layout = Layout(statistics, ())
        self._has_agreed = False
        self._places: list[tuple[int, int, int]] = []
        self._version = -1
        self._is_alone = False

    @property
    def number(self) -> int:
        """Return this process's rank; 0 without a process group."""
        return dist.get_rank() if is_grouped() else 0

    @property
    def is_grouped(self) -> bool:
        """Tell whether other ranks take part."""
        return is_grouped() and dist.get_world_size() > 1 and not self._is_alone

    def report(
        self, sites: list[SiteSlots], slots: dict[str, list[Tensor]], version: int, *, is_last: bool
    ) -> tuple[Layout, NDArray[Any]]:
        """Gather a step's slots.

        Args:
            sites: the sites that ever had a value here.
            slots: their slots.
            version: the version of the sites.
            is_last: whether the line has ended, so that other ranks may not come.

        Returns:
            The layout, and the slots of each rank, of shape [ranks, width].
        """
        packed_slots = packed(sites, slots)
        if not self.is_grouped:
            return self._alone(sites, version), packed_slots.cpu().numpy()[None]
        try:
            return self._together(sites, packed_slots, version, is_last=is_last)
        except RanksError as error:
            self._is_alone, self._version = True, -1
            warn(
                f"hl.monitor shows this rank's numbers alone: {first_line(error)}."
                "\nCall hl.monitor on every rank, outside of `if rank == 0:`."
            )
            return self._alone(sites, version), packed_slots.cpu().numpy()[None]

    def _alone(self, sites: list[SiteSlots], version: int) -> Layout:
        if version != self._version:
            entries = [
                Entry(site.name, number, width)
                for site in sites
                for number, width in enumerate(site.widths)
            ]
            self._layout, self._version = Layout(self._statistics, tuple(entries)), version
        return self._layout

    def _together(
        self, sites: list[SiteSlots], packed_slots: Tensor, version: int, *, is_last: bool
    ) -> tuple[Layout, NDArray[Any]]:
        is_new = version != self._version
        if not self._has_agreed:
            self._agree(sites, version)
            is_new = False
        elif is_last:
            gather_json(_QUESTION, "end", ranks_of(None, _QUESTION))
        gathered = _all_gather(self._placed(packed_slots, is_new=is_new))
        if gathered[:, 0].any():  # a site has appeared on some rank
            self._agree(sites, version)
            gathered = _all_gather(self._placed(packed_slots, is_new=False))
        return self._layout, gathered[:, 1:]

    def _agree(self, sites: list[SiteSlots], version: int) -> None:
        """Agree on the layout of all ranks: the sites of rank 0, then those of other ranks."""
        rows = [[site.name, list(site.widths), site.counts] for site in sites]
        by_rank = gather_json(_QUESTION, rows, ranks_of(None, _QUESTION))
        by_name: dict[str, dict[int, tuple[list[int], str]]] = {}
        for rank, rows_of_rank in enumerate(by_rank):
            for name, widths, counts in rows_of_rank:
                by_name.setdefault(name, {})[rank] = widths, counts
        entries: list[Entry] = []
        for name, holders in by_name.items():
            widths = holders[min(holders)][0]
            ranks = _counted({rank: counts for rank, (_, counts) in holders.items()}, len(by_rank))
            entries += [Entry(name, k, width, ranks) for k, width in enumerate(widths)]
        self._places = _places(sites, entries)
        self._layout, self._version = Layout(self._statistics, tuple(entries)), version
        self._has_agreed = True

    def _placed(self, packed_slots: Tensor, *, is_new: bool) -> Tensor:
        """Put this rank's slots at their places in the layout; `ABSENT` stands for missing ones."""
        placed = torch.full((1 + self._layout.width,), ABSENT, dtype=torch.float64)
        placed[0] = float(is_new)
        packed_slots = packed_slots.cpu()
        if not is_new:
            for at, start, width in self._places:
                placed[at : at + width] = packed_slots[start : start + width]
        return placed


def _places(sites: list[SiteSlots], entries: list[Entry]) -> list[tuple[int, int, int]]:
    """Return where this rank's sites go: the place in the layout, the place here, the width.

    A report begins with one number: whether a site has appeared. A site whose width differs from
    rank 0's has no place.
    """
    spans: dict[str, tuple[int, int]] = {}
    at = 1
    for entry in entries:
        first, width = spans.get(entry.site, (at, 0))
        spans[entry.site] = first, width + entry.width
        at += entry.width
    places, start = [], 0
    for site in sites:
        width = sum(site.widths)
        if spans[site.name][1] == width:
            places.append((spans[site.name][0], start, width))
        start += width
    return places


def _counted(counts: dict[int, str], n_ranks: int) -> tuple[int, ...] | None:
    """Return the ranks that count for a site, from what each rank says of it."""
    kinds = set(counts.values())
    if kinds == {ALL} and len(counts) == n_ranks:
        return None
    if kinds == {FIRST}:
        return (min(counts),)
    return tuple(rank for rank, kind in counts.items() if kind in (ALL, MINE))


def _all_gather(slots: Tensor) -> NDArray[Any]:
    backend = str(dist.get_backend())
    if "gloo" not in backend and "mpi" not in backend:
        slots = slots.to(torch.accelerator.current_accelerator())
    gathered = [torch.empty_like(slots) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, slots)
    return torch.stack(gathered).cpu().numpy()
