"""Draw a sequence's features token by token."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from hookline.display.text import plural, share_text
from hookline.engine import Site
from hookline.errors import InputError
from hookline.recordings.figure_values import LabelledTensor, Source, look_up_main_tensor
from hookline.views.pixels import colour_scale, range_text, shrink_table
from hookline.views.plots.arrange_value import Arranged, arrange, pick_channels
from hookline.views.plots.figure_sheet import (
    PLAIN,
    SMALL,
    TEXT,
    Sheet,
    draw_cells,
    label_ticks,
    show_spines,
    widest_text_inches,
)
from hookline.views.plots.token_labels import check_texts, printable_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = (512, 800)  # fewer than the figure's pixels, so that no cell is lost
_WIDTH = 8.0
_SHORT = 3  # characters of a label that is not turned


def tokens(
    recording: Source,
    site: str | Site | Iterable[str | Site],
    *,
    texts: Sequence[str] | None = None,
    n: int | None = None,
    order: str | Iterable[int] = "index",
    sample: int = 0,
    layout: str | None = None,
) -> Figure:
    """Draw a token x feature map, or of several sites a token x layer map.

    A map has a row for each token. Of one site, it has a column for each feature. Of several, it
    has a column for each site, with the norm of the token's features there.

        >>> import hookline as hl
        >>> model = nn.Embedding(10, 32)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.tensor([[3, 1, 4]]))
        >>> figure = hl.plots.tokens(run, "(root)", texts=["the", "cat", "sat"])

    A site with one feature is drawn by that number itself: `keep=lambda t: ...` may record one.

    All cells share one scale of colours. With more than 1000 cells, the scale leaves out the
    outermost half percent at each end: in most transformers a few features are a hundred times
    larger than the others. The positions of maps (vision transformers) are also rows. More
    than 512 tokens or 800 features are averaged down by area.

    Args:
        recording: a recording, or one of its passes: `run.passes[1]`.
        site: the site, as in a look-up: `"h.3:output[0]"`; or several, such as a selection.
        texts: the labels of the rows, one for each token.
        n: the most features to draw; None draws all of them. It does not limit indices in `order`.
        order: "index"; or "mean", "std" or "max" for the largest first; or the features' indices.
        sample: the index of the sample in the batch.
        layout: one letter for each dimension, as in `channels`. The default is TC, NTC or NCHW by
            the number of dimensions, and NCL for Conv1d and similar modules. Swin's maps are
            "NHWC".

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        InputError: the value cannot be drawn this way, or texts and tokens differ in number.
        HooklineError: matplotlib is not installed.
    """
    if not isinstance(site, str | Site):
        if n is not None or order != "index":
            raise InputError(
                "n and order must be left out for several sites, whose columns are the sites."
                "\nGive one site to choose its features."
            )
        return _draw_layers(recording, [*site], texts, sample, layout)
    value, arranged = _look_up_tokens(recording, site, layout, sample)
    chosen = pick_channels(arranged.data, order, n, value.label)
    table = arranged.data[chosen].flatten(1).T
    n_tokens = len(table)
    check_texts("texts", texts, n_tokens, value.label)
    share = share_text(len(chosen), len(arranged.data), "feature")
    by = f", largest {order} first" if isinstance(order, str) and order != "index" else ""
    lines = [
        f"{value.form}, {arranged.text}",
        f"{plural(n_tokens, 'token')}, {share}{by}; {range_text(table)}",
    ]
    if chosen == list(range(len(chosen))):
        columns = _AxisLabels("feature", None)
    else:
        columns = _AxisLabels("feature, in this order", [str(k) for k in chosen], turned=False)
    labels = printable_tokens(texts)
    return _draw_table(
        table, value.title, lines, (_AxisLabels(_row_name(arranged), labels), columns)
    )


def _look_up_tokens(
    recording: Source, site: str | Site, layout: str | None, sample: int
) -> tuple[LabelledTensor, Arranged]:
    value = look_up_main_tensor(recording, site)
    arranged = arrange(value, layout, sample, default="TC")
    if not arranged.space:
        raise InputError(
            f"{value.label} must have tokens, got a value {arranged.text}."
            "\nUse hl.plots.channels for vectors, or give layout='TC' if its rows are tokens."
        )
    return value, arranged


def _row_name(arranged: Arranged) -> str:
    space = arranged.space
    return "token" if len(space) == 1 else f"place ({' x '.join(space)}, row by row)"


def _draw_layers(
    recording: Source,
    sites: list[str | Site],
    texts: Sequence[str] | None,
    sample: int,
    layout: str | None,
) -> Figure:
    """Draw a row for each token and a column for each site: the norm of the token's features."""
    if not sites:
        raise InputError("site must name at least one site, got none.\nGive one, or several.")
    values, columns = [], []
    for site in sites:
        value, arranged = _look_up_tokens(recording, site, layout, sample)
        features = arranged.data.flatten(1).double()
        columns.append(features[0] if len(features) == 1 else features.norm(dim=0))
        values.append(value)
        if len(columns[0]) != len(columns[-1]):
            raise InputError(
                f"the sites must have equally many tokens, got {len(columns[0])} at"
                f" {values[0].label} and {len(columns[-1])} at {value.label}.\nDraw each alone."
            )
    table = torch.stack(columns, 1)
    n_tokens = len(table)
    check_texts("texts", texts, n_tokens, values[0].label)
    name, labels = _short_names([value.label for value in values])
    lines = [
        f"{values[0].form}, {arranged.text}",
        f"{plural(n_tokens, 'token')}, {plural(len(values), 'site')}; {range_text(table)}",
    ]
    title = f"Norm of each token at {name or plural(len(values), 'site')}"
    rows = _AxisLabels(_row_name(arranged), printable_tokens(texts))
    return _draw_table(table, title, lines, (rows, _AxisLabels(name, labels)))


def _short_names(names: list[str]) -> tuple[str, list[str]]:
    """Return the names as numbers under a common name, `h.*`, if they differ in one number."""
    split = [re.split(r"(\d+)", name) for name in names]
    if len({len(parts) for parts in split}) == 1:
        differing = [k for k, parts in enumerate(zip(*split, strict=True)) if len(set(parts)) > 1]
        if len(differing) == 1 and differing[0] % 2:
            (k,) = differing
            return "".join([*split[0][:k], "*", *split[0][k + 1 :]]), [parts[k] for parts in split]
    return "", names


@final
@dataclass(frozen=True)
class _AxisLabels:
    """The labels of rows or columns; without texts their indices."""

    name: str
    texts: list[str] | None
    turned: bool = True  # whether long texts below a map are turned


def _draw_table(
    table: Tensor, title: str, lines: list[str], labels: tuple[_AxisLabels, _AxisLabels]
) -> Figure:
    """Draw a table of numbers as a map, with the labels of rows and columns."""
    drawn = shrink_table(table, _MOST)
    if drawn.shape != table.shape:
        lines.append(f"drawn as {drawn.shape[0]} x {drawn.shape[1]}: each cell the mean of an area")
    # The scale is that of the drawn cells: means of areas are far smaller than single values.
    scale = colour_scale(drawn, robust=True)
    rows, columns = labels
    n_rows, n_columns = table.shape
    left = (widest_text_inches(rows.texts) if rows.texts else 0.35) + 0.35
    height = min(max(n_rows * 0.17, 1.0), 8.0)
    is_turned = columns.turned and max(map(len, columns.texts or [""])) > _SHORT
    below = widest_text_inches(columns.texts or []) if is_turned else 0.0
    sheet = Sheet(_WIDTH + left, height + 0.85 + below, title, lines)
    axes = sheet.add_axes(left, 0.05, _WIDTH, height)
    draw_cells(axes, drawn.numpy(), scale, (n_rows, n_columns))
    _label_axes(axes, labels, height, is_turned=is_turned)
    has_bad = not bool(drawn.isfinite().all())
    sheet.draw_colour_bar((left, height + 0.6 + below), scale, "value", has_bad=has_bad)
    return sheet.figure


def _label_axes(
    axes: Axes, labels: tuple[_AxisLabels, _AxisLabels], height: float, *, is_turned: bool
) -> None:
    rows, columns = labels
    axes.tick_params(labelsize=SMALL, length=2)
    if rows.texts is not None:
        step = max(1, math.ceil(len(rows.texts) * 0.125 / height))
        label_ticks(axes.yaxis, rows.texts, step)
    else:
        axes.set_ylabel(rows.name, fontsize=TEXT, **PLAIN)
        axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(columns.name, fontsize=TEXT, **PLAIN)
    if columns.texts is None:
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        step = max(1, math.ceil(len(columns.texts) / (_WIDTH / 0.125 if is_turned else 16)))
        label_ticks(axes.xaxis, columns.texts, step, turned=is_turned)
    show_spines(axes, ())
