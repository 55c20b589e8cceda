"""Draw thumbnails: feature maps as one strip of tiles, and the model's input."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from hookline.display.colours import BLUE_RED, VIRIDIS, Rgb, colour
from hookline.statistics.to_numbers import pieces
from hookline.views.page.optional_imports import load
from hookline.views.plots.channels import scale_of_map
from hookline.views.plots.reducing import scale_of

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CHANNELS = 8
MAX_TILE_PIXELS = 48
MAX_IMAGE_PIXELS = 192

_MIN_MAP_PIXELS = 4

_NON_FINITE_INDEX = 255


@final
@dataclass(frozen=True)
class Strip:
    """A picture of feature maps side by side.

    Args:
        source: the picture as a `data:` address.
        width: the width of one tile, in pixels.
        height: the height of one tile, in pixels.
        ranges: the smallest and largest finite value of each channel shown; None if there are none.
        channels: the number of channels of the value.
    """

    source: str
    width: int
    height: int
    ranges: tuple[tuple[float, float] | None, ...]
    channels: int


def feature_strip(tensor: Tensor) -> Strip | None:
    """Draw the first channels of the first sample of an image-like tensor.

        >>> strip = feature_strip(torch.rand(2, 16, 100, 200))
        >>> len(strip.ranges), strip.width, strip.height
        (8, 48, 24)

    Each channel has its own scale, in the colours of `hl.plots.channels`. If the sample has
    negative numbers, the colours are blue and red with white at zero. Otherwise they go from the
    channel's smallest value to its largest.

    Args:
        tensor: any tensor; one of shape `(N, C, H, W)` with H and W of at least 4 is drawn.

    Returns:
        The strip; None for a tensor that is not image-like.

    Raises:
        HooklineError: pillow is not installed.
    """
    if not is_image_like(tensor) or tensor.is_meta:
        return None
    maps = tensor[0, :MAX_CHANNELS].detach().cpu().to(torch.float64)
    form = strip_form(tensor.shape)
    maps = adaptive_avg_pool2d(maps[None], (form.height, form.width))[0]
    signed = is_signed(tensor[0])
    drawn = [in_own_range(channel, signed) for channel in maps.numpy()]
    tiles = np.concatenate([indices for indices, _ in drawn], axis=1)
    ranges = tuple(limits for _, limits in drawn)
    return Strip(coloured(tiles, is_signed=signed), form.width, form.height, ranges, form.channels)


class StripForm(NamedTuple):
    """The layout of a strip of feature maps, known before it is drawn.

    Args:
        tiles: the number of maps shown.
        width: the width of one tile, in pixels.
        height: the height of one tile, in pixels.
        channels: the number of channels of the value.
        samples: the number of samples of the value; the strip shows the first.
    """

    tiles: int
    width: int
    height: int
    channels: int
    samples: int


def strip_form(shape: Sequence[int]) -> StripForm:
    """Compute the layout of the strip of a value of shape `(N, C, H, W)`."""
    shrink = min(MAX_TILE_PIXELS / max(shape[2:]), 1)
    height, width = (max(round(side * shrink), 1) for side in shape[2:])
    return StripForm(min(shape[1], MAX_CHANNELS), width, height, shape[1], shape[0])


def input_thumbnail(image: Image) -> str:
    """Convert an input image to a `data:` address, at most 192 pixels wide and high.

    Raises:
        HooklineError: pillow is not installed.
    """
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


def is_signed(sample: Tensor) -> bool:
    """Return whether `hl.plots` draws a sample in blue and red; the sample is read in chunks."""
    ends: list[Tensor] = []
    for piece in pieces(sample):
        finite = piece[piece.isfinite()]
        if finite.numel():
            ends += finite.aminmax()
    return bool(ends) and scale_of(torch.stack(ends)).is_signed


def in_own_range(
    channel: npt.NDArray[np.float64], signed: bool
) -> tuple[npt.NDArray[np.uint8], tuple[float, float] | None]:
    """Convert a channel to palette indices on its own scale, and return its range.

    Args:
        channel: the numbers.
        signed: whether the scale is centred at zero.
    """
    finite = channel[np.isfinite(channel)]
    if not finite.size:
        return np.full(channel.shape, _NON_FINITE_INDEX, np.uint8), None
    scale = scale_of_map(channel, signed)
    limits = float(finite.min()), float(finite.max())
    return in_range(channel, scale.low, scale.high), limits


def in_range(numbers: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.uint8]:
    """Convert numbers to palette indices, clamped to the range from low to high."""
    is_finite = np.isfinite(numbers)
    # Halved, because high - low could overflow.
    span = high / 2 - low / 2 or 1.0
    scaled = (np.where(is_finite, numbers, low).clip(low, high) / 2 - low / 2) / span
    indices = np.round(scaled * (_NON_FINITE_INDEX - 1)).astype(np.uint8)
    return np.where(is_finite, indices, np.uint8(_NON_FINITE_INDEX))


def coloured(indices: npt.NDArray[np.uint8], *, is_signed: bool = False) -> str:
    """Convert palette indices to a picture's `data:` address: viridis, or blue to red if signed.

    Raises:
        HooklineError: pillow is not installed.
    """
    picture = load("PIL.Image").fromarray(indices)
    picture.putpalette(_SIGNED if is_signed else _PLAIN)
    return data_address(picture)


def data_address(picture: Image) -> str:
    """Convert a picture to a `data:` address with a PNG."""
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _palette(anchors: Sequence[Rgb], non_finite: Rgb) -> list[int]:
    """Return the flat list of red, green and blue of the 256 palette colours."""
    flat: list[int] = []
    for index in range(_NON_FINITE_INDEX):
        flat += colour(index / (_NON_FINITE_INDEX - 1), anchors)
    return [*flat, *non_finite]


# NaN and infinity get a colour outside the map: vermilion in viridis, yellow in red and blue.
_PLAIN = _palette(VIRIDIS, (213, 94, 0))
_SIGNED = _palette(BLUE_RED, (255, 213, 0))
