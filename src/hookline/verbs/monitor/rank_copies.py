"""Find the ranks whose values are copies, where tensor parallelism splits a model over ranks.

The ranks of a tensor-parallel group run one part of the batch together. A plain tensor does not
tell whether it is a part of a value, or the whole value that each of them holds: the output of
`ColwiseParallel` is the one, that of `RowwiseParallel` the other. So ranks hold copies as long as
their slots have been equal, bit for bit, in each report. Ranks of different groups have different
parts of the batch, and are not compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.curves import Layout


@final
class RankCopies:
    """Know which ranks hold the same values.

    Args:
        groups: for each rank, the ranks of its tensor-parallel group; none without one.
    """

    def __init__(self, groups: Sequence[list[int]]) -> None:
        self._groups = _merge_overlapping(groups)
        self._differing: dict[str, set[tuple[int, int]]] = {}

    def record_differences(self, layout: Layout, slots: NDArray[Any]) -> bool:
        """Compare the slots of a report. Return True if ranks differ that had been alike.

        Args:
            layout: the layout of the report.
            slots: the slots of each rank, of shape [ranks, width].
        """
        if not self._groups or not layout.width:
            return False
        sites = list(layout.by_site)
        starts = [layout.by_site[site][0][1].start for site in sites]
        bits, is_new = slots.view(np.int64), False
        for pair in itertools.chain(*(itertools.combinations(group, 2) for group in self._groups)):
            differs = np.logical_or.reduceat(bits[pair[0]] != bits[pair[1]], starts)
            for index in np.flatnonzero(differs):
                pairs = self._differing.setdefault(sites[index], set())
                is_new |= pair not in pairs
                pairs.add(pair)
        return is_new

    def share_a_group(self, ranks: Iterable[int]) -> bool:
        """Tell whether two of these ranks, or more, run one part of the batch together."""
        counted = set(ranks)
        return any(len(counted.intersection(group)) > 1 for group in self._groups)

    def counting_ranks(self, sites: Iterable[str], ranks: Iterable[int]) -> list[int]:
        """Return the ranks that count: of those that hold copies, the first.

        Args:
            sites: a site, and those whose parts it shares: a gradient has those of its value.
            ranks: the ranks that have the site.
        """
        differing = set().union(*(self._differing.get(site, ()) for site in sites))
        counting: list[int] = []
        for rank in sorted(ranks):
            group = next((group for group in self._groups if rank in group), [])
            earlier = [other for other in counting if other in group]
            if all((other, rank) in differing for other in earlier):
                counting.append(rank)
        return counting


def _merge_overlapping(groups: Iterable[list[int]]) -> list[list[int]]:
    """Join the groups that share a rank; those of one rank are none."""
    joined: list[set[int]] = []
    for group in map(set, groups):
        touching = [other for other in joined if other & group]
        joined = [other for other in joined if not other & group]
        joined.append(group.union(*touching))
    return [sorted(group) for group in joined if len(group) > 1]
