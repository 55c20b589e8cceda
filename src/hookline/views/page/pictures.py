"""Draw the pictures of the pages: feature maps, tables of tokens, class maps over the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hookline.display.units import measure
from hookline.errors import HooklineError, InputError
from hookline.recordings.walk import Value
from hookline.util.optional import load
from hookline.views.pixels import (
    PAGE_NEEDS,
    cells,
    coloured,
    data_address,
    is_signed,
    palette_indices,
    range_text,
    scale_of,
    smaller,
)
from hookline.views.plots.arranging import Arranged, arrange, order_of

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_PIXELS = 192
_MIN_MAP_PIXELS = 4

PER_PAGE = 32
ORDERS = ("index", "mean", "std", "max")
_TILE = 96  # the longest side of a tile, in pixels
_TABLE = (160, 480)  # the most rows and columns of a table
_MANY = 2**22  # larger tables are subsampled before they are averaged
_SIDE = 384  # the longest side of a class map, in pixels


@final
@dataclass(frozen=True)
class Tile:
    """A picture: its `data:` address and its caption."""

    source: str
    caption: str


@final
@dataclass(frozen=True)
class Picture:
    """The drawing of one sample."""

    kind: str  # "channels" for a grid of maps, "table" for one map of rows and columns
    tiles: tuple[Tile, ...]  # the pictures
    about: str  # a text on the layout, the rows and columns, and the scale of colours
    total: int = 1  # the number of channels in all
    first: int = 0  # the index of the first channel shown
    n_samples: int = 1  # the number of samples that can be stepped through
    channels: tuple[int, ...] = ()  # the channels shown, in order


@final
@dataclass(frozen=True)
class Choice:
    """The part of a value to draw."""

    sample: int = 0  # the index of the sample
    # the order of channels: by index, or the largest mean, deviation or maximum first
    order: str = "index"
    first: int = 0  # the position in that order to start from
    # if given, draw only these channels, so that pictures side by side match
    channels: tuple[int, ...] = ()


def picture_of(tensor: Tensor, module_type: str, choice: Choice) -> Picture:
    """Draw one sample of a value.

    Raises:
        InputError: the value cannot be drawn; the first line says why.
    """
    return _drawn(*arranged(tensor, module_type, choice.sample), choice)


def difference_picture(a: Tensor, b: Tensor, module_type: str, choice: Choice) -> Picture:
    """Draw one sample of the difference `a - b`; red where `a` is greater.

    Raises:
        InputError: the values cannot be drawn.
    """
    first, n_samples = arranged(a, module_type, choice.sample)
    second, _ = arranged(b, module_type, choice.sample)
    gap = replace(first, data=first.data.double() - second.data.double())
    return _drawn(gap, n_samples, choice, is_gap=True)


def class_maps(activation: Tensor, gradient: Tensor, image: Tensor, sample: int) -> list[Tile]:
    """Draw Grad-CAM of one sample over the input image, for both signs.

    The first tile shows the regions that raise the scalar on which backward() was called, the
    second those that lower it. For a loss, regions that lower it speak for the class. Each channel
    is weighted by the mean of its gradient (Selvaraju et al., 2017).

    Args:
        activation: the activation, shape `(batch, channels, height, width)`.
        gradient: its gradient, of the same shape.
        image: the input, shape `(batch, 1 or 3, height, width)`.
        sample: the index of the sample in the batch.

    Returns:
        Two tiles; none if the shapes do not fit or a number is not finite.
    """
    shapes = [tensor.dim() == 4 and tensor.is_floating_point() for tensor in (activation, gradient)]
    if not all(shapes) or activation.shape != gradient.shape or not 0 <= sample < len(activation):
        return []
    if not is_picture(image) or len(image) != len(activation):
        return []
    maps, slopes = (tensor[sample].detach().cpu().double() for tensor in (activation, gradient))
    weighted = (maps * slopes.mean((1, 2), keepdim=True)).sum(0)
    if not bool(weighted.isfinite().all()):
        return []
    ground = _grey(image[sample])
    texts = ("what raises it", "what lowers it")
    return [
        Tile(_overlaid(ground, heat.relu()), text)
        for heat, text in zip((weighted, -weighted), texts, strict=True)
    ]


def is_picture(tensor: Tensor) -> bool:
    """Return whether a tensor is a floating batch of images, `(batch, 1 or 3, height, width)`."""
    return tensor.dim() == 4 and tensor.shape[1] in (1, 3) and tensor.is_floating_point()


def arranged(tensor: Tensor, module_type: str, sample: int) -> tuple[Arranged, int]:
    """Return one sample with its channels first, and the number of samples.

    Raises:
        InputError: the value cannot be drawn; the first line says why.
    """
    if tensor.dim() > 5:
        raise InputError(f"a picture must have at most 5 dimensions, got {tensor.dim()}.")
    value = Value("it", module_type, tensor)
    if tensor.dim() == 2:  # (samples, channels): all samples are shown at once, one a row
        return replace(arrange(value, "TC", 0), space="N", text="read as NC"), 1
    return arrange(value, None, sample), tensor.shape[0] if tensor.dim() > 2 else 1


def _drawn(arranged: Arranged, n_samples: int, choice: Choice, *, is_gap: bool = False) -> Picture:
    if len(arranged.space) < 2:
        return _table(arranged, n_samples, is_gap)
    data = arranged.data
    chosen = order_of(data, choice.order, None, "it")
    first = min(max(choice.first, 0), max(len(chosen) - 1, 0)) // PER_PAGE * PER_PAGE
    channels = chosen[first : first + PER_PAGE]
    if choice.channels and max(choice.channels) < len(data):
        channels = list(choice.channels)
    scale = scale_of(data[channels], robust=True, signed=True) if is_gap else None
    signed = is_gap or is_signed(data)
    tiles = []
    for channel in channels:
        drawn = smaller(data[channel][None].double(), _TILE)[0]
        indices = palette_indices(drawn.numpy(), scale or scale_of(drawn, signed=signed))
        source = coloured(indices, is_signed=signed)
        tiles.append(Tile(source, f"{channel}: {range_text(data[channel])}"))
    if scale is not None:
        colours = f"blue below zero, red above, to ±{measure(scale.high)}"
    elif signed:
        colours = "each channel on its own scale, blue below zero, white at zero, red above"
    else:
        colours = "each channel from its least value (dark) to its greatest (light)"
    about = f"{arranged.text}; {colours}"
    return Picture("channels", tuple(tiles), about, len(chosen), first, n_samples, tuple(channels))


def _table(arranged: Arranged, n_samples: int, is_gap: bool) -> Picture:
    """Draw a table whose rows are tokens, positions or samples, and whose columns are features."""
    rows = arranged.data.reshape(len(arranged.data), -1).T
    height, width = rows.shape
    steps = [1, 1]
    while rows.numel() > _MANY:  # averaging all of them would take too long for a page
        longest = int(rows.shape[1] >= rows.shape[0])
        rows = rows[:, ::2] if longest else rows[::2]
        steps[longest] *= 2
    small = cells(rows.double(), _TABLE)
    # The scale is that of the numbers, as in hl.plots.tokens: means of areas may share one sign.
    scale = scale_of(rows, robust=True, signed=is_gap or None)
    indices = palette_indices(small.numpy(), scale)
    ends = f"{measure(scale.low)} to {measure(scale.high)}"
    colours = f"blue below zero, red above, {ends}" if scale.is_signed else f"dark to light, {ends}"
    size = f"{height:,} x {width:,}"
    ways = "samples downwards, channels" if arranged.space == "N" else "rows downwards, features"
    text = f"{arranged.text}; {size}, {ways} to the right; {colours}"
    if tuple(small.shape) != (height, width):
        text += "; each dot is the mean of an area"
    if steps != [1, 1]:
        text += f", of one element in {math.prod(steps)}"
    tile = Tile(coloured(indices, is_signed=scale.is_signed), f"{size}: {range_text(rows)}")
    return Picture("table", (tile,), text, 1, 0, n_samples)


def _grey(image: Tensor) -> np.ndarray[Any, Any]:
    """Convert an image to grey from 0 to 1 over its range, at most `_SIDE` pixels a side."""
    small = smaller(image.detach().cpu().double(), _SIDE).mean(0).nan_to_num(0.0, 0.0, 0.0)
    low, high = float(small.min()), float(small.max())
    grey: np.ndarray[Any, Any] = ((small - low) / ((high - low) or 1.0)).numpy()
    return grey


def _overlaid(ground: np.ndarray[Any, Any], weights: Tensor) -> str:
    top = float(weights.max())
    share = (weights / (top or 1.0))[None, None]
    spread = interpolate(share, ground.shape, mode="bilinear", align_corners=False)[0, 0].numpy()
    places = np.linspace(0, 1, len(_HEAT))
    colours = np.stack([np.interp(spread, places, _HEAT[:, k]) for k in range(3)], axis=-1)
    blended = 0.5 * 255 * ground[:, :, None] + 0.5 * colours
    picture = load("PIL.Image", *PAGE_NEEDS).fromarray(np.round(blended).astype(np.uint8))
    return data_address(picture)


# Five anchors of matplotlib's magma, whose lightness rises evenly.
_HEAT = np.array([(0, 0, 4), (81, 18, 124), (183, 55, 121), (252, 137, 97), (252, 253, 191)], float)


def problem_of(error: HooklineError) -> str:
    """Return the first line of an error, shown in place of a picture."""
    return str(error).splitlines()[0]


def histogram_path(counts: Sequence[int], width: float = 480, height: float = 96) -> str:
    """Draw counts as an SVG path of bars with logarithmic heights.

    >>> histogram_path([0, 9, 0], 3, 10)
    'M1 10V0H2V10Z'
    """
    heights = np.log1p(np.asarray(counts, float))
    top = float(heights.max()) if len(counts) else 0.0
    if not top:
        return ""
    step = width / len(counts)
    parts = []
    for k, bar in enumerate(heights):
        if bar:
            y = height - max(height * float(bar) / top, 1.0)
            ends = f"{k * step:.4g} {height:g}V{y:.3g}H{(k + 1) * step:.4g}V{height:g}Z"
            parts.append(f"M{ends}")
    return "".join(parts)


# -- thumbnails -----------------------------------------------------------------------------


def input_thumbnail(image: Image) -> str:
    """Convert an input image to a `data:` address, at most 192 pixels wide and high."""
    small = image.convert("RGBA" if "A" in image.getbands() else "RGB")
    small.thumbnail((MAX_IMAGE_PIXELS, MAX_IMAGE_PIXELS))
    return data_address(small)


def is_image_like(tensor: Tensor) -> bool:
    """Return whether a tensor holds maps: shape `(N, C, H, W)`, with H and W of at least 4."""
    return (
        not tensor.is_nested
        and tensor.layout is torch.strided
        and not (tensor.is_complex() or tensor.is_quantized)
        and tensor.dim() == 4
        and tensor.numel() > 0
        and min(tensor.shape[2:]) >= _MIN_MAP_PIXELS
    )
