"""Draw the channels of a layer side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hookline.engine import Site
from hookline.views.plots.checks import Source
from hookline.views.plots.reducing import (
    Array,
    Scale,
    around,
    order_of,
    range_text,
    scale_of,
    share_text,
    smaller,
)
from hookline.views.plots.sheet import (
    BLUE,
    GREY,
    PLAIN,
    SMALL,
    TEXT,
    TINY,
    Sheet,
    draw_map,
    text_width,
    tidy,
)
from hookline.views.plots.values import Arranged, Value, arrange, look_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SIDE = 128
_WIDTH = 8.8
_LABEL = 0.15
_GAP = 0.07


def channels(
    recording: Source,
    site: str | Site,
    *,
    n: int | None = 64,
    order: str | Iterable[int] = "index",
    sample: int = 0,
    layout: str | None = None,
    shared: bool = False,
) -> Figure:
    """Draw the channels of a layer: feature maps as a grid, sequences as curves, vectors as bars.

        >>> import hookline as hl
        >>> model = nn.Conv2d(3, 16, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(1, 3, 32, 32))
        >>> figure = hl.plots.channels(run, "(root)", order="std", n=9)
        >>> figure.savefig(tmp_path / "channels.png")

    If no number is negative, the colours are viridis; otherwise red is above zero and blue below. A
    map on its own scale has its range above it if there is room. Maps of a single number are drawn
    as bars. Maps larger than 128 x 128 are averaged down by area. For a volume, the middle slice is
    drawn; for complex numbers, the magnitude.

    Args:
        recording: a recording, or one of its passes: `run.passes[1]`.
        site: the site, as in a look-up: `"layer1"`, `"h.3:output[0]"`, `"block#2"`.
        n: the most channels to draw; None draws all of them. It does not limit indices in `order`.
        order: "index"; or "mean", "std" or "max" for the largest first; or the channels' indices.
        sample: the index of the sample in the batch.
        layout: one letter for each dimension: N sample, C channel, T or L position in a sequence,
            D depth, H height, W width. The default is C, NC, NTC, NCHW or NCDHW by the number of
            dimensions, and NCL for Conv1d and similar modules. Swin's maps are "NHWC". The title
            names the layout.
        shared: True uses one scale of colours for all channels. With more than 1000 values, this
            scale leaves out the outermost half percent at each end. False uses one scale for each
            channel.

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        InputError: the value cannot be drawn this way.
        HooklineError: matplotlib is not installed.
    """
    value = look_up(recording, site)
    found = arrange(value, layout, sample)
    chosen = order_of(found.data, order, n, value.label)
    total = found.data.shape[0]
    shown = share_text(len(chosen), total, "channel")
    by = f", largest {order} first" if isinstance(order, str) and order != "index" else ""
    of_all = f"of all {total:,}: " if len(chosen) < total else ""
    lines = [f"{value.form}, {found.text}", f"{shown}{by}; {of_all}{range_text(found.data)}"]
    if found.data.numel() == total:  # maps of one element are drawn as bars, like vectors
        lines.append("each map is a single number" if found.space else "")
        return _bars(found.data.flatten(), chosen, value.title, lines)
    if len(found.space) == 1:
        return _curves(value, found, chosen, lines)
    maps = smaller(found.data[chosen], MAX_SIDE).numpy()
    if max(found.data.shape[1:]) > MAX_SIDE:
        lines.append(f"drawn at {maps.shape[1]} x {maps.shape[2]}: each dot the mean of an area"
                     + "; the scales are of these" * (not shared))  # fmt: skip
    whole = scale_of(found.data, robust=shared)
    columns, tile = tiling(len(chosen), maps.shape[1], maps.shape[2], _WIDTH)
    n_rows = math.ceil(len(chosen) / columns)
    width = max(columns * (tile[0] + _GAP), 4.6)
    height = n_rows * (tile[1] + _LABEL + _GAP)
    sheet = Sheet(width, height + 0.4, value.title, lines)
    axes = sheet.canvas(0, 0, width, height)
    grid(axes, maps, chosen, columns, tile, whole if shared else None, signed=whole.is_signed)
    has_bad = not np.isfinite(maps).all()
    if shared:
        sheet.bar(0.1, height + 0.08, whole, "value, one scale for all", has_bad=has_bad)
    else:
        ends = ("-largest", "+largest") if whole.is_signed else ("least", "greatest")
        sheet.bar(0.2, height + 0.08, Scale(-1 if whole.is_signed else 0, 1, whole.is_signed),
                  "value, each map on its own scale", ends, has_bad=has_bad)  # fmt: skip
    return sheet.figure


def tiling(n: int, height: int, width: int, across: float) -> tuple[int, tuple[float, float]]:
    """Return the number of columns of a grid of maps, and the size of a tile in inches."""
    aspect = min(max(height / width, 0.125), 8.0)
    square = math.sqrt(n * aspect)
    # A number of columns that fills all rows, if there is one.
    about = range(max(1, math.floor(square)), math.ceil(square) + 2)
    even = [columns for columns in about if n % columns == 0]
    columns = min(n, even[-1] if even else math.ceil(square))
    wide = min((across - columns * _GAP) / columns, 1.9, 1.9 / aspect)
    return columns, (wide, wide * aspect)


def grid(
    axes: Axes,
    maps: Array,
    numbers: list[int],
    columns: int,
    tile: tuple[float, float],
    scale: Scale | None,
    *,
    signed: bool,
) -> None:
    """Draw maps, shape `(n, height, width)`, in rows on a canvas, each under its index.

    Maps on their own scales have their ranges beside the indices, if there is room for all of them.
    """
    wide, high = tile
    labels = [label_of(number, drawn) for number, drawn in zip(numbers, maps, strict=True)]
    ranges = _ranges(maps, labels, wide) if scale is None else [""] * len(maps)
    for k, (label, ends, drawn) in enumerate(zip(labels, ranges, maps, strict=True)):
        left = (k % columns) * (wide + _GAP)
        top = (k // columns) * (high + _LABEL + _GAP)
        axes.text(left, top + _LABEL - 0.03, label, fontsize=SMALL, va="bottom")
        if ends:
            axes.text(left + wide, top + _LABEL - 0.03, ends, fontsize=TINY, va="bottom",
                      ha="right", alpha=0.75)  # fmt: skip
        own = scale_of_map(drawn, signed) if scale is None else scale
        draw_map(axes, drawn, own, (left, top + _LABEL, wide, high))


def scale_of_map(drawn: Array, signed: bool) -> Scale:
    """Return the scale of a single map."""
    finite = drawn[np.isfinite(drawn)]
    if not finite.size:
        return Scale(0.0, 1.0, signed)
    low, high = float(finite.min()), float(finite.max())
    if signed:
        reach = max(abs(low), abs(high)) or 1.0
        return Scale(-reach, reach, True)
    return Scale(low, high, False) if low < high else Scale(*around(low), False)


def label_of(number: int, drawn: Array) -> str:
    """Return a channel's label: its index, and a mark for NaN or a constant map."""
    if not np.isfinite(drawn).all():
        return f"{number} NaN"
    return f"{number} const" if drawn.min() == drawn.max() else f"{number}"


def _ranges(maps: Array, labels: list[str], wide: float) -> list[str]:
    """Format each map's range with three or two digits; empty texts if they do not all fit."""
    for digits in (3, 2):
        found = [_range(drawn, digits) for drawn in maps]
        pairs = zip(labels, found, strict=True)
        if all(text_width([label]) + text_width([ends], TINY) <= wide for label, ends in pairs):
            return found
    return [""] * len(maps)


def _range(drawn: Array, digits: int) -> str:
    finite = drawn[np.isfinite(drawn)]
    if not finite.size:
        return ""
    low, high = (f"{end:.{digits}g}" for end in (finite.min(), finite.max()))
    return low if finite.min() == finite.max() else f"{low} to {high}"


def _curves(value: Value, found: Arranged, chosen: list[int], lines: list[str]) -> Figure:
    """Draw sequences as one curve a channel, each on its own scale."""
    curves = smaller(found.data[chosen], 4 * MAX_SIDE).numpy()
    length = found.data.shape[1]
    if length > curves.shape[1]:
        lines.append(f"drawn at {curves.shape[1]} points: each the mean of a stretch")
    columns = min(len(chosen), 8 if len(chosen) > 16 else 4)
    n_rows = math.ceil(len(chosen) / columns)
    wide, high = _WIDTH / columns - _GAP, 0.55
    height = n_rows * (high + _LABEL + _GAP)
    sheet = Sheet(_WIDTH, height + 0.2, value.title, lines)
    axes = sheet.canvas(0, 0, _WIDTH, height)
    for k, (number, curve) in enumerate(zip(chosen, curves, strict=True)):
        left = (k % columns) * (wide + _GAP)
        bottom = (k // columns) * (high + _LABEL + _GAP) + _LABEL + high
        axes.text(left, bottom - high - 0.03, label_of(number, curve), fontsize=SMALL, va="bottom")
        own = scale_of_map(curve, False)
        span = own.high - own.low
        if own.low <= 0 <= own.high:
            zero = bottom + own.low / span * high
            axes.plot([left, left + wide], [zero, zero], color=GREY, linewidth=0.4)
        x = left + np.linspace(0, 1, len(curve)) * wide if len(curve) > 1 else [left + wide / 2]
        y = bottom - (np.where(np.isfinite(curve), curve, np.nan) - own.low) / span * high
        dot = "." if len(curve) < 3 else ""
        axes.plot(x, y, color=BLUE, linewidth=0.8, marker=dot)
    axes.text(0, height + 0.02, f"{found.space}: 0 to {length - 1}, left to right; each curve on"
              " its own scale, the grey line is zero", fontsize=SMALL, va="top",
              clip_on=False)  # fmt: skip
    return sheet.figure


def _bars(vector: Tensor, chosen: list[int], title: str, lines: list[str]) -> Figure:
    """Draw a vector as one bar a channel."""
    numbers = vector[chosen].numpy()
    sheet = Sheet(_WIDTH, 3.0, title, lines)
    axes = sheet.axes(0.6, 0.05, _WIDTH - 0.6, 2.4)
    axes.bar(range(len(chosen)), np.where(np.isfinite(numbers), numbers, 0.0), color=BLUE)
    for k in np.flatnonzero(~np.isfinite(numbers)):
        axes.text(k, 0, str(numbers[k]), fontsize=SMALL, rotation=90, ha="center", va="bottom")
    axes.axhline(0, color=GREY, linewidth=0.6)
    step = max(1, math.ceil(len(chosen) / 32))
    axes.set_xticks(range(0, len(chosen), step), [str(k) for k in chosen[::step]], fontsize=SMALL)
    axes.tick_params(labelsize=SMALL)
    axes.set_xlim(-0.8, len(chosen) - 0.2)
    axes.set_xlabel("channel", fontsize=TEXT, **PLAIN)
    axes.set_ylabel("value", fontsize=TEXT, **PLAIN)
    tidy(axes)
    return sheet.figure
