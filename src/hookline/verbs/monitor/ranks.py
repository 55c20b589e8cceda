"""Gather the slots of all ranks: one collective for a report."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hookline.curves import ABSENT, Entry, Layout
from hookline.display.text import first_line
from hookline.engine import gather_json, is_grouped, ranks_of, split_ranks
from hookline.errors import RanksError, warn
from hookline.statistics import Statistic
from hookline.verbs.monitor.copies import Copies
from hookline.verbs.monitor.slots import ALL, FIRST, MINE, SiteSlots, packed

_QUESTION = "hl.monitor"
# The port of the value that a gradient at a module is of.
_VALUES = {"grad_output": "output", "grad_input": "input"}


@final
class _Site(NamedTuple):
    """What a rank says of a site."""

    name: str
    widths: list[int]
    counts: str
    over: list[int]
    value: str  # the site of the value that a gradient is of; else the site itself

    @classmethod
    def of(cls, site: SiteSlots) -> _Site:
        """Return what this rank says of a site."""
        port = _VALUES.get(site.site.port, site.site.port)
        value = str(replace(site.site, port=port))
        return cls(site.name, list(site.widths), site.counts, site.over, value)


@final
class GatheredRanks:
    """Turn the slots of a step into a layout and the slots of each rank.

    All ranks agree on a layout when a site appears. Each later report is one all_gather.

    Args:
        statistics: the statistics of each site.
        model: the model.
    """

    def __init__(self, statistics: tuple[Statistic[Any], ...], model: nn.Module) -> None:
        self._statistics = statistics
        self._model = weakref.ref(model)
        self._copies = Copies(())
        self._by_name: dict[str, dict[int, _Site]] = {}
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
        slots = gathered[:, 1:]
        if self._copies.look(self._layout, slots):
            self._layout = self._layout_of_all(len(slots))
        return self._layout, slots

    def _agree(self, sites: list[SiteSlots], version: int) -> None:
        """Agree on the layout of all ranks: the sites of rank 0, then those of other ranks."""
        model = self._model()
        rows = [_Site.of(site) for site in sites]
        said = {"rows": rows, "split": [] if model is None else split_ranks(model)}
        by_rank = gather_json(_QUESTION, said, ranks_of(None, _QUESTION))
        if not self._has_agreed:
            self._copies = Copies([said["split"] for said in by_rank])
        self._by_name = {}
        for rank, said_there in enumerate(by_rank):
            for row in said_there["rows"]:
                self._by_name.setdefault(row[0], {})[rank] = _Site(*row)
        self._layout, self._version = self._layout_of_all(len(by_rank)), version
        self._places = _places(sites, self._layout.entries)
        self._has_agreed = True

    def _layout_of_all(self, n_ranks: int) -> Layout:
        entries: list[Entry] = []
        for name, holders in self._by_name.items():
            widths = holders[min(holders)].widths
            ranks = self._counted(name, holders, n_ranks)
            entries += [Entry(name, number, width, ranks) for number, width in enumerate(widths)]
        return Layout(self._statistics, tuple(entries))

    def _counted(
        self, name: str, holders: dict[int, _Site], n_ranks: int
    ) -> tuple[int, ...] | None:
        """Return the ranks that count for a site; None for all."""
        kinds = {site.counts for site in holders.values()}
        if kinds == {FIRST}:
            return (min(holders),)
        counting = [rank for rank, site in holders.items() if site.counts in (ALL, MINE)]
        # Where several meshes have a parameter, as data parallelism copies it, the first counts.
        over = holders[min(holders)].over
        counting = [rank for rank in counting if holders[rank].over == over or not over]
        if kinds == {ALL}:
            counting = self._copies.counting((name, holders[min(holders)].value), counting)
        return None if len(counting) == n_ranks and kinds == {ALL} else tuple(counting)

    def _placed(self, packed_slots: Tensor, *, is_new: bool) -> Tensor:
        """Put this rank's slots at their places in the layout; `ABSENT` stands for missing ones."""
        placed = torch.full((1 + self._layout.width,), ABSENT, dtype=torch.float64)
        placed[0] = float(is_new)
        packed_slots = packed_slots.cpu()
        if not is_new:
            for at, start, width in self._places:
                placed[at : at + width] = packed_slots[start : start + width]
        return placed


def _places(sites: list[SiteSlots], entries: tuple[Entry, ...]) -> list[tuple[int, int, int]]:
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


def _all_gather(slots: Tensor) -> NDArray[Any]:
    backend = str(dist.get_backend())
    if "gloo" not in backend and "mpi" not in backend:
        slots = slots.to(torch.accelerator.current_accelerator())
    gathered = [torch.empty_like(slots) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, slots)
    return torch.stack(gathered).cpu().numpy()
