"""Lay maps over the images that a pass was given: norms of places, and class maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from hookline.display.text import escape_invisible
from hookline.errors import HooklineError
from hookline.recordings.feature_maps import Grid, Size, find_grid, gradcam
from hookline.statistics.value_statistics import main_tensor
from hookline.util.optional_imports import require
from hookline.views.page.quantised_maps import MapLimits, quantise
from hookline.views.page.token_norms import round_finite
from hookline.views.page.value_entries import EntryAt, ValueEntry, gradient_of, read_tensor
from hookline.views.page.what_to_draw import is_image_batch
from hookline.views.pixels import PAGE_NEEDS, png_data_url, shrink

_SIDE = 160  # the longest side of an image, in pixels
_MOST_TRIES = 32  # layers that are read, from the last back, for a class map


class Images(NamedTuple):
    """The images of a pass; without their pixels, the grid of patches that a layer made of them."""

    n_images: int
    size: Size
    pixels: Tensor | None  # shape `(images, 1 or 3, height, width)`; None if they are not recorded
    module_type: str = ""  # the class of the module whose values are read, if it is known

    def for_module(self, entry: ValueEntry) -> Images:
        """Return the images for the values of a module."""
        return self._replace(module_type=entry.site.module_type if entry.site.path else "")

    def grid_of(self, value: Tensor) -> Grid | None:
        """Find the way to read a value as maps of the images; None if it holds none.

        Tokens are patches only if these cover the images exactly: other sequences have lengths too.
        """
        grid = find_grid(
            value, self.n_images, self.size, is_named=False, module_type=self.module_type
        )
        if grid is None or (grid.form != "tokens" and self.pixels is not None):
            return grid
        height, width = self.size
        covers = height % grid.height == 0 and width % grid.width == 0
        is_whole = (grid.height, grid.width) == self.size
        is_exact = is_whole if self.pixels is None else covers
        return grid if is_exact and grid.form == "tokens" else None

    def image_url_and_size(self, sample: int) -> dict[str, Any]:
        """Return one image, and its height and width: maps of another aspect are stretched."""
        return {"image": self.data_url(sample), "size": self.size}

    def data_url(self, sample: int) -> str:
        """Return one image as a `data:` address, its numbers from black to white; "" if unknown."""
        if self.pixels is None or not 0 <= sample < len(self.pixels):
            return ""
        small = shrink(self.pixels[sample].detach().cpu().float(), _SIDE)
        small = small.nan_to_num(0.0, 0.0, 0.0)
        low, high = float(small.min()), float(small.max())
        shades = ((small - low) / ((high - low) or 1.0) * 255).round().to(torch.uint8)
        array = shades.expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
        return png_data_url(require("PIL.Image", *PAGE_NEEDS).fromarray(array))


def find_images(entries: Sequence[ValueEntry], pass_number: int) -> Images | None:
    """Return the images of a pass: the model's input, or the grid of its first layer with maps.

    Args:
        entries: the values in firing order, of which the input alone is read.
        pass_number: the number of the pass.
    """
    of_pass = (entry for entry in entries if entry.key.pass_number == pass_number)
    first = next((entry for entry in of_pass if entry.is_image), None)
    if first is None:
        return None
    try:
        if is_model_input(first):
            maps: Tensor | None = read_tensor(first)
        else:
            maps = main_tensor(first.recorded.outline(), with_meta=True)
    except HooklineError:
        return None
    if maps is None:
        return None
    pixels = maps if is_model_input(first) and is_image_batch(maps) else None
    return Images(len(maps), (maps.shape[2], maps.shape[3]), pixels)


def is_model_input(entry: ValueEntry) -> bool:
    """Tell whether a value is the model's input."""
    return entry.site.path == "" and entry.site.port == "input"


# -- maps -----------------------------------------------------------------------------------------


def norm_maps(
    values: Sequence[tuple[str, Tensor]], images: Images, sample: int, limits: MapLimits
) -> dict[str, Any] | None:
    """Return the norm over channels at each place of one sample; None without maps of the images.

    Args:
        values: the values, each with the caption of its map; the first one says how all are read.
        images: the images.
        sample: the index of the sample.
        limits: what is kept.
    """
    grid = images.grid_of(values[0][1]) if values else None
    if grid is None or not 0 <= sample < images.n_images:
        return None
    alike = [(name, value) for name, value in values if value.shape == values[0][1].shape]
    norms = [
        (name, vector_norm(_sample_as_maps(value, grid, sample), dim=0, dtype=torch.float64))
        for name, value in alike
    ]
    small = [(name, shrink(norm[None], limits.side)[0]) for name, norm in norms]
    before = values[0][1][sample, : grid.n_prefix].detach().cpu()  # MPS has no float64
    prefix = vector_norm(before, dim=-1, dtype=torch.float64).tolist() if grid.n_prefix else []
    return quantise(small, limits.bits) | {
        "kind": "norm",
        "rows": grid.height,
        "columns": grid.width,
        "prefix": round_finite(prefix),
    }


def gradcam_maps(
    activation: Tensor, gradient: Tensor, images: Images, sample: int, limits: MapLimits
) -> dict[str, Any] | None:
    """Return Grad-CAM of one sample, for both signs; None if there is none.

    The first map shows the places that raise the scalar on which backward() was called, the second
    those that lower it. For a loss, places that lower it speak for the class.

    Args:
        activation: the activation.
        gradient: its gradient, of the same shape.
        images: the images.
        sample: the index of the sample.
        limits: what is kept.
    """
    grid = images.grid_of(activation)
    if grid is None or activation.shape != gradient.shape or not 0 <= sample < images.n_images:
        return None
    both = (activation, gradient)
    maps, slopes = (_sample_as_maps(tensor, grid, sample).double()[None] for tensor in both)
    weighted = gradcam(maps, slopes)[0]
    if not bool(weighted.isfinite().all()) or not bool(weighted.any()):
        return None
    small = shrink(torch.stack([weighted, -weighted]).relu(), limits.side)
    data = quantise([("raises the scalar", small[0]), ("lowers the scalar", small[1])], limits.bits)
    return data | {"kind": "cam", "rows": grid.height, "columns": grid.width}


def gradcam_maps_of_last_layer(
    entries: Sequence[ValueEntry],
    entry_at: EntryAt,
    pass_number: int,
    images: Images,
    sample: int,
    limits: MapLimits,
) -> dict[str, Any] | None:
    """Return the class map of the last layer that has one, with its site; None if none has.

    Args:
        entries: the values in firing order, which are read one pair at a time, from the last back.
        entry_at: returns the value of a key.
        pass_number: the number of the pass.
        images: the images.
        sample: the index of the sample.
        limits: what is kept.
    """
    for entry, activation, gradient in _last_layers_with_maps(
        entries, entry_at, pass_number, images
    ):
        maps = gradcam_maps(activation, gradient, images.for_module(entry), sample, limits)
        if maps is not None:
            return maps | {"at": escape_invisible(entry.key.at)}
    return None


def _last_layers_with_maps(
    entries: Sequence[ValueEntry], entry_at: EntryAt, pass_number: int, images: Images
) -> Iterator[tuple[ValueEntry, Tensor, Tensor]]:
    """Yield the last layers of a pass that hold maps, with their outputs and gradients."""
    of_pass = (entry for entry in reversed(entries) if entry.key.pass_number == pass_number)
    pairs = ((entry, gradient_of(entry_at, entry)) for entry in of_pass if _is_layer_output(entry))
    both = (
        (entry, twin)
        for entry, twin in pairs
        if twin is not None and _has_maps_of_images(entry, images)
    )
    for entry, gradient in islice(both, _MOST_TRIES):
        try:
            yield entry, read_tensor(entry), read_tensor(gradient)
        except HooklineError:
            continue


def _is_layer_output(entry: ValueEntry) -> bool:
    """Tell whether a value is a layer's output. A Linear of an attention has parts of tokens."""
    site = entry.site
    is_output = site.port == "output" and site.path != "" and not site.leaf
    return is_output and (entry.is_image or site.module_type != "Linear")


def _has_maps_of_images(entry: ValueEntry, images: Images) -> bool:
    """Tell by the shape whether a value holds maps of the images."""
    try:
        outline = main_tensor(entry.recorded.outline(), with_meta=True)
    except HooklineError:
        return False
    return outline is not None and images.for_module(entry).grid_of(outline) is not None


def _sample_as_maps(value: Tensor, grid: Grid, sample: int) -> Tensor:
    """Return one sample as maps, shape `(channels, height, width)`."""
    return grid.to_maps(value[sample : sample + 1].detach().cpu())[0]
