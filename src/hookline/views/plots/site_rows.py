"""Lay out figures with one row a site and columns of numbers.

Sites are rows because paths are long: labels stay horizontal, and the figure grows downwards with
the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from hookline.display.text import shorten
from hookline.findings.survey import PLAIN_HOLDERS, ancestors_of, repeated_block_indices
from hookline.statistics.value_statistics import Array
from hookline.views.plots.figure_sheet import (
    GREY,
    PLAIN,
    SMALL,
    TEXT,
    Sheet,
    show_spines,
    widest_text_inches,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW = 0.17  # inches
_MOST = 12.0  # the most inches of rows; beyond it, rows stand closer together
_LONGEST = 52
_GAP = 0.4
_WIDE = 300
_MOST_RATIO = 1e280  # of sizes; their quotient could overflow
_MOST_LINEAR = 1e307  # the range of a linear axis beyond it could overflow


@final
class SiteRowSheet:
    """A figure with one row a site.

    Args:
        title: as in `Sheet`.
        lines: as in `Sheet`.
        labels: the label of each row, from the top.
        columns: the heading of each column, with its unit.
        column_width: the width of a column, in inches.
        space: the space above and below the rows, in inches.
    """

    def __init__(
        self, title: str, lines: Sequence[str], labels: Sequence[str], columns: Sequence[str],
        column_width: float = 2.2, space: tuple[float, float] = (0.0, 0.0),
    ) -> None:  # fmt: skip
        n = len(labels)
        height = min(max(n * _ROW, 0.6), _MOST)
        texts = [shorten(label, _LONGEST) for label in labels]
        # If rows stand closer than the height of text, only every k-th is labelled.
        step = max(1, math.ceil(n * 0.125 / height))
        if step > 1:
            lines = [*lines, f"every {_ordinal(step)} row is named, at the marks"]
        left = widest_text_inches(texts) + 0.15
        width = max(left + len(columns) * (column_width + _GAP), 4.5)
        self.sheet: Sheet = Sheet(width, height + 0.5 + space[1] + space[0], title, lines)
        self.figure: Figure = self.sheet.figure
        self.height: float = height
        self.left: float = left
        self.axes: list[Axes] = []
        for k, heading in enumerate(columns):
            place = (left + k * (column_width + _GAP), 0.05 + space[0], column_width, height)
            axes = self.sheet.add_axes(*place)
            axes.set_ylim(n - 0.5, -0.5)
            axes.set_yticks(range(0, n, step))
            if k:
                axes.set_yticklabels([])
            else:
                axes.set_yticklabels(texts[::step], fontsize=SMALL, **PLAIN)
            axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.5)
            axes.set_axisbelow(True)
            axes.tick_params(axis="y", length=0 if step == 1 else 3)
            axes.tick_params(axis="x", labelsize=SMALL)
            axes.set_xlabel(heading, fontsize=TEXT, **PLAIN)
            show_spines(axes, ("bottom",))
            self.axes.append(axes)


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def symlog_if_wide(axes: Axes, numbers: Sequence[float]) -> None:
    """Set a symlog scale for numbers of very different size: linear near zero, then logarithmic."""
    finite = np.array([number for number in numbers if math.isfinite(number)])
    sizes = np.abs(finite[finite != 0])
    if not sizes.size:
        return
    usual, largest = median_size(sizes), float(sizes.max())
    if largest / _WIDE > usual or largest > _MOST_LINEAR:
        usual = min(usual, largest / _WIDE)
        axes.set_xscale("symlog", linthresh=usual)
        axes.set_xlabel(f"{axes.get_xlabel()} (log)", fontsize=TEXT, **PLAIN)
        sides = [float(side) for side in (-finite.min(), finite.max())]
        reaches = [math.log10(max(side, usual) / usual) for side in sides]
        margin = 0.05 * (1 + sum(reaches))
        powers = [min(math.log10(usual) + reach + margin, 308) for reach in reaches]
        low, high = (
            max(side, 10.0**power) if side > 0 else usual * min(margin, 1)
            for side, power in zip(sides, powers, strict=True)
        )
        axes.set_xlim(-low, high)
        step = max(1, math.ceil(sum(reaches) / 2))  # two ticks beside that of 0 have room
        below, above = (
            [usual * 10.0**k for k in range(step, int(reach) + 1, step)] for reach in reaches
        )
        places = [*(-place for place in below), 0.0, *above]
        axes.set_xticks(places, [f"{place:.0e}" if place else "0" for place in places])
        axes.minorticks_off()
    if axes.get_xscale() == "linear":
        axes.locator_params(axis="x", nbins=3, steps=[1, 2, 5, 10])
        # In full, because matplotlib would write a common power of ten over the heading.
        axes.xaxis.set_major_formatter(lambda place, _: f"{place:.3g}")


def median_size(sizes: Array) -> float:
    """Return the median of sizes, but no less than what the largest can be divided by."""
    return max(float(np.quantile(sizes, 0.5, method="lower")), float(sizes.max()) / _MOST_RATIO)


def set_log_axis(axes: Axes, low: float, high: float, max_ticks: int) -> None:
    """Set a logarithmic axis, with ticks at so many powers of ten at most."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    powers = powers[:: max(1, math.ceil(len(powers) / max_ticks))]
    axes.set_xticks([10.0**p for p in powers], [f"1e{p}" for p in powers])
    axes.minorticks_off()


def block_indices(labels: Sequence[str], types: Sequence[str]) -> list[int]:
    """Return the places of repeated blocks: sites that hold other sites; none without three alike.

    >>> labels = ["h.0.fc", "h.0", "h.1.fc", "h.1", "h.2.fc", "h.2", "head"]
    >>> block_indices(labels, ["Linear", "Block"] * 3 + ["Linear"])
    [1, 3, 5]

    Args:
        labels: the sites.
        types: the class of each site's module; containers such as `nn.Sequential` are no blocks.
    """
    holders = {holder for label in labels for holder in ancestors_of(label.partition(":")[0])}
    places = [
        place
        for place, (label, module_type) in enumerate(zip(labels, types, strict=True))
        if label in holders and module_type not in PLAIN_HOLDERS
    ]
    return [places[place] for place in repeated_block_indices([labels[place] for place in places])]
