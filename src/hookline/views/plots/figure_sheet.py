"""The base of all figures: a sheet laid out in inches, its header, its colours.

Figures are made without pyplot. So no window, backend or setting of matplotlib is touched, and a
figure is freed with its last reference. Text and background have the colours of the user's style.
viridis and blue-orange suit colour-blind readers; viridis also suits black-and-white print.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, final

import numpy as np

from hookline.display.colours import BLUE_ORANGE
from hookline.display.text import escape_to_one_line
from hookline.errors import HooklineError
from hookline.statistics.value_statistics import Array
from hookline.util.optional_imports import how_to_install, require
from hookline.views.pixels import Scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_NEEDS = "plots need matplotlib", how_to_install("plots"), HooklineError

# A path may hold any character, also `$` and `_`, so text is never parsed as math.
PLAIN = {"parse_math": False, "usetex": False}

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"  # Okabe and Ito
GREY = "#808080"
TITLE, TEXT, SMALL, TINY = 11.0, 8.5, 7.0, 6.0  # points
DPI = 110

# NaN and infinity get a colour outside the map.
_BAD = {False: ORANGE, True: "#ffd500"}
_MARGIN, _LINE = 0.2, 0.165  # inches
_INCH_A_CHARACTER = {TITLE: 0.105, TEXT: 0.066, SMALL: 0.06, TINY: 0.05}


@cache
def colour_map(is_signed: bool) -> Any:
    """Return the colour map: viridis, or blue to orange centred at zero for signed numbers."""
    matplotlib = require("matplotlib", *_NEEDS)
    made = matplotlib.colormaps["viridis"]
    if is_signed:
        anchors = [tuple(level / 255 for level in rgb) for rgb in BLUE_ORANGE]
        colours = require("matplotlib.colors", *_NEEDS)
        made = colours.LinearSegmentedColormap.from_list("blue-orange", anchors)
    return made.with_extremes(bad=_BAD[is_signed])


def widest_text_inches(texts: Sequence[str], size: float = SMALL) -> float:
    """Estimate the width of the widest text, in inches."""
    return max((len(text) for text in texts), default=0) * _INCH_A_CHARACTER[size]


@final
class Sheet:
    """A figure under a header, laid out in inches from its top left corner.

    Args:
        title: the title: the site, or the kind of figure.
        lines: the lines below the title; empty ones are left out.
    """

    def __init__(self, width: float, height: float, title: str, lines: Sequence[str]) -> None:
        title, lines = escape_to_one_line(title), [escape_to_one_line(line) for line in lines]
        heading = textwrap.wrap(title, max(20, int(width / _INCH_A_CHARACTER[TITLE]))) or ["(root)"]
        most = max(30, int(width / _INCH_A_CHARACTER[TEXT]))
        below = [part for line in lines if line for part in textwrap.wrap(line, most)]
        head = 0.2 * len(heading) + _LINE * len(below) + 0.12
        self.width: float = width + 2 * _MARGIN
        self.height: float = height + head + 2 * _MARGIN
        self.figure: Figure = _figure_class()(figsize=(self.width, self.height), dpi=DPI)
        require("matplotlib.backends.backend_agg", *_NEEDS).FigureCanvasAgg(self.figure)
        self._top = _MARGIN + head
        self._add_text(_MARGIN, "\n".join(heading), fontsize=TITLE, fontweight="bold")
        if below:
            at = _MARGIN + 0.2 * len(heading) + 0.02
            self._add_text(at, "\n".join(below), fontsize=TEXT, alpha=0.75, linespacing=1.25)

    def add_axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes at a position below the header, in inches."""
        left, top = left + _MARGIN, top + self._top
        return self.figure.add_axes((
            left / self.width, 1 - (top + height) / self.height,
            width / self.width, height / self.height,
        ))  # fmt: skip

    def add_canvas(self, left: float, top: float, width: float, height: float) -> Axes:
        """Add axes without frame or ticks, whose units are inches from the top left corner."""
        axes = self.add_axes(left, top, width, height)
        axes.set_axis_off()
        axes.set_autoscale_on(False)
        axes.set(xlim=(0, width), ylim=(height, 0))
        return axes

    def draw_colour_bar(
        self, place: tuple[float, float], scale: Scale, label: str,
        ends: tuple[str, str] | None = None, *, has_bad: bool = False, width: float = 2.2,
    ) -> None:  # fmt: skip
        """Draw a horizontal colour bar with its label, and a patch for NaN if there is any.

        Args:
            ends: texts at the ends in place of numbers.
            has_bad: whether NaN or infinity was drawn.
        """
        left, top = place
        axes = self.add_axes(left, top, width, 0.1)
        ramp = np.linspace(0, 1, 256)[None]
        # The axis goes from 0 to 1: the numbers themselves could be too large or too close for it.
        axes.imshow(ramp, cmap=colour_map(scale.is_signed), aspect="auto", extent=(0, 1, 0, 1))
        low, high = ends or (f"{scale.low:.3g}", f"{scale.high:.3g}")
        if scale.cuts and not ends:
            low, high = f"≤ {low}", f"≥ {high}"
        places, texts = [0.0, 0.5, 1.0], [low, "0", high]
        if not scale.is_signed:
            texts[1] = f"{scale.low / 2 + scale.high / 2:.3g}"
            if ends:
                del places[1], texts[1]
        axes.set_yticks([])
        axes.set_xticks(places, texts, fontsize=SMALL, **PLAIN)
        axes.tick_params(length=2)
        show_spines(axes, ())
        axes.text(1.06, 0.5, label, transform=axes.transAxes, fontsize=SMALL, va="center", **PLAIN)
        if has_bad:
            patch = self.add_axes(
                left + width + 0.15 + widest_text_inches([label]) + 0.1, top, 0.14, 0.1
            )
            patch.set(xticks=[], yticks=[])
            patch.set_facecolor(_BAD[scale.is_signed])
            patch.text(1.4, 0.5, "NaN or infinite", transform=patch.transAxes, fontsize=SMALL,
                       va="center")  # fmt: skip

    def _add_text(self, top: float, text: str, **style: Any) -> None:
        at = (_MARGIN / self.width, 1 - top / self.height)
        self.figure.text(*at, text, va="top", ha="left", **style, **PLAIN)


def halve_on_overflow(numbers: Array, scale: Scale) -> tuple[Array, float, float]:
    """Return numbers and the ends of their scale, all halved if its range would overflow."""
    part = 0.5 if math.isinf(scale.high - scale.low) else 1.0
    return np.asarray(numbers, np.float64) * part, scale.low * part, scale.high * part


def draw_map(
    axes: Axes, numbers: Array, scale: Scale, box: tuple[float, ...], *, smooth: bool = True
) -> None:
    """Draw a map in a box (left, top, width, height) of a canvas; NaN and infinity stand out."""
    left, top, width, height = box
    numbers, low, high = halve_on_overflow(numbers, scale)
    # Not with imshow, which would reset the limits and the aspect of the axes for each map.
    image = require("matplotlib.image", *_NEEDS).AxesImage(
        axes,
        cmap=colour_map(scale.is_signed),
        norm=require("matplotlib.colors", *_NEEDS).Normalize(low, high),
        extent=(left, left + width, top + height, top),
        interpolation="antialiased" if smooth else "nearest",
        interpolation_stage="rgba",  # otherwise NaN would bleed into neighbouring numbers
    )
    image.set_data(np.ma.masked_invalid(numbers))
    axes.add_image(image)


def draw_cells(
    axes: Axes,
    numbers: Array,
    scale: Scale,
    shape: tuple[int, int] | None = None,
    *,
    has_gaps: bool = False,
) -> None:
    """Draw a table of numbers as cells; NaN and infinity stand out, or are gaps.

    Args:
        shape: the rows and columns that the axes count; None is the shape of the table.
        has_gaps: whether what is not finite is left empty.
    """
    colours = colour_map(scale.is_signed)
    numbers, low, high = halve_on_overflow(numbers, scale)
    n_rows, n_columns = shape or numbers.shape
    axes.imshow(
        np.where(np.isfinite(numbers), numbers, np.nan),
        cmap=colours.with_extremes(bad="none") if has_gaps else colours,
        vmin=low,
        vmax=high,
        aspect="auto",
        extent=(-0.5, n_columns - 0.5, n_rows - 0.5, -0.5),
        interpolation="nearest",
    )


def label_ticks(axis: Axis, texts: Sequence[str], step: int, *, turned: bool = False) -> None:
    """Name every so many places from 0 on along an axis."""
    turn = {"rotation": 90} if turned else {}
    axis.set_ticks(range(0, len(texts), step), texts[::step], fontsize=SMALL, **turn, **PLAIN)


def show_spines(axes: Axes, keep: Sequence[str] = ("left", "bottom")) -> None:
    """Show only some of the lines around the axes."""
    for side, spine in axes.spines.items():
        spine.set_visible(side in keep)
        spine.set_linewidth(0.6)


@cache
def _figure_class() -> Any:
    """Create a subclass of matplotlib's Figure that a notebook shows as a PNG."""

    class HooklineFigure(require("matplotlib.figure", *_NEEDS).Figure):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png", pil_kwargs={"compress_level": 3})
            return out.getvalue()

        def __reduce__(self) -> Any:
            make, arguments, *state = super().__reduce__()
            # The class is created on first use, so pickle cannot find it by name.
            return (_empty_figure, (), *state) if state else (make, arguments)

    return HooklineFigure


def _empty_figure() -> Any:
    return _figure_class().__new__(_figure_class())
