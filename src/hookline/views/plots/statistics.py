"""Draw statistics over the depth of one pass, or over passes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hookline.display.text import pick_evenly, plural, share_text, shorten
from hookline.engine import Site, normalize_root
from hookline.errors import InputError
from hookline.recordings import PassRecord
from hookline.recordings.figure_values import (
    LabelledTensor,
    SkippedValue,
    Source,
    check_plot_source,
    iterate_tensors,
    look_up_main_tensor,
    look_up_tensors,
    skipped_text,
    values_to_draw,
)
from hookline.statistics.value_statistics import Array, Statistics, main_tensor_statistics
from hookline.views.pixels import colour_scale
from hookline.views.plots.figure_sheet import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PLAIN,
    PURPLE,
    SMALL,
    TEXT,
    Sheet,
    draw_cells,
    label_ticks,
    show_spines,
    widest_text_inches,
)
from hookline.views.plots.site_rows import SiteRowSheet, block_indices, median_size, symlog_if_wide

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The heading of each statistic, with its unit.
HEADINGS = {
    "mean": "mean",
    "std": "standard deviation",
    "min": "least",
    "max": "greatest",
    "zeros": "zeros, %",
    "non_finite": "NaN or infinite, count",
}
Sites = str | Site | Sequence[str | Site] | None
MOST_LINES = 6
MOST_PASSES = 400

_STYLES = [
    (BLUE, "-", "o"), (ORANGE, "--", "s"), (GREEN, "-.", "^"), (PURPLE, ":", "D"),
    ("#56b4e9", "-", "v"), ("#e69f00", "--", "x"),
]  # fmt: skip


def statistics(
    recording: Source,
    sites: str | Site | Sequence[str | Site] | None = None,
    *,
    what: Sequence[str] = ("mean", "std", "min", "max", "zeros"),
) -> Figure:
    """Draw the statistics of each site: over the depth of a model, or over several passes.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(16, 8))
        >>> figure = hl.plots.statistics(run, what=("mean", "std"))

    One pass gives a row for each site, in firing order; a line joins the repeated blocks, such as
    the layers of a transformer. Several passes (the steps of a training)
    give a curve for each site, or with more than 6 sites a row of colours for each. If every value
    is a single number, as with `keep=lambda t: t.mean()`, the figure has this number instead of
    its statistics. NaN and infinity are left out; the figure says where they are.

    Args:
        recording: a recording, or one of its passes: `run.passes[1]`.
        sites: the sites to draw; None draws all that fired.
        what: some of "mean", "std", "min", "max", "zeros" (in percent) and "non_finite" (a count).

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up of the named sites.
        InputError: a statistic is unknown, or there is nothing to draw.
        HooklineError: matplotlib is not installed.
    """
    check_plot_source(recording)
    names = [what] if isinstance(what, str) else list(what)
    unknown = [name for name in names if name not in HEADINGS]
    if unknown or not names:
        raise InputError(
            f"what must be some of {', '.join(HEADINGS)}, got"
            f" {repr(unknown[0]) if unknown else 'none'}."
            "\nWrite what=('mean', 'std'), for instance."
        )
    if not isinstance(recording, PassRecord):
        passes = [record for record in recording.passes if len(record)]
        if len(passes) > 1:
            return _draw_over_passes(passes, sites, names)
    return _draw_over_depth(recording, sites, names)


def _number_or_nan(statistics: Statistics | None, name: str) -> float:
    """Return a statistic as a number to draw; NaN if there is none."""
    number = None if statistics is None else getattr(statistics, name)
    if number is None:
        return math.nan
    return number * 100 if name == "zeros" else float(number)


def _headings(names: list[str], measured: Iterable[Statistics | None]) -> dict[str, str]:
    """Return the heading of each statistic to draw.

    The mean, minimum and maximum of a single number are all that number, so it is drawn once.
    """
    if any(statistics is None or statistics.numel != 1 for statistics in measured):
        return {name: HEADINGS[name] for name in names}
    return {"mean": "value"} | {name: HEADINGS[name] for name in names if name == "non_finite"}


def _single_numbers_text(headings: dict[str, str]) -> str:
    return ", each value a single number" if headings.get("mean") == "value" else ""


def _draw_over_depth(source: Source, sites: Sites, names: list[str]) -> Figure:
    values, skipped = values_to_draw(source, sites)
    measured = [main_tensor_statistics(value.tensor) for value in values]
    headings = _headings(names, measured)
    order = "as they fired, the first at the top" if sites is None else "as they were named"
    bad = np.array([bool(statistics and statistics.non_finite) for statistics in measured])
    n_bad = int(bad.sum())
    trunk = block_indices(
        [value.label for value in values], [value.module_type for value in values]
    )
    rows = SiteRowSheet(
        "Statistics over depth",
        [
            f"{plural(len(values), 'value')}{_single_numbers_text(headings)}, {order}"
            + (f"; pass {source.number}" if isinstance(source, PassRecord) else ""),
            "the line is that of the repeated blocks" if trunk else "",
            f"{n_bad} with NaN or infinite elements, marked x; of these the finite ones are shown"
            if n_bad
            else "",
            skipped_text(skipped),
        ],
        [value.label for value in values],
        list(headings.values()),
        column_width=max(1.25, min(2.4, 7.0 / len(headings))),
    )
    for axes, name in zip(rows.axes, headings, strict=True):
        x = np.array([_number_or_nan(statistics, name) for statistics in measured])
        if name == "zeros":
            axes.set_xlim(-4, 104)
        else:
            symlog_if_wide(axes, x.tolist())  # first: a linear axis of huge numbers overflows
        _draw_statistic_by_row(axes, x, bad, trunk)
        if name != "zeros" and np.isfinite(x).any():
            axes.axvline(0, color=GREY, linewidth=0.6, zorder=0)
    return rows.figure


def _draw_statistic_by_row(axes: Axes, x: Array, bad: Array, trunk: list[int]) -> None:
    """Draw a number of each row: a line through the trunk, or through all without one."""
    y = np.arange(len(x))
    style: dict[str, Any] = {"linestyle": "", "alpha": 0.5} if trunk else {"linestyle": "-"}
    axes.plot(x, y, color=BLUE, linewidth=0.8, marker="o", markersize=2.6, **style)
    if trunk:
        axes.plot(x[trunk], y[trunk], color=BLUE, linewidth=1.4, marker="o", markersize=3.4)
    axes.plot(np.where(np.isnan(x), 0, x)[bad], y[bad], color=ORANGE, marker="x",
              markersize=6, linestyle="")  # fmt: skip


def _draw_over_passes(passes: list[PassRecord], sites: Sites, names: list[str]) -> Figure:
    drawn = pick_evenly(passes, MOST_PASSES)
    by_site, skipped, bad = _measure_sites(drawn, sites)
    labels = list(by_site)
    measured = itertools.chain.from_iterable(of_site.values() for of_site in by_site.values())
    headings = _headings(names, measured)
    tables = {name: np.full((len(labels), len(drawn)), np.nan) for name in headings}
    for row, of_site in enumerate(by_site.values()):
        for k, statistics in of_site.items():
            for name, table in tables.items():
                table[row, k] = _number_or_nan(statistics, name)
    lines = [
        share_text(len(drawn), len(passes), "pass", "passes")
        + (", evenly spaced" if len(drawn) < len(passes) else "")
        + f"; {plural(len(labels), 'site')}{_single_numbers_text(headings)}",
        f"NaN or infinite elements in pass {bad[0]} at {bad[1]} first: of these the finite ones"
        " are shown"
        if bad
        else "",
        skipped_text(skipped),
    ]
    draw = _draw_curves_over_passes if len(labels) <= MOST_LINES else _draw_heat_maps_over_passes
    return draw(tables, labels, [record.number for record in drawn], headings, lines)


def _measure_sites(
    passes: list[PassRecord], sites: Sites
) -> tuple[dict[str, dict[int, Statistics | None]], list[SkippedValue], tuple[int, str] | None]:
    """Measure each site that fired, by index of the pass; find the first NaN or infinity."""
    named = [sites] if isinstance(sites, str | Site) else sites
    keys = None if named is None else [normalize_root(str(site)) for site in named]
    by_site: dict[str, dict[int, Statistics | None]] = {}
    skipped: dict[str, SkippedValue] = {}
    bad: tuple[int, str] | None = None
    for k, record in enumerate(passes):
        for key, value in (
            iterate_tensors(record) if keys is None else _label_and_value_pairs(record, keys)
        ):
            if isinstance(value, SkippedValue):
                skipped.setdefault(key, value)
                continue
            measured = by_site.setdefault(key, {})[k] = main_tensor_statistics(value.tensor)
            if bad is None and measured is not None and measured.non_finite:
                bad = record.number, key
    for key in keys or ():
        if not any(key in record for record in passes):
            look_up_main_tensor(passes[0], key)  # raises the error that says why
    if not by_site:
        raise InputError(
            "the recording must hold a value that can be drawn, got none:"
            f" {skipped_text([*skipped.values()])}.\nRecord sites with tensors."
        )
    return by_site, list(skipped.values()), bad


def _label_and_value_pairs(
    record: PassRecord, keys: list[str]
) -> Iterator[tuple[str, LabelledTensor | SkippedValue]]:
    for key in keys:
        values = look_up_tensors(record, key) if key in record else []
        for value in values:
            yield (key if len(values) == 1 else value.label), value


def _draw_curves_over_passes(
    tables: dict[str, Array], labels: list[str], passes: list[int], headings: dict[str, str],
    lines: list[str],
) -> Figure:  # fmt: skip
    """Draw one curve a site, distinguished by colour, dash and marker."""
    wide, high = 6.0, 1.3
    right = widest_text_inches(labels) + 0.5
    sheet = Sheet(0.7 + wide + right, len(headings) * (high + 0.25) + 0.35,
                  "Statistics over passes", lines)  # fmt: skip
    for k, (name, heading) in enumerate(headings.items()):
        axes = sheet.add_axes(0.7, 0.05 + k * (high + 0.25), wide, high)
        for row, label in enumerate(labels):
            colour, dash, marker = _STYLES[row]
            axes.plot(passes, tables[name][row], color=colour, linestyle=dash, marker=marker,
                      linewidth=1, markersize=3, markevery=max(1, len(passes) // 12),
                      label=shorten(label, 52))  # fmt: skip
        axes.set_ylabel(heading, fontsize=TEXT, **PLAIN)
        if name == "zeros":
            axes.set_ylim(-4, 104)
        axes.tick_params(labelsize=SMALL, labelbottom=k == len(headings) - 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(color=GREY, alpha=0.2, linewidth=0.5)
        show_spines(axes)
        if not k:
            legend = axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.03), fontsize=SMALL,
                                 frameon=False, borderaxespad=0, handlelength=3)  # fmt: skip
            for text in legend.get_texts():
                text.set(**PLAIN)
    axes.set_xlabel("pass", fontsize=TEXT, **PLAIN)
    return sheet.figure


def _compress_asinh(table: Array) -> tuple[Array, float | None]:
    """Compress numbers of very different size as asinh(number / median size)."""
    sizes = np.abs(table[np.isfinite(table) & (table != 0)])
    usual = median_size(sizes) if sizes.size else 0.0
    if not usual or sizes.max() / 30 < usual:
        return table, None
    return np.arcsinh(table / usual), usual


def _draw_heat_maps_over_passes(
    tables: dict[str, Array], labels: list[str], passes: list[int], headings: dict[str, str],
    lines: list[str],
) -> Figure:  # fmt: skip
    """Draw one row of colours a site and one column a statistic."""
    width = max(1.5, min(2.6, 8.0 / len(headings)))
    title, names = "Statistics over passes", ["pass"] * len(headings)
    rows = SiteRowSheet(title, lines, labels, names, width, space=(0.18, 0.45))
    for k, (axes, name) in enumerate(zip(rows.axes, headings, strict=True)):
        table, usual = _compress_asinh(tables[name])
        scale = colour_scale(torch.from_numpy(table), robust=True)
        # A site that did not fire in a pass leaves a gap.
        draw_cells(axes, table, scale, has_gaps=True)
        heading = headings[name] + " (log)" * (usual is not None)
        axes.set_title(heading, fontsize=TEXT, loc="left", **PLAIN)
        step = max(1, math.ceil(len(passes) / 4))
        label_ticks(axes.xaxis, list(map(str, passes)), step)
        axes.grid(visible=False)
        left = rows.left + k * (width + 0.4) + 0.1
        ends = None
        if usual is not None:
            ends = (f"{np.sinh(scale.low) * usual:.3g}", f"{np.sinh(scale.high) * usual:.3g}")
        rows.sheet.draw_colour_bar((left, rows.height + 0.78), scale, "", ends, width=width * 0.75)
    return rows.figure
