"""Rank the sites of a step by when they had their first values."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from hookline.curves import NO_TURN, Layout


@final
class FiringOrder:
    """Make the order of each report; equal orders in a row are one array."""

    def __init__(self) -> None:
        self._last: NDArray[np.int32] = np.empty(0, np.int32)

    def firing_positions(self, layout: Layout, turns: dict[str, int]) -> NDArray[np.int32]:
        """Return the rank of each site of a layout, shape `(sites,)`, counted from 0.

        Sites of one rank fired in an order that is not known. A site without a value has `NO_TURN`.

        Args:
            layout: the layout.
            turns: when the first value of each site came, on this rank.
        """
        ranks = {turn: rank for rank, turn in enumerate(sorted(set(turns.values())))}
        order = np.array(
            [ranks[turns[site]] if site in turns else NO_TURN for site in layout.by_site], np.int32
        )
        if not np.array_equal(order, self._last):
            self._last = order
        return self._last
