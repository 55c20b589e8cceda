"""Draw a histogram of each layer's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hookline.display.text import pick_evenly, plural, share_text, shorten
from hookline.display.units import measure, share
from hookline.engine import Site
from hookline.recordings.figure_values import (
    LabelledTensor,
    Source,
    check_count,
    skipped_text,
    values_to_draw,
)
from hookline.statistics.value_statistics import histogram_and_statistics
from hookline.views.plots.figure_sheet import BLUE, GREY, ORANGE, PLAIN, SMALL, Sheet, show_spines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE, _HIGH = 1.9, 0.85  # the size of one histogram, in inches
_ACROSS, _DOWN = 0.35, 0.6  # the gaps between histograms, in inches
_COLUMNS = 4
_MOST_BINS = 1000  # more bins than a histogram has pixels
_LARGEST = 1e290  # beyond this matplotlib's axes overflow


def histograms(
    recording: Source,
    sites: str | Site | Sequence[str | Site] | None = None,
    *,
    bins: int = 64,
    n: int = 48,
    log: bool = True,
) -> Figure:
    """Draw a histogram of each site's values, in firing order.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(16, 8))
        >>> figure = hl.plots.histograms(run, ["0", "1"])

    Every element is counted, in chunks, so a tensor of any size can be drawn. NaN and infinity are
    left out; the text above the histogram counts them. Each histogram has its own axis, from the
    smallest value to the largest. A vertical line marks zero.

    Args:
        recording: a recording of one pass, or a pass: `run.passes[1]`.
        sites: the sites to draw; None draws all that fired.
        bins: the number of equal bins, at most 1000.
        n: the most sites to draw, evenly spaced over the depth.
        log: True puts counts on a logarithmic axis, because the zeros after a ReLU hide the rest.

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up of the named sites.
        InputError: there is nothing to draw, there are several passes, or `bins` or `n` is not a
            positive integer in range.
        HooklineError: matplotlib is not installed.
    """
    check_count("bins", bins, _MOST_BINS)
    check_count("n", n)
    values, skipped = values_to_draw(recording, sites)
    drawn = pick_evenly(values, n)
    lines = [
        f"{share_text(len(drawn), len(values), 'site')}, {plural(bins, 'bin')} each;"
        f" height: elements a bin{', on a log axis' if log else ''}; grey line: zero",
        "evenly spaced over the depth; sites=[...] chooses" if len(drawn) < len(values) else "",
        skipped_text(skipped),
    ]
    columns = min(_COLUMNS, len(drawn))
    n_rows = math.ceil(len(drawn) / columns)
    width = max(columns * (_WIDE + _ACROSS), 4.5)
    sheet = Sheet(width, n_rows * (_HIGH + _DOWN), "Histograms of values", lines)
    for k, value in enumerate(drawn):
        left = (k % columns) * (_WIDE + _ACROSS) + 0.3
        top = (k // columns) * (_HIGH + _DOWN) + 0.36
        _draw_histogram(sheet.add_axes(left, top, _WIDE - 0.1, _HIGH), value, bins, log)
    return sheet.figure


def _draw_histogram(axes: Axes, value: LabelledTensor, bins: int, log: bool) -> None:
    counts, edges, statistics = histogram_and_statistics(value.tensor, bins)
    ends = [measure(float(end)) for end in (edges[0], edges[-1])]
    if np.abs(edges).max() > _LARGEST:
        edges = edges / _LARGEST
    axes.stairs(counts, edges, fill=True, color=BLUE)
    if log and counts.any():
        most = max(int(counts.max()), 2)
        axes.set_yscale("log")
        axes.set_ylim(0.7, most * 1.6)
        top = math.floor(math.log10(most))
        axes.set_yticks([1, *([10**top] if top else [])], ["1", *([f"1e{top}"] if top else [])])
        axes.minorticks_off()
    if edges[0] <= 0 <= edges[-1]:
        axes.axvline(0, color=GREY, linewidth=0.7)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xticks([edges[0], edges[-1]], ends)
    for label, side in zip(axes.get_xticklabels(), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)
    axes.tick_params(labelsize=SMALL, length=2, pad=1.5)
    if not log:
        axes.locator_params(axis="y", nbins=3)
    axes.set_title(shorten(value.label, 26), fontsize=SMALL, fontweight="bold",
                   loc="left", pad=12, **PLAIN)  # fmt: skip
    mean = "mean magnitude" if value.tensor.is_complex() else "mean"
    words = f"{statistics.shape} {mean} {measure(statistics.mean)}, zeros {share(statistics.zeros)}"
    if not value.tensor.numel():
        words = f"{statistics.shape}, no elements"
    style: dict[str, Any] = {"alpha": 0.75}
    if statistics.non_finite:
        words, style = (
            f"{statistics.shape}, {statistics.non_finite:,} NaN or infinite",
            {"color": ORANGE},
        )
    axes.text(0, 1.03, shorten(words, 44), transform=axes.transAxes, fontsize=6.2, va="bottom",
              **style, **PLAIN)  # fmt: skip
    show_spines(axes)
