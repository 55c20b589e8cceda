"""Draw a sequence's features token by token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hookline.display.text import plural, share_text, shorten
from hookline.engine import Site
from hookline.errors import InputError
from hookline.recordings.figure_arguments import Source
from hookline.recordings.walk import look_up
from hookline.views.pixels import cells, range_text, scale_of
from hookline.views.plots.arranging import arrange, order_of
from hookline.views.plots.sheet import (
    PLAIN,
    SMALL,
    TEXT,
    Sheet,
    colour_map,
    text_width,
    tidy,
    within,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = (512, 800)  # fewer than the figure's pixels, so that no cell is lost
_WIDTH = 8.0
_LONGEST = 24


def tokens(
    recording: Source,
    site: str | Site,
    *,
    texts: Sequence[str] | None = None,
    n: int | None = None,
    order: str | Iterable[int] = "index",
    sample: int = 0,
    layout: str | None = None,
) -> Figure:
    """Draw a token x feature map: a row for each token, a column for each feature.

        >>> import hookline as hl
        >>> model = nn.Embedding(10, 32)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.tensor([[3, 1, 4]]))
        >>> figure = hl.plots.tokens(run, "(root)", texts=["the", "cat", "sat"])

    All cells share one scale of colours. With more than 1000 cells, the scale leaves out the
    outermost half percent at each end: in most transformers a few features are a hundred times
    larger than the others. The positions of maps (vision transformers) are also rows. More
    than 512 tokens or 800 features are averaged down by area.

    Args:
        recording: a recording, or one of its passes: `run.passes[1]`.
        site: the site, as in a look-up: `"h.3:output[0]"`.
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
    value = look_up(recording, site)
    arranged = arrange(value, layout, sample, usual="TC")
    if not arranged.space:
        raise InputError(
            f"{value.label} must have tokens, got a value {arranged.text}."
            "\nUse hl.plots.channels for vectors, or give layout='TC' if its rows are tokens."
        )
    chosen = order_of(arranged.data, order, n, value.label)
    table = arranged.data[chosen].flatten(1).T
    n_tokens, n_features = table.shape
    if texts is not None and len(texts) != n_tokens:
        raise InputError(
            f"texts must have one text for each of the {plural(n_tokens, 'token')} of"
            f" {value.label}, got {plural(len(texts), 'text')}.\nGive one for each, or texts=None."
        )
    share = share_text(len(chosen), len(arranged.data), "feature")
    by = f", largest {order} first" if isinstance(order, str) and order != "index" else ""
    lines = [
        f"{value.form}, {arranged.text}",
        f"{plural(n_tokens, 'token')}, {share}{by}; {range_text(table)}",
    ]
    drawn = cells(table, _MOST)
    if drawn.shape != table.shape:
        lines.append(f"drawn as {drawn.shape[0]} x {drawn.shape[1]}: each cell the mean of an area")
    # The scale is that of the drawn cells: means of areas are far smaller than single values.
    scale = scale_of(drawn, robust=True)
    labels = [_printable(text) for text in texts] if texts is not None else None
    left = (text_width(labels) if labels else 0.35) + 0.35
    height = min(max(n_tokens * 0.17, 1.0), 8.0)
    sheet = Sheet(_WIDTH + left, height + 0.85, value.title, lines)
    axes = sheet.axes(left, 0.05, _WIDTH, height)
    numbers, low, high = within(drawn.numpy(), scale)
    axes.imshow(
        np.where(np.isfinite(numbers), numbers, np.nan),
        cmap=colour_map(scale.is_signed),
        vmin=low,
        vmax=high,
        aspect="auto",
        extent=(-0.5, n_features - 0.5, n_tokens - 0.5, -0.5),
        interpolation="nearest",
    )
    _label(axes, arranged.space, labels, height, chosen)
    has_bad = not bool(drawn.isfinite().all())
    sheet.bar((left, height + 0.6), scale, "value", has_bad=has_bad)
    return sheet.figure


def _label(
    axes: Axes, space: str, labels: list[str] | None, height: float, chosen: list[int]
) -> None:
    axes.tick_params(labelsize=SMALL, length=2)
    if labels is not None:
        step = max(1, math.ceil(len(labels) * 0.125 / height))
        axes.set_yticks(range(0, len(labels), step), labels[::step], fontsize=SMALL, **PLAIN)
    else:
        place = "token" if len(space) == 1 else f"place ({' x '.join(space)}, row by row)"
        axes.set_ylabel(place, fontsize=TEXT, **PLAIN)
        axes.yaxis.get_major_locator().set_params(integer=True)
    n = len(chosen)
    is_whole = chosen == list(range(n))
    axes.set_xlabel("feature" if is_whole else "feature, in this order", fontsize=TEXT, **PLAIN)
    if is_whole:
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        step = max(1, math.ceil(n / 16))
        axes.set_xticks(range(0, n, step), [str(k) for k in chosen[::step]])
    tidy(axes, ())


def _printable(text: str) -> str:
    """Format a token: show outer spaces, escape newlines, shorten long texts."""
    text = text.replace(" ", "␣") if text != text.strip() else text
    return shorten(text, _LONGEST) or "''"
