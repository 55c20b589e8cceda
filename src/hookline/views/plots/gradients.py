"""Draw the norms of gradients from site to site."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hookline.display.text import plural
from hookline.errors import InputError
from hookline.recordings import GradientRow, Recording
from hookline.recordings.figure_values import check_plot_source, iterate_source_values
from hookline.views.plots.figure_sheet import BLUE, GREY, ORANGE, PLAIN, PURPLE, SMALL
from hookline.views.plots.site_rows import SiteRowSheet, block_indices, set_log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colour and the marker of each state; each alone tells the states apart.
_STATES = {"": (BLUE, "o"), "dead": (PURPLE, "X"), "exploding": (ORANGE, "^")}
_Lines = list[tuple[list[int], float]]  # the rows of each line, and its width
_MOST_WORDS = 96  # with more rows, the words would overlap


def gradients(recording: Recording) -> Figure:
    """Draw the gradients of a recording: the norm at each site, and the share of zeros.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> with hl.record(model, ports="grad") as run:
        ...     model(torch.ones(4, 2)).sum().backward()
        >>> figure = hl.plots.gradients(run)

    The numbers are those of `run.gradients()`, means over passes. For parameters, the figure also
    has the ratio of the gradient's norm to the parameter's norm. Dead and exploding sites are
    marked. Norms and ratios are on logarithmic axes. Numbers that are zero or not finite are at the
    edge of the axis.

    Args:
        recording: a recording with gradients: ports "grad", "grad_output" or "grad_input".

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError: no gradient port was recorded.
        InputError: the argument is not a recording, is a single pass of one, or holds several
            ranks.
        HooklineError: matplotlib is not installed.
    """
    check_plot_source(recording)
    if not isinstance(recording, Recording):
        raise InputError(
            "the recording must be whole, got one of its passes."
            "\nGive the recording: the figure shows means over its passes."
        )
    sites, order = _rows_and_their_order(recording)
    lines = _line_by_port(sites, recording.modules)
    has_ratio = any(row.ratio is not None for row in sites)
    headings = ["L2 norm", *["gradient / weight, of norms"] * has_ratio, "zeros, %"]
    rows = SiteRowSheet(
        "Gradient flow",
        [
            f"{plural(len(sites), 'site')} in {order} order, the first at the top"
            + _gradients_per_mean_text([row.count for row in sites if row.count]),
            _abnormal_sites_text(sites) or "none is dead or exploding",
        ],
        [row.site for row in sites],
        headings,
        column_width=2.6,
    )
    _draw_on_log_axis(
        rows.axes[0], sites, [row.norm if row.count else None for row in sites], lines
    )
    if has_ratio:
        _draw_on_log_axis(rows.axes[1], sites, [row.ratio for row in sites], lines)
    _draw_zeros(rows.axes[-1], sites, lines)
    return rows.figure


def _rows_and_their_order(recording: Recording) -> tuple[tuple[GradientRow, ...], str]:
    """Return the rows as their modules fired, if that is known; else as they are registered."""
    rows = recording.gradients().rows
    turns: dict[str, int] = {}
    for place, value in enumerate(iterate_source_values(recording)):
        if value.site.port in ("output", "grad_output"):
            # Gradients come in the reverse order; those of outputs that were recorded, later.
            turn = place if value.site.port == "output" else -place
            turns.setdefault(value.site.path, turn)
    paths = [_module_path(row) for row in rows]
    if not any(path in turns for path in paths):
        return rows, "registration"
    # What never fired comes last.
    ordered = sorted(range(len(rows)), key=lambda k: (turns.get(paths[k], math.inf), k))
    return tuple(rows[k] for k in ordered), "firing"


def _module_path(row: GradientRow) -> str:
    """Return the path of a row's module; of a parameter, of the module that holds it."""
    path = row.site.rpartition(":")[0]
    path = path.rpartition(".")[0] if _port(row) == "grad" else path
    return "" if path == "(root)" else path


def _abnormal_sites_text(rows: tuple[GradientRow, ...]) -> str:
    """Count the sites that are not as they should be."""
    counts = Counter(row.state for row in rows)
    words = {"exploding": "exploding (▲)", "dead": "dead (✕)", "none": "without a gradient"}
    return "; ".join(
        f"{plural(counts[state], 'site')} {text}" for state, text in words.items() if counts[state]
    )


def _draw_zeros(zeros: Axes, rows: tuple[GradientRow, ...], lines: _Lines) -> None:
    """Draw the share of zeros of each site."""
    share = np.array(
        [row.zeros * 100 if row.count and row.state != "none" else math.nan for row in rows]
    )
    _draw_lines(zeros, share, lines)
    for state in {row.state for row in rows}:
        some = [y for y, row in enumerate(rows) if row.state == state]
        _draw_markers(zeros, share[some], some, state)
    zeros.set_xlim(-4, 104)


def _gradients_per_mean_text(counts: list[int]) -> str:
    """Say how many gradients each number is a mean of."""
    if max(counts, default=0) <= 1:
        return "; one gradient each" if counts else ""
    up_to = "up to " if min(counts) < max(counts) else ""
    return f"; means over {up_to}{plural(max(counts), 'gradient')} each"


def _port(row: GradientRow) -> str:
    """Return a row's port: `grad`, `grad_output` or `grad_input`."""
    return re.split(r"[.\[#]", row.site.rpartition(":")[2])[0]


def _line_by_port(rows: tuple[GradientRow, ...], types: Mapping[str, str]) -> _Lines:
    """Return a line from site to site for each port; through repeated blocks if it can."""
    lines = []
    for port in dict.fromkeys(_port(row) for row in rows):
        of_port = [y for y, row in enumerate(rows) if _port(row) == port]
        paths = [rows[y].site.rpartition(":")[0] for y in of_port]
        trunk = block_indices(paths, [types.get(path, "") for path in paths])
        lines.append(([of_port[place] for place in trunk] or of_port, 1.2 if trunk else 0.6))
    return lines


def _draw_lines(axes: Axes, x: npt.NDArray[np.float64], lines: _Lines) -> None:
    for line, width in lines:
        axes.plot(x[line], line, color=GREY, linewidth=width, zorder=1)


def _draw_markers(axes: Axes, x: Any, y: list[int], state: str, **options: Any) -> None:
    """Draw markers of one kind in one call, which costs milliseconds: sites may be thousands."""
    colour, marker = _STATES.get(state, (GREY, "o"))
    size = 3 if marker == "o" and not options else 6
    axes.plot(x, y, color=colour, marker=marker, linestyle="", zorder=2, markersize=size, **options)


def _draw_on_log_axis(
    axes: Axes, rows: tuple[GradientRow, ...], numbers: list[float | None], lines: _Lines
) -> None:
    """Draw a marker for each number on a logarithmic axis; words at the edge for the others."""
    sound = [n for n in numbers if n is not None and 0 < n < math.inf]
    low, high = (min(sound), max(sound)) if sound else (1e-3, 1.0)
    if high < 50 * low:  # room for a few ticks
        low, high = low / 5, high * 5
    span = math.log10(high / low)
    set_log_axis(axes, low * 10 ** (-0.06 * span), high * 10 ** (0.06 * span), 5)
    x = np.array([math.nan if n is None or not 0 < n < math.inf else n for n in numbers])
    edge = axes.get_yaxis_transform()  # x in fractions of the axes, y in rows
    _draw_lines(axes, x, lines)
    for (state, place), some in _group_markers(rows, numbers).items():
        if place is None:
            _draw_markers(axes, x[some], some, state)
        else:
            _draw_markers(axes, [place] * len(some), some, state, transform=edge)
    if len(rows) <= _MOST_WORDS:
        _write_at_edge(axes, rows, numbers, [y for y in range(len(rows)) if math.isnan(x[y])])


def _group_markers(
    rows: tuple[GradientRow, ...], numbers: list[float | None]
) -> dict[tuple[str, float | None], list[int]]:
    """Group rows with a number by state and by position at the edge (None on the axis)."""
    kinds: dict[tuple[str, float | None], list[int]] = {}
    for y, (row, number) in enumerate(zip(rows, numbers, strict=True)):
        if number is not None:
            place = None if 0 < number < math.inf else 0.02 if number == 0 else 0.98
            kinds.setdefault((row.state, place), []).append(y)
    return kinds


def _write_at_edge(
    axes: Axes, rows: tuple[GradientRow, ...], numbers: list[float | None], chosen: list[int]
) -> None:
    """Write words at the edge for numbers that a logarithmic axis cannot show."""
    edge = axes.get_yaxis_transform()
    for y in chosen:
        row, number = rows[y], numbers[y]
        left, at_end, words = 0.02, False, ""
        if number is not None:
            at_end = number != 0  # infinite or NaN
            words = f"{number:g}" if at_end else "0" + f", {row.state}" * bool(row.state)
            left = 0.95 if at_end else 0.05
        elif not row.count:
            words = "no gradient" if row.state == "none" else "none flowed: dead"
        colour, _ = _STATES.get(row.state, (GREY, "o"))
        axes.text(left, y, words, color=colour, transform=edge, fontsize=SMALL, va="center",
                  ha="right" if at_end else "left", **PLAIN)  # fmt: skip
