"""The layout of a report: which slots belong to which site and statistic."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from hookline.display.text import type_and_line
from hookline.errors import warn
from hookline.statistics import Statistic

# What stands for slots without a value: a NaN that no computation gives, since a statistic of one's
# own may have NaN in its slots.
_ABSENT_BITS = 0x7FF8_0000_0068_6C63
(ABSENT,) = struct.unpack("<d", struct.pack("<Q", _ABSENT_BITS))

NO_TURN = -1  # in the order of a report: the site had no value


def holds_value(slots: NDArray[Any]) -> bool:
    """Tell whether slots are those of a value."""
    return not (slots.view(np.int64) == _ABSENT_BITS).all()


def hold_values(slots: NDArray[Any]) -> NDArray[np.bool_]:
    """Tell which rows are slots of a value, from slots of shape `(rows, width)`."""
    bits = slots.view(np.int64)
    has_value = np.ones(len(slots), np.bool_)
    if slots.shape[1]:  # the first slot settles most rows
        maybe = np.flatnonzero(bits[:, 0] == _ABSENT_BITS)
        has_value[maybe] = (bits[maybe] != _ABSENT_BITS).any(axis=1)
    return has_value


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """The slots of one statistic at one site."""

    site: str  # the site, as hookline writes it
    statistic: int  # the index of the statistic in the layout
    width: int  # the number of slots
    # The ranks whose slots count in the merged numbers. None counts every rank; a parameter of
    # which each rank holds a copy counts once.
    ranks: tuple[int, ...] | None = None


@final
@dataclass(frozen=True)
class Layout:
    """The entries of a report, one after the other in its slots."""

    statistics: tuple[Statistic[Any], ...]  # the statistics of all sites
    entries: tuple[Entry, ...]  # the entries, in registration order of their sites

    _told: set[int] = field(default_factory=set, compare=False, repr=False)

    @functools.cached_property
    def width(self) -> int:
        """Return the number of slots of one rank."""
        return sum(entry.width for entry in self.entries)

    @functools.cached_property
    def by_site(self) -> dict[str, list[tuple[Entry, slice]]]:
        """Return the entries of each site, with their place among the slots."""
        by_site: dict[str, list[tuple[Entry, slice]]] = {}
        start = 0
        for entry in self.entries:
            by_site.setdefault(entry.site, []).append((entry, slice(start, start + entry.width)))
            start += entry.width
        return by_site

    def results(
        self, site: str, slots: NDArray[Any], rank: int | None, *, is_lenient: bool = False
    ) -> list[Any]:
        """Compute the result of each statistic at a site; nothing where no value came.

        Args:
            site: the site.
            slots: the slots of each rank, of shape [ranks, width]. `ABSENT` stands for no value.
            rank: the rank; None merges the ranks that count.
            is_lenient: whether a statistic that raises is left out, and said once.
        """
        results = []
        for entry, place in self.by_site.get(site, ()):
            statistic = self.statistics[entry.statistic]
            counted = range(len(slots)) if entry.ranks is None else entry.ranks
            ranks = (
                [number for number in counted if number < len(slots)] if rank is None else [rank]
            )
            parts = [slots[number, place] for number in ranks]
            present = [torch.from_numpy(part.copy()) for part in parts if holds_value(part)]
            if not present:
                continue
            try:
                results.append(statistic.result(functools.reduce(statistic.merge, present)))
            except Exception as error:
                if not is_lenient:
                    raise
                self._warn_once(statistic, site, error)
        return results

    def _warn_once(self, statistic: Statistic[Any], site: str, error: Exception) -> None:
        if id(statistic) not in self._told:
            self._told.add(id(statistic))
            warn(
                f"The numbers of {type(statistic).__name__} at {site} are left out:"
                f" {type_and_line(error)}."
                f"\nSee where: curves[{site!r}].results."
            )
