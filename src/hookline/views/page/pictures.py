"""Choose what the page draws of a value; draw class maps over the input, and thumbnails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hookline.errors import InputError
from hookline.recordings.walk import Value
from hookline.util.optional import load
from hookline.views.pixels import (
    PAGE_NEEDS,
    data_address,
    smaller,
)
from hookline.views.plots.arranging import Arranged, arrange

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_PIXELS = 192
_MIN_MAP_PIXELS = 4

ORDERS = ("largest", "index", "mean", "std", "max")
_SIDE = 384  # the longest side of a class map, in pixels


@final
@dataclass(frozen=True)
class Tile:
    """A picture: its `data:` address and its caption."""

    source: str
    caption: str


@final
@dataclass(frozen=True)
class Choice:
    """The part of a value to draw."""

    sample: int = 0  # the index of the sample
    # the order of channels: by largest magnitude, mean, deviation or maximum, or by index
    order: str = "largest"
    first: int = 0  # the position in that order to start from
    part: int = 0  # of a value with several tensors, which one
    # if given, draw only these channels, so that pictures side by side match
    channels: tuple[int, ...] = ()


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
