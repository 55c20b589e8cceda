"""Draw a recording in a terminal: a histogram for each site, and small maps.

It needs only rich, not matplotlib. If the terminal has no colours, or the output is a file, maps
are drawn as shades of characters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from hookline.display.colours import BLUE_ORANGE, VIRIDIS, interpolate_colour
from hookline.display.results import Printout
from hookline.display.text import pick_evenly, plural
from hookline.display.text_table import Heading
from hookline.display.units import measure, share
from hookline.errors import InputError
from hookline.recordings import PassRecord, Recording
from hookline.recordings.figure_values import LabelledTensor, skipped_text, values_to_draw
from hookline.statistics.value_statistics import Array, histogram_and_statistics
from hookline.views.pixels import finite_range, scale_to_unit, shrink
from hookline.views.plots.arrange_value import arrange, drawable_tensor

_BARS = " ▁▂▃▄▅▆▇█"
_SHADES = " ░▒▓█"
# For outputs whose legacy encoding lacks the characters above.
_ASCII_BARS = " _.-:=+*#"
_ASCII_SHADES = " .:*#"
_BINS = 32
_LEAST_BARS = 8
# The columns of numbers, and when each is left out where there is no room.
_NUMBERS = {"least": 5, "greatest": 4, "mean": 2, "zeros": 1, "not finite": 0}
_SIDE = 24  # the longest side of a map, in cells
_MOST_MAPS = 3
_MOST_SITES = 200
_BAD = (213, 94, 0)


def terminal_plots(recording: Recording | PassRecord) -> RenderableType:
    """Draw a recording for a terminal: a histogram for each site, then the maps of three sites.

        >>> import hookline as hl
        >>> model = nn.Conv2d(1, 4, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(1, 1, 16, 16))
        >>> shown = terminal_plots(run)

    The height of a bar is the logarithm of a count. The axis goes from the smallest value to the
    largest. Maps are drawn for the first, the middle and the last site with maps. They are the
    first channels of the first sample, each on its own scale.

    Args:
        recording: a recording of one pass, or a pass.

    Returns:
        A renderable: print it with `rich.console.Console().print`.

    Raises:
        InputError: the recording has no value to draw, or several passes.
    """
    values, skipped = values_to_draw(recording, None)
    parts: list[RenderableType] = [_HistogramTable(values[:_MOST_SITES])]
    if len(values) > _MOST_SITES:
        parts.append(Text(f"… and {len(values) - _MOST_SITES} more sites"))
    if skipped:
        parts.append(Text(skipped_text(skipped), style="yellow"))
    with_maps = [value for value in values if _has_maps(value)]
    for value in pick_evenly(with_maps, _MOST_MAPS):
        parts += [Text(), _first_maps(value)]
    return Group(*parts)


def sparkline(counts: Array, bars: str = _BARS) -> str:
    """Format counts as one line of bars on a logarithmic scale.

    >>> sparkline(np.array([0, 1, 10, 1000]))
    ' ▁▃█'
    """
    heights = np.log1p(np.asarray(counts, float))
    top = heights.max() or 1.0
    return "".join(bars[math.ceil(h / top * (len(bars) - 1))] for h in heights)


@final
@dataclass(frozen=True, slots=True)
class _HistogramTable:
    """A histogram and numbers of each value, in characters that the output supports.

    In a narrow terminal, bars are fewer, and then columns are left out: no number is cut.
    """

    values: list[LabelledTensor]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        counts, rows = [], []
        for value in self.values:
            counted, _, numbers = histogram_and_statistics(value.tensor, _BINS)
            counts.append(counted)
            texts = *map(measure, (numbers.min, numbers.max, numbers.mean)), share(numbers.zeros)
            rows.append([*texts, f"{numbers.non_finite:,}" if numbers.non_finite else ""])
        columns = zip(_NUMBERS, zip(*rows, strict=True), strict=True)
        taken = [2 + max(map(len, (name, *texts))) for name, texts in columns if any(texts)]
        paths = [len(value.label) for value in self.values if len(value.label) <= width // 2]
        room = width - sum(taken) - max(paths, default=0) - 2
        bars = _ASCII_BARS if options.ascii_only else _BARS
        stride = math.ceil(_BINS / max(room, _LEAST_BARS))
        places = range(0, _BINS, stride)
        printout = Printout(
            headings=(
                Heading("site", "path"),
                Heading("log counts", gives_way=3),
                *(Heading(name, "number", order) for name, order in _NUMBERS.items()),
            ),
            rows=[
                [value.label, [(sparkline(np.add.reduceat(counted, places), bars), "cyan")],
                 *texts, [(bad, "bold red")] * bool(bad)]
                for value, counted, (*texts, bad) in zip(self.values, counts, rows, strict=True)
            ],
        )  # fmt: skip
        for line in printout.lines(width):
            yield Text.assemble(*line)


@final
@dataclass(frozen=True, slots=True)
class _MapsSideBySide:
    """Maps side by side, as many as fit. Each character shows two cells, one above the other."""

    title: str
    maps: Array  # of shape (n, height, width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        n, height, width = self.maps.shape
        fit = min(n, max(1, (options.max_width + 1) // (width + 1)))
        yield Text(f"{self.title}, the first {fit}", style="bold")
        # Under NO_COLOR rich would print the half blocks without colours, which show nothing.
        # Legacy encodings lack half blocks.
        shades = _ASCII_SHADES if options.ascii_only else _SHADES
        has_colours = not (console.color_system is None or console.no_color or options.ascii_only)
        signed = bool((self.maps < 0).any())
        positions = [_colour_positions(drawn, signed) for drawn in self.maps[:fit]]
        anchors = BLUE_ORANGE if signed else VIRIDIS
        for row in range(0, height, 2):
            for k, drawn in enumerate(positions):
                lower = drawn[row + 1] if row + 1 < height else drawn[row] * math.nan
                pairs = list(zip(drawn[row], lower, strict=True))
                if has_colours:
                    is_last = row + 1 >= height
                    yield from (
                        Segment("▀", _half_block_style(*pair, anchors, is_last)) for pair in pairs
                    )
                else:
                    yield Segment("".join(_shade_character(*pair, shades) for pair in pairs))
                yield Segment(" " if k < fit - 1 else "")
            yield Segment.line()


def _has_maps(value: LabelledTensor) -> bool:
    try:
        tensor = drawable_tensor(value)
    except InputError:
        return False
    return tensor.dim() == 4 and min(tensor.shape[2:]) >= 4


def _first_maps(value: LabelledTensor) -> _MapsSideBySide:
    arranged = arrange(value, None, 0)
    drawn = shrink(arranged.data[:16], _SIDE).numpy()
    form = "x".join(map(str, arranged.data.shape[1:]))
    return _MapsSideBySide(
        f"{value.label}: {plural(len(arranged.data), 'channel')} of {form}", drawn
    )


def _colour_positions(numbers: Array, signed: bool) -> Array:
    """Scale numbers to positions from 0 to 1 in a colour map; NaN stays NaN."""
    low, high = finite_range(numbers)
    if signed:
        high = max(abs(low), abs(high))
        low = -high
    return scale_to_unit(np.asarray(numbers, np.float64), low, high)


def _half_block_style(upper: float, lower: float, anchors: Any, is_last: bool) -> Style:
    """Return the style of a half block: the upper cell in front, the lower cell behind."""
    front = _BAD if math.isnan(upper) else interpolate_colour(upper, anchors)
    back = _BAD if math.isnan(lower) else interpolate_colour(lower, anchors)
    names = [f"rgb({rgb[0]},{rgb[1]},{rgb[2]})" for rgb in (front, back)]
    return Style(color=names[0], bgcolor=None if is_last else names[1])


def _shade_character(upper: float, lower: float, shades: str) -> str:
    if math.isnan(upper):
        return "?"
    mean = upper if math.isnan(lower) else (upper + lower) / 2
    return shades[min(int(mean * len(shades)), len(shades) - 1)]
