"""Draw the pattern of an attention: which query attends to which key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from hookline.display.text import share_text
from hookline.engine import Site
from hookline.engine.pytree import describe
from hookline.errors import InputError
from hookline.recordings.figure_values import (
    LabelledTensor,
    Source,
    check_sample_index,
    look_up_main_tensor,
)
from hookline.views.pixels import Scale, colour_scale, range_text, shrink
from hookline.views.plots.arrange_value import drawable_tensor, pick_channels, select_sample
from hookline.views.plots.channels import Tiling
from hookline.views.plots.figure_sheet import (
    PLAIN,
    SMALL,
    TEXT,
    Sheet,
    draw_map,
    label_ticks,
    show_spines,
    widest_text_inches,
)
from hookline.views.plots.token_labels import check_texts, printable_tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 8.8
_MOST = 256  # rows or columns of a map
_LEAST, _GREATEST = 1.3, 5.5  # inches of a map's side
_A_TOKEN = 0.125  # inches
_GAP, _LABEL = 0.12, 0.17


def attention(
    recording: Source,
    site: str | Site,
    *,
    texts: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    heads: Iterable[int] | None = None,
    sample: int = 0,
) -> Figure:
    """Draw the pattern of an attention as a map for each head: a row a query, a column a key.

        >>> class Attention(nn.Module):
        ...     def forward(self, q):
        ...         return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> model = Attention()
        >>> with hl.record(model, "@pattern") as run:
        ...     _ = model(torch.randn(1, 2, 3, 4))
        >>> figure = hl.plots.attention(run, "@pattern", texts=["the", "cat", "sat"])

    All heads share one scale of colours, from 0 to the greatest weight. Scores are drawn, too. A
    masked key, whose score is -inf, is drawn as the least score. Maps of more than 256 queries or
    keys are averaged down by area.

    Args:
        recording: a recording, or one of its passes: `run.passes[1]`.
        site: the site, as in a look-up: `"h.3.attn@pattern"`. Its value has the shape [batch, head,
            query, key], or [head, query, key].
        texts: the labels of the tokens. If there are fewer queries than keys, as with a key-value
            cache, the queries are the last tokens.
        keys: the labels of the keys, where these are other tokens than the queries, as in an
            attention to an encoder. None takes those of `texts`.
        heads: the indices of the heads to draw; None draws all.
        sample: the index of the sample in the batch.

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        InputError: the value has no maps of queries and keys, a head does not exist, or texts and
            tokens differ in number.
        HooklineError: matplotlib is not installed.
    """
    value = look_up_main_tensor(recording, site)
    maps, which = _attention_maps(value, sample)
    chosen = pick_channels(maps, "index" if heads is None else heads, None, value.label)
    n_heads, n_queries, n_keys = maps.shape
    labels = _token_labels(value, (n_queries, n_keys), texts, keys)
    whole_maps, masked = _replace_masked(maps[chosen])
    drawn = shrink(whole_maps, _MOST)
    lines = [
        f"{value.form}{which}",
        f"{share_text(len(chosen), n_heads, 'head')}, {n_queries} queries, {n_keys} keys;"
        f" {range_text(whole_maps)}{masked}",
    ]
    if drawn.shape[1:] != maps.shape[1:]:
        size = " x ".join(str(side) for side in drawn.shape[1:])
        lines.append(f"drawn as {size}: each cell the mean of an area")
    left = max(widest_text_inches(labels.queries or []), 0.25) + 0.2
    tiles = _tiling_for_labels(
        len(chosen), (n_queries, n_keys), _WIDTH - left, is_named=any(labels)
    )
    width = left + tiles.width_of_all
    height = tiles.height_of(len(chosen)) + max(widest_text_inches(labels.keys or []), 0.15) + 0.2
    sheet = Sheet(max(width, 4.6), height + 0.55, value.title, lines)
    whole = colour_scale(drawn)
    scale = whole if whole.is_signed else Scale(0.0, whole.high, is_signed=False)
    for k, (number, numbers) in enumerate(zip(chosen, drawn, strict=True)):
        x, y = tiles.top_left(k)
        axes = sheet.add_axes(left + x, y, tiles.width, tiles.height)
        axes.set(xlim=(-0.5, n_keys - 0.5), ylim=(n_queries - 0.5, -0.5))
        draw_map(axes, numbers.numpy(), scale, (-0.5, -0.5, n_keys, n_queries), smooth=False)
        axes.set_title(f"head {number}", fontsize=SMALL, loc="left", pad=2, **PLAIN)
        is_outer = k % tiles.columns == 0, k + tiles.columns >= len(chosen)
        _label_axes(axes, tiles, labels, is_outer)
    has_bad = not bool(drawn.isfinite().all())
    label = "weight" if value.label.endswith("@pattern") else "value"
    sheet.draw_colour_bar((0.2, height + 0.25), scale, label, has_bad=has_bad)
    return sheet.figure


def _attention_maps(value: LabelledTensor, sample: int) -> tuple[Tensor, str]:
    """Return the maps of one sample, [head, query, key], and which sample it is as text."""
    check_sample_index(sample)
    tensor = drawable_tensor(value)
    if tensor.dim() not in (3, 4) or tensor.is_complex():
        raise InputError(
            f"{value.label} must have the shape [batch, head, query, key], got"
            f" {describe.shape(tensor)}.\nRecord an attention pattern, such as"
            " 'h.3.attn@pattern', or use hl.plots.channels for other maps."
        )
    which = ""
    if tensor.dim() == 4:
        tensor, which = select_sample(tensor, 0, sample, value.label)
    return tensor.cpu().float(), which


def _replace_masked(maps: Tensor) -> tuple[Tensor, str]:
    """Return maps of scores with the least score in place of -inf, and a remark on it."""
    masked = maps == -math.inf
    rest = maps[maps.isfinite()]
    if not masked.any() or not rest.numel():
        return maps, ""
    return maps.masked_fill(masked, rest.min()), f"; {int(masked.sum()):,} masked"


class _TokenLabels(NamedTuple):
    """The labels of queries and keys; None for indices."""

    queries: list[str] | None
    keys: list[str] | None


def _token_labels(
    value: LabelledTensor,
    shape: tuple[int, int],
    texts: Sequence[str] | None,
    keys: Sequence[str] | None,
) -> _TokenLabels:
    n_queries, n_keys = shape
    if keys is None and texts is not None and len(texts) == n_keys:
        keys, texts = texts, texts[n_keys - n_queries :] if n_queries <= n_keys else texts
    check_texts("texts", texts, n_queries if keys is not None else n_keys, value.label)
    check_texts("keys", keys, n_keys, value.label)
    return _TokenLabels(printable_tokens(texts), printable_tokens(keys))


def _tiling_for_labels(
    n_maps: int, shape: tuple[int, int], across: float, *, is_named: bool
) -> Tiling:
    """Lay out so many maps, as large as their labels and the width of a figure ask for."""
    least = _LEAST if n_maps > 1 else 3.0
    a_token = max(_A_TOKEN if is_named else 0.0, least / max(shape))
    height, width = (min(max(size * a_token, 0.3), _GREATEST) for size in shape)
    columns = max(1, min(n_maps, int((across + _GAP) / (width + _GAP))))
    columns = math.ceil(n_maps / math.ceil(n_maps / columns))  # rows of one length
    return Tiling(columns, width, height, _LABEL, _GAP)


def _label_axes(
    axes: Axes, tiles: Tiling, labels: _TokenLabels, is_outer: tuple[bool, bool]
) -> None:
    """Label the queries left of the first map of a row, and the keys below the last of a column.

    Args:
        is_outer: whether the map is the first of its row, and the last of its column.
    """
    axes.tick_params(labelsize=SMALL, length=2)
    both, sides = (axes.yaxis, axes.xaxis), (tiles.height, tiles.width)
    for axis, name, texts, inches, is_labelled in zip(
        both, ("query", "key"), labels, sides, is_outer, strict=True
    ):
        if not is_labelled:
            axis.set_ticks([])
        elif texts is None:
            axis.get_major_locator().set_params(integer=True, nbins=4)
            axis.set_label_text(name, fontsize=TEXT, **PLAIN)
        else:
            step = max(1, math.ceil(len(texts) * _A_TOKEN * 0.9 / inches))
            label_ticks(axis, texts, step, turned=axis is axes.xaxis)
    show_spines(axes, ())
