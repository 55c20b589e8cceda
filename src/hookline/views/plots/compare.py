"""Draw two recordings side by side."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from hookline.display.text import plural, share_text
from hookline.display.units import measure
from hookline.engine import Site
from hookline.engine.pytree import describe
from hookline.errors import InputError, check_one_of
from hookline.recordings.figure_values import (
    LabelledTensor,
    Source,
    check_count,
    look_up_main_tensor,
    only_pass,
)
from hookline.statistics.difference import difference
from hookline.verbs.compare.compare import compare as compare_sites
from hookline.verbs.compare.comparison import ComparedSite, Comparison
from hookline.views.pixels import colour_scale, shrink, shrink_table
from hookline.views.plots.arrange_value import arrange, arrange_difference, drawable_tensor
from hookline.views.plots.channels import MAX_SIDE, Tiling, channel_labels, draw_grid, tiling
from hookline.views.plots.figure_sheet import (
    BLUE,
    GREY,
    ORANGE,
    PLAIN,
    SMALL,
    TEXT,
    Sheet,
    draw_map,
)
from hookline.views.plots.site_rows import SiteRowSheet, set_log_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 60
_PANEL = 3.3  # inches
_SPACE = 0.25


def compare(
    a: Source,
    b: Source,
    site: str | Site | None = None,
    *,
    n: int | None = None,
    order: str = "difference",
    sample: int = 0,
    layout: str | None = None,
) -> Figure:
    """Draw the differences between two recordings: of all sites, or of one site's channels.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> x = torch.rand(4, 8)
        >>> with hl.record(model, copy=True) as before:
        ...     _ = model(x)
        >>> with hl.edit(model, "1", hl.edits.scale(2.0)), hl.record(model, copy=True) as after:
        ...     _ = model(x)
        >>> figure = hl.plots.compare(after, before)

    Without a site, the figure has a row for each site that `hl.compare` pairs: its relative error,
    which is the L2 norm of the difference over that of the second value, and that of its worst row.
    What differs beyond noise is blue, and noise is grey. The largest differences are on top. The
    title names the first site in firing order that differs beyond noise.

    With a site, the figure has three parts: the channels in the first recording, those in the
    second, and their differences. The channels with the largest differences come first.

    Args:
        a: a recording, or one of its passes: `run.passes[1]`.
        b: the recording or pass to compare with.
        site: the site, as in a look-up; None compares all sites.
        n: the most sites or channels to draw; None draws up to 60 sites, or 16 channels.
        order: "difference" for the largest first; or "index" for the order of firing or of
            channels.
        sample: for one site, the index of the sample in the batch.
        layout: for one site, as in `channels`.

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        InputError: no site is in both; the shapes of the site differ; `order` or `n` is invalid;
            or without a site, a recording has several passes.
        HooklineError: matplotlib is not installed.
    """
    check_one_of("order", order, ("difference", "index"), "Write order='difference'.")
    if n is not None:
        check_count("n", n)
    if site is None:
        return _draw_differences_by_site(a, b, n or _MOST, order)
    return _draw_channel_differences(
        look_up_main_tensor(a, site, "a"),
        look_up_main_tensor(b, site, "b"),
        n or 16,
        order,
        (sample, layout),
    )


def _draw_differences_by_site(a: Source, b: Source, n: int, order: str) -> Figure:
    for source, name in ((a, "a"), (b, "b")):
        only_pass(source, name)
    comparison = compare_sites(a, b)
    rows = list(comparison.rows)
    if order == "difference":
        rows.sort(key=_relative_or_inf, reverse=True)
    drawn = rows[:n]
    sheet = SiteRowSheet(
        "Two recordings compared",
        _header_lines(comparison, len(drawn)),
        [row.site for row in drawn],
        ["relative L2 difference", "the same of the worst row"],
        column_width=2.8,
    )
    _draw_points(sheet.axes[0], drawn, [row.relative or 0.0 for row in drawn])
    _draw_points(sheet.axes[1], drawn, [row.worst_row or 0.0 for row in drawn])
    return sheet.figure


def _relative_or_inf(row: ComparedSite) -> float:
    return math.inf if row.relative is None else row.relative


def _header_lines(comparison: Comparison, n_drawn: int) -> list[str]:
    """Return the lines under the title: verdicts, the first difference, and other findings."""
    counts = comparison.counts
    text = (
        f"{counts['differs']} of {plural(len(comparison), 'site')} differ beyond noise,"
        f" {counts['noise']} by noise, {counts['identical']} equal to the last bit"
    )
    if n_drawn < len(comparison):
        text += f"; {share_text(n_drawn, len(comparison), 'site')} shown"
    said = [finding.text for finding in comparison.findings if finding.kind in ("names", "values")]
    first = [finding.text for finding in comparison.findings if finding.kind == "site"]
    return [text, *(line.partition("; ")[0] for line in first), "; ".join(said)]


def _draw_points(axes: Axes, rows: list[ComparedSite], numbers: list[float]) -> None:
    """Draw a point for each site on a logarithmic axis, or words for a missing number.

    Bars would be meaningless, because a logarithmic axis has no zero.
    """
    sound = [n for n in numbers if 0 < n < math.inf]
    low = 10.0 ** math.floor(math.log10(min(sound)) - 0.3) if sound else 1e-8
    high = 10.0 ** math.ceil(math.log10(max(sound)) + 0.1) if sound else 1.0
    set_log_axis(axes, low, high, 6)
    for verdict, colour in (("differs", BLUE), ("noise", GREY)):
        y = [k for k in _positive_finite(numbers) if rows[k].verdict == verdict]
        style = {"color": colour, "marker": "o", "markersize": 4, "linestyle": ""}
        if y:
            axes.plot([numbers[k] for k in y], y, **style)
    for k in set(range(len(rows))) - set(_positive_finite(numbers)):
        words = "equal" if rows[k].verdict == "identical" else _why_no_number(rows[k])
        colour = GREY if rows[k].verdict == "identical" else ORANGE
        axes.text(low, k, f" {words}", color=colour, fontsize=SMALL, va="center", **PLAIN)


def _positive_finite(numbers: list[float]) -> list[int]:
    return [k for k, number in enumerate(numbers) if 0 < number < math.inf]


def _why_no_number(row: ComparedSite) -> str:
    return row.why if row.relative is None else "no ratio: the second is zero"


def _draw_channel_differences(
    a: LabelledTensor, b: LabelledTensor, n: int, order: str, reading: tuple[int, str | None]
) -> Figure:
    drawable_tensor(a)
    drawable_tensor(b)
    if a.tensor.shape != b.tensor.shape:
        raise InputError(
            f"{a.label} must have one shape in both recordings, got {describe.shape(a.tensor)} and"
            f" {describe.shape(b.tensor)}."
            "\nCompare recordings of inputs of one shape."
        )
    sample, layout = reading
    first, second = arrange(a, layout, sample), arrange(b, layout, sample)
    gap = arrange_difference(a, b, layout, sample)
    apart = gap.nan_to_num(math.inf).flatten(1).abs().sum(1) if gap.dim() > 1 else gap.abs()
    ranked = apart.argsort(descending=True, stable=True).tolist()
    chosen = (ranked if order == "difference" else list(range(len(ranked))))[:n]
    measured = difference(a.tensor, b.tensor)
    words = measured.problem or (
        f"relative L2 difference {measure(measured.relative)}, of the worst row"
        f" {measure(measured.worst_row)}"
        if measured.differs
        else "equal to the last bit"
    )
    lines = [f"{a.form}, {first.text}", f"{words} (all samples)"]
    parts = first.data.double(), second.data.double(), gap
    if len(first.space) == 2:
        by = "; largest difference first" * (order == "difference")
        lines.append(f"{share_text(len(chosen), len(first.data), 'channel')}{by}")
        whole = [data[chosen] for data in parts]
        labels = [channel_labels(chosen, data) for data in whole]
        return _draw_three_panels(a, [shrink(data, MAX_SIDE) for data in whole], labels, lines)
    # A sequence is a table of tokens x features, a vector one row.
    tables = [
        shrink_table(data.T if first.space else data[None], (256, 256))[None] for data in parts
    ]
    return _draw_three_panels(a, tables, [], lines)


def _draw_three_panels(
    value: LabelledTensor, panels: list[torch.Tensor], labels: list[list[str]], lines: list[str]
) -> Figure:
    """Draw three panels of maps, shape `(n, height, width)`; the first two share a scale.

    Each map has a label; a table has none.
    """
    n, high, wide = panels[0].shape
    if labels:
        tiles = tiling(n, high / wide, _PANEL)
        height = tiles.height_of(n)
    else:
        height = min(max(high * 0.17, 0.5), 5.0)
        tiles = Tiling(1, _PANEL, height)
    sheet = Sheet(3 * _PANEL + 2 * _SPACE, height + 0.75, value.title, lines)
    both = colour_scale(torch.cat(panels[:2]))
    is_magnitude = value.tensor.is_complex()
    scales = [both, both, colour_scale(panels[2], signed=not is_magnitude)]
    gap = "first - second"
    heads = ["first", "second", f"|{gap}|" if is_magnitude else gap]
    for k, (maps, scale, head) in enumerate(zip(panels, scales, heads, strict=True)):
        left = k * (_PANEL + _SPACE)
        axes = sheet.add_canvas(left, 0.2, _PANEL, height)
        axes.set_title(head, fontsize=TEXT, fontweight="bold", loc="left", pad=3, **PLAIN)
        if labels:
            draw_grid(axes, maps, labels[k], tiles, scale, signed=True)
        else:
            box = (0.0, 0.0, tiles.width, tiles.height)
            draw_map(axes, maps[0].numpy(), scale, box, smooth=False)
            rows = "token down" if high > 1 else "one row"
            axes.text(0, height + 0.03, f"{rows}, feature across", fontsize=SMALL, va="top",
                      clip_on=False)  # fmt: skip
        if k != 1:
            label = "value in both" if not k else "difference"
            bad = not np.isfinite(maps.numpy()).all() or (not k and not panels[1].isfinite().all())
            place = (left + 0.1, height + 0.45)
            sheet.draw_colour_bar(place, scale, label, has_bad=bool(bad), width=1.6)
    return sheet.figure
