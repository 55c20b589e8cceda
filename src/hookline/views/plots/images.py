"""Draw the images of a batch, as the model gets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hookline.display.text import share_text
from hookline.engine import Site, normalize_root
from hookline.engine.pytree import describe
from hookline.errors import InputError, NotRecordedError
from hookline.recordings import Recording
from hookline.recordings.figure_values import (
    LabelledTensor,
    Source,
    check_count,
    look_up_main_tensor,
)
from hookline.statistics.value_statistics import Array
from hookline.views.pixels import finite_range, range_text, scale_to_unit, shrink
from hookline.views.plots.arrange_value import arrange, drawable_tensor
from hookline.views.plots.channels import tiling
from hookline.views.plots.figure_sheet import SMALL, Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE = 256


def images(
    recording: Source, site: str | Site = "(root):input", *, n: int = 16, layout: str | None = None
) -> Figure:
    """Draw the images of a batch: values of one channel (grey) or three (red, green, blue).

        >>> import hookline as hl
        >>> model = nn.Conv2d(3, 4, 3)
        >>> with hl.record(model, ports="input") as run:
        ...     _ = model(torch.rand(2, 3, 32, 32))
        >>> figure = hl.plots.images(run)

    Each image is scaled from its smallest value to its largest, with one scale for its channels,
    because models get normalised images. NaN and infinity are yellow.

    Args:
        recording: a recording, or one of its passes: `run.passes[1]`.
        site: a site whose values are images; by default the model's input.
        n: the most samples to draw.
        layout: "NCHW" or "NHWC"; by default NCHW if dimension 1 has 1 or 3 elements, else NHWC.

    Returns:
        The figure. A notebook shows it as the last line of a cell; `.savefig(path)` writes it.

    Raises:
        NotRecordedError, AmbiguousError, OverwrittenError: as in a look-up.
        InputError: the values are not images.
        HooklineError: matplotlib is not installed.
    """
    check_count("n", n)
    value = _look_up_images(recording, site)
    shape = list(drawable_tensor(value).shape)
    if layout is None and len(shape) == 4:
        layout = "NCHW" if shape[1] in (1, 3) else "NHWC"
    n_channels = shape[layout.index("C")] if layout and len(layout) == len(shape) == 4 else 0
    if n_channels not in (1, 3):
        raise InputError(
            f"{value.label} must be a batch of pictures, of 4 dimensions with 1 or 3 channels, got"
            f" shape {describe.shape(value.tensor)}.\nUse hl.plots.channels for maps of any number"
            " of channels."
        )
    n_samples = shape[layout.index("N")] if layout and "N" in layout else 1
    drawn = [arrange(value, layout, k).data for k in range(min(n, n_samples))]
    tiles = tiling(len(drawn), drawn[0].shape[1] / drawn[0].shape[2], 8.8)
    width, height = max(tiles.width_of_all, 4.6), tiles.height_of(len(drawn))
    lines = [
        f"{value.form}, read as {layout}; {share_text(len(drawn), n_samples, 'picture')}",
        f"each from its least value (black) to its greatest; {range_text(torch.stack(drawn))}",
    ]
    sheet = Sheet(width, height, value.title, lines)
    axes = sheet.add_canvas(0, 0, width, height)
    for k, image in enumerate(drawn):
        left, top = tiles.top_left(k)
        axes.text(left, top - 0.03, str(k), fontsize=SMALL, va="bottom")
        box = (left, left + tiles.width, top + tiles.height, top)
        axes.imshow(_to_rgb(image), extent=box, aspect="auto", interpolation="antialiased")
        axes.set(xlim=(0, width), ylim=(height, 0))
    return sheet.figure


def _look_up_images(recording: Source, site: str | Site) -> LabelledTensor:
    """Look up a site; if the model's input was not recorded, say how to record it."""
    try:
        return look_up_main_tensor(recording, site)
    except NotRecordedError as error:
        if isinstance(recording, Recording):
            sites = list(recording.sites)
        else:
            sites = [fired for fired, _ in recording.fired()]
        has_input = any((fired.path, fired.port) == ("", "input") for fired in sites)
        if has_input or normalize_root(str(site)) != str(Site("", "input")):
            raise
        raise NotRecordedError(
            'the model\'s input was not recorded.\nRecord it: hl.record(model, "(root)",'
            ' ports="input"); or name a site whose values are pictures.'
        ) from error


def _to_rgb(image: torch.Tensor) -> Array:
    """Convert an image of shape `(channels, height, width)` to RGB from 0 to 1."""
    maps = shrink(image, _SIDE).double().numpy()
    scaled = scale_to_unit(maps, *finite_range(maps))
    colours = np.broadcast_to(scaled, (3, *scaled.shape[1:])).transpose(1, 2, 0).copy()
    colours[np.isnan(scaled).any(0)] = (1.0, 0.83, 0.0)
    return colours
