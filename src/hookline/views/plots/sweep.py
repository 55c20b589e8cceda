"""Draw the effects of a sweep, or their estimates, as a heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hookline.display.text import plural, shorten
from hookline.display.units import measure
from hookline.errors import InputError
from hookline.verbs.sweep.estimate_verdicts import Array
from hookline.verbs.sweep.sweep_results import Effects
from hookline.views.pixels import colour_scale
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CELL = 0.22  # inches, less where there are many
_WIDEST, _HIGHEST = 9.0, 9.0
_LONGEST = 32


def sweep(
    effects: Effects,
    *,
    axes: tuple[str, str] | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
    normalised: bool = False,
) -> Figure:
    """Draw a heat map of effects: of `hl.sweep`, or of the estimates of `hl.attribute`.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
        >>> effects = hl.sweep(model, torch.zeros(1, 2), ["0", "1"], lambda out: out[0, 0],
        ...                    clean=torch.ones(1, 2), each={"unit": 1})
        >>> figure = hl.plots.sweep(effects)

    Red cells raise the metric, and blue ones lower it; all share one scale. Cells without a change
    are empty. A dot marks a change that put in the value that was there.

    Args:
        effects: the result of `hl.sweep` or `hl.attribute`.
        axes: the axes of the rows and of the columns. None takes the first two with more than one
            label. Of each further axis, the effect of the largest size is drawn.
        texts: other labels for an axis, such as the tokens: `{"position": ["the", "cat", "sat"]}`.
        normalised: True draws effects as shares of the difference between the clean run and the
            baseline.

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        InputError: there is no such axis; texts and labels differ in number; or there was no clean
            run to normalise by.
        HooklineError: matplotlib is not installed.
    """
    if not isinstance(effects, Effects):
        raise InputError(
            f"effects must come from hl.sweep or hl.attribute, got {type(effects).__name__}."
            "\nGive what one of them returned."
        )
    names = _chosen_axes(effects, axes)
    numbers = effects.normalised if normalised else effects.effects
    table = _table_of_largest(effects, numbers, names)
    labels = [
        [shorten(text, _LONGEST) for text in axis_texts(effects, name, texts or {})]
        for name in names
    ]
    height = min(max(len(table) * _CELL, 0.5), _HIGHEST)
    width = min(max(table.shape[1] * _CELL, 3.2), _WIDEST)
    left = widest_text_inches(labels[0]) + 0.45
    below = widest_text_inches(labels[1]) + 0.45
    sheet = Sheet(
        width + left, height + below + 0.4, _title(effects), _header_notes(effects, names)
    )
    figure_axes = sheet.add_axes(left, 0.05, width, height)
    scale = colour_scale(torch.from_numpy(table), signed=True)
    draw_cells(figure_axes, table, scale, has_gaps=True)
    _mark_unchanged_cells(figure_axes, effects, names)
    _label_axes(figure_axes, names, labels, (height, width))
    word = "of clean" if normalised else "effect"
    sheet.draw_colour_bar((left, height + below), scale, word)
    return sheet.figure


def _chosen_axes(effects: Effects, axes: tuple[str, str] | None) -> tuple[str, str]:
    """Return the names of the axes of the rows and the columns; the second may be empty."""
    if axes is not None:
        given = tuple(axes)
        if len(given) != 2 or len({*given}) != 2 or not {*given} <= {*effects.axes}:
            raise InputError(
                f"axes must be two of {', '.join(map(repr, effects.axes))}, got {axes!r}."
                "\nLeave axes= out to draw the first two."
            )
        return given[0], given[1]
    long = [name for name in effects.axes if len(effects.labels[name]) > 1]
    names = (*long, *(name for name in effects.axes if name not in long), "")
    return names[0], names[1]


def _table_of_largest(effects: Effects, numbers: Array, names: tuple[str, str]) -> Array:
    """Return the table of two axes, with the number of the largest size along the others."""
    order = [effects.axes.index(name) for name in names if name]
    rest = [axis for axis in range(numbers.ndim) if axis not in order]
    table = np.transpose(numbers, [*order, *rest])
    table = table.reshape(*table.shape[:2], -1) if names[1] else table.reshape(len(table), 1, -1)
    sizes = np.nan_to_num(np.abs(table), nan=-1.0)
    largest: Array = np.take_along_axis(table, sizes.argmax(-1)[..., None], -1)[..., 0]
    return largest


def axis_texts(effects: Effects, name: str, texts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the texts of an axis: those given for it, or else its labels.

    Raises:
        InputError: texts and labels differ in number.
    """
    labels = effects.labels.get(name, ("",))
    given = texts.get(name)
    if given is not None and len(given) != len(labels):
        raise InputError(
            f"texts must have one text for each label of {name!r}, got {plural(len(given), 'text')}"
            f" for {plural(len(labels), 'label')}.\nGive one for each, or leave texts= out."
        )
    return [str(label) for label in given or labels]


def _title(effects: Effects) -> str:
    return "Measured effects" if hasattr(effects, "values") else "Estimated effects"


def _header_notes(effects: Effects, names: tuple[str, str]) -> list[str]:
    clean = "" if effects.clean is None else f", clean {measure(effects.clean)}"
    further = [name for name in effects.axes if name not in names]
    return [
        f"metric {measure(effects.baseline)} without a change{clean}",
        f"largest effect over {', '.join(further)}" * bool(further),
    ]


def _mark_unchanged_cells(axes: Axes, effects: Effects, names: tuple[str, str]) -> None:
    """Put a dot on each cell whose changes all put in the value that was there."""
    unmoved = getattr(effects, "unmoved", None)
    if unmoved is None or not unmoved.any():
        return
    still = np.where(np.isnan(effects.effects), 1.0, unmoved.astype(float))
    moved = _table_of_largest(effects, 1.0 - still, names)
    rows, columns = np.nonzero(
        (moved == 0) & ~np.isnan(_table_of_largest(effects, effects.effects, names))
    )
    axes.plot(columns, rows, linestyle="", marker=".", markersize=2, color="#808080")


def _label_axes(
    axes: Axes, names: tuple[str, str], labels: list[list[str]], size: tuple[float, float]
) -> None:
    axes.tick_params(labelsize=SMALL, length=2)
    for axis, name, texts, inches in zip(
        (axes.yaxis, axes.xaxis), names, labels, size, strict=True
    ):
        step = max(1, math.ceil(len(texts) * 0.125 / inches))
        turned = axis is axes.xaxis and max(map(len, texts)) > 2
        label_ticks(axis, texts, step, turned=turned)
        if name:
            axis.set_label_text(name, fontsize=TEXT, **PLAIN)
    show_spines(axes, ())
