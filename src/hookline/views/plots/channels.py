"""Draw the channels of a layer side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from hookline.display.text import share_text
from hookline.engine import Site
from hookline.recordings.figure_values import LabelledTensor, Source, look_up_main_tensor
from hookline.statistics.value_statistics import Array
from hookline.views.pixels import Scale, colour_scale, range_text, shrink
from hookline.views.plots.arrange_value import Arranged, arrange, pick_channels
from hookline.views.plots.figure_sheet import (
    BLUE,
    GREY,
    PLAIN,
    SMALL,
    TEXT,
    TINY,
    Sheet,
    draw_map,
    label_ticks,
    show_spines,
    widest_text_inches,
)

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

    If no number is negative, the colours are viridis; otherwise orange is above zero and blue
    below. A map on its own scale has its range above it if there is room. Maps of a single number
    are drawn as bars. Maps larger than 128 x 128 are averaged down by area. For a volume, the
    middle slice is drawn; for complex numbers, the magnitude.

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
    value = look_up_main_tensor(recording, site)
    arranged = arrange(value, layout, sample)
    data, chosen = arranged.data, pick_channels(arranged.data, order, n, value.label)
    total = len(data)
    by = f", largest {order} first" if isinstance(order, str) and order != "index" else ""
    of_all = f"of all {total:,}: " if len(chosen) < total else ""
    lines = [
        f"{value.form}, {arranged.text}",
        f"{share_text(len(chosen), total, 'channel')}{by}; {of_all}{range_text(data)}",
    ]
    if data.numel() == total:  # maps of one element are drawn as bars, like vectors
        lines.append("each map is a single number" if arranged.space else "")
        return _draw_bars(data.flatten(), chosen, value.title, lines)
    if len(arranged.space) == 1:
        return _draw_curves(value, arranged, chosen, lines)
    maps = shrink(data[chosen], MAX_SIDE)
    if max(data.shape[1:]) > MAX_SIDE:
        lines.append(f"drawn at {maps.shape[1]} x {maps.shape[2]}: each dot the mean of an area"
                     + "; the scales are of these" * (not shared))  # fmt: skip
    whole = colour_scale(data, robust=shared)
    tiles = tiling(len(chosen), maps.shape[1] / maps.shape[2], _WIDTH)
    width, height = max(tiles.width_of_all, 4.6), tiles.height_of(len(chosen))
    sheet = Sheet(width, height + 0.4, value.title, lines)
    axes = sheet.add_canvas(0, 0, width, height)
    labels = channel_labels(chosen, data[chosen])
    draw_grid(axes, maps, labels, tiles, whole if shared else None, signed=whole.is_signed)
    has_bad = not bool(maps.isfinite().all())
    if shared:
        place = (0.1, height + 0.08)
        sheet.draw_colour_bar(place, whole, "value, one scale for all", has_bad=has_bad)
    else:
        ends = ("-largest", "+largest") if whole.is_signed else ("least", "greatest")
        scale = Scale(-1 if whole.is_signed else 0, 1, whole.is_signed)
        place = (0.2, height + 0.08)
        sheet.draw_colour_bar(
            place, scale, "value, each map on its own scale", ends, has_bad=has_bad
        )
    return sheet.figure


class Tiling(NamedTuple):
    """A grid of tiles, each under a label, in inches."""

    columns: int  # the number of columns
    width: float  # the width of a tile
    height: float  # the height of a tile without its label
    label: float = _LABEL  # the height of a label
    gap: float = _GAP  # between tiles

    @property
    def width_of_all(self) -> float:
        """The width of a row."""
        return self.columns * (self.width + self.gap)

    def height_of(self, n: int) -> float:
        """Return the height of n tiles."""
        return math.ceil(n / self.columns) * (self.height + self.label + self.gap)

    def top_left(self, k: int) -> tuple[float, float]:
        """Return the left edge of a tile, and its top edge below the label."""
        row, column = divmod(k, self.columns)
        return column * (self.width + self.gap), row * (
            self.height + self.label + self.gap
        ) + self.label


def tiling(n: int, aspect: float, across: float) -> Tiling:
    """Lay out n maps in a width; the aspect is their height by their width."""
    aspect = min(max(aspect, 0.125), 8.0)
    square = math.sqrt(n * aspect)
    # A number of columns that fills all rows, if there is one.
    near = range(max(1, math.floor(square)), math.ceil(square) + 2)
    even = [columns for columns in near if n % columns == 0]
    columns = min(n, even[-1] if even else math.ceil(square))
    width = min((across - columns * _GAP) / columns, 1.9, 1.9 / aspect)
    return Tiling(columns, width, width * aspect)


def draw_grid(
    axes: Axes, maps: Tensor, labels: list[str], tiles: Tiling, scale: Scale | None, *,
    signed: bool,
) -> None:  # fmt: skip
    """Draw maps, shape `(n, height, width)`, in rows on a canvas, each under its label.

    Maps on their own scales have their ranges beside the labels, if there is room for all of them.
    """
    ranges = _range_texts(maps, labels, tiles.width) if scale is None else [""] * len(maps)
    for k, (label, ends, drawn) in enumerate(zip(labels, ranges, maps, strict=True)):
        left, top = tiles.top_left(k)
        axes.text(left, top - 0.03, label, fontsize=SMALL, va="bottom")
        if ends:
            axes.text(left + tiles.width, top - 0.03, ends, fontsize=TINY, va="bottom",
                      ha="right", alpha=0.75)  # fmt: skip
        box = (left, top, tiles.width, tiles.height)
        draw_map(axes, drawn.numpy(), scale or colour_scale(drawn, signed=signed), box)


def channel_labels(numbers: list[int], maps: Tensor) -> list[str]:
    """Label channels by their index, with a mark for NaN or a constant map, of all its elements."""
    return [_channel_label(number, whole) for number, whole in zip(numbers, maps, strict=True)]


def _channel_label(number: int, whole: Tensor) -> str:
    if not whole.isfinite().all():
        return f"{number} NaN"
    return f"{number} const" if whole.min() == whole.max() else f"{number}"


def _range_texts(maps: Tensor, labels: list[str], width: float) -> list[str]:
    """Format each map's range with three or two digits; empty texts if they do not all fit."""
    for digits in (3, 2):
        ranges = [_range_text(drawn, digits) for drawn in maps.numpy()]
        pairs = zip(labels, ranges, strict=True)
        if all(
            widest_text_inches([label]) + widest_text_inches([ends], TINY) <= width
            for label, ends in pairs
        ):
            return ranges
    return [""] * len(maps)


def _range_text(drawn: Array, digits: int) -> str:
    finite = drawn[np.isfinite(drawn)]
    if not finite.size:
        return ""
    low, high = (f"{end:.{digits}g}" for end in (finite.min(), finite.max()))
    return low if finite.min() == finite.max() else f"{low} to {high}"


def _draw_curves(
    value: LabelledTensor, arranged: Arranged, chosen: list[int], lines: list[str]
) -> Figure:
    """Draw sequences as one curve a channel, each on its own scale."""
    curves = shrink(arranged.data[chosen], 4 * MAX_SIDE)
    length = arranged.data.shape[1]
    if length > curves.shape[1]:
        lines.append(f"drawn at {curves.shape[1]} points: each the mean of a stretch")
    columns = min(len(chosen), 8 if len(chosen) > 16 else 4)
    tiles = Tiling(columns, _WIDTH / columns - _GAP, 0.55)
    height = tiles.height_of(len(chosen))
    sheet = Sheet(_WIDTH, height + 0.2, value.title, lines)
    axes = sheet.add_canvas(0, 0, _WIDTH, height)
    labels = channel_labels(chosen, arranged.data[chosen])
    for k, (label, curve) in enumerate(zip(labels, curves, strict=True)):
        left, top = tiles.top_left(k)
        axes.text(left, top - 0.03, label, fontsize=SMALL, va="bottom")
        scale, bottom = colour_scale(curve, signed=False), top + tiles.height
        span = scale.high - scale.low
        if scale.low <= 0 <= scale.high:
            zero = bottom + scale.low / span * tiles.height
            axes.plot([left, left + tiles.width], [zero, zero], color=GREY, linewidth=0.4)
        steps = np.linspace(0, 1, len(curve)) if len(curve) > 1 else np.array([0.5])
        heights = (curve.where(curve.isfinite(), math.nan).numpy() - scale.low) / span
        y = bottom - heights * tiles.height
        dot = "." if len(curve) < 3 else ""
        axes.plot(left + steps * tiles.width, y, color=BLUE, linewidth=0.8, marker=dot)
    axes.text(0, height + 0.02, f"{arranged.space}: 0 to {length - 1}, left to right; each curve on"
              " its own scale, the grey line is zero", fontsize=SMALL, va="top",
              clip_on=False)  # fmt: skip
    return sheet.figure


def _draw_bars(vector: Tensor, chosen: list[int], title: str, lines: list[str]) -> Figure:
    """Draw a vector as one bar a channel."""
    numbers = vector[chosen].numpy()
    sheet = Sheet(_WIDTH, 3.0, title, lines)
    axes = sheet.add_axes(0.6, 0.05, _WIDTH - 0.6, 2.4)
    axes.bar(range(len(chosen)), np.where(np.isfinite(numbers), numbers, 0.0), color=BLUE)
    for k in np.flatnonzero(~np.isfinite(numbers)):
        axes.text(k, 0, str(numbers[k]), fontsize=SMALL, rotation=90, ha="center", va="bottom")
    axes.axhline(0, color=GREY, linewidth=0.6)
    step = max(1, math.ceil(len(chosen) / 32))
    label_ticks(axes.xaxis, list(map(str, chosen)), step)
    axes.tick_params(labelsize=SMALL)
    axes.set_xlim(-0.8, len(chosen) - 0.2)
    axes.set_xlabel("channel", fontsize=TEXT, **PLAIN)
    axes.set_ylabel("value", fontsize=TEXT, **PLAIN)
    show_spines(axes)
    return sheet.figure
