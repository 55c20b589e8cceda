"""Choose what the page draws of a value; draw thumbnails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from hookline.errors import InputError
from hookline.recordings.figure_values import LabelledTensor
from hookline.views.pixels import png_data_url
from hookline.views.plots.arrange_value import Arranged, arrange

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_PIXELS = 192
_MIN_MAP_PIXELS = 4

ORDERS = ("largest", "index", "mean", "std", "max")
FORMS = ("table", "places")


@final
@dataclass(frozen=True)
class Choice:
    """The part of a value to draw."""

    sample: int = 0  # the index of the sample
    # the order of channels: by largest magnitude, mean, deviation or maximum, or by index
    order: str = "largest"
    first: int = 0  # the position in that order to start from
    part: int | str = 0  # of a value with several tensors, which one: its number or its leaf
    # how tokens are drawn: as a table of tokens by features, or at the places of their patches
    form: str = "table"
    # if given, draw only these channels, so that pictures side by side match
    channels: tuple[int, ...] = ()


def is_image_batch(tensor: Tensor) -> bool:
    """Return whether a tensor is a batch of images, `(batch, 1 or 3, height, width)`.

    Their numbers are floating, or bytes as in a file.
    """
    is_shade = tensor.is_floating_point() or tensor.dtype == torch.uint8
    return tensor.dim() == 4 and tensor.shape[1] in (1, 3) and is_shade


def arrange_sample(tensor: Tensor, module_type: str, sample: int) -> tuple[Arranged, int]:
    """Return one sample with its channels first, and the number of samples.

    Raises:
        InputError: the value cannot be drawn; the first line says why.
    """
    if tensor.dim() > 5:
        raise InputError(f"a picture must have at most 5 dimensions, got {tensor.dim()}.")
    value = LabelledTensor("it", module_type, tensor)
    if tensor.dim() == 2:  # (samples, channels): all samples are shown at once, one a row
        return replace(arrange(value, "TC", 0), space="N", text="read as NC"), 1
    return arrange(value, None, sample), tensor.shape[0] if tensor.dim() > 2 else 1


# -- thumbnails -----------------------------------------------------------------------------


def input_thumbnail(image: Image) -> str:
    """Convert an input image to a `data:` address, at most 192 pixels wide and high."""
    small = image.convert("RGBA" if "A" in image.getbands() else "RGB")
    small.thumbnail((MAX_IMAGE_PIXELS, MAX_IMAGE_PIXELS))
    return png_data_url(small)


def holds_feature_maps(tensor: Tensor) -> bool:
    """Return whether a tensor holds maps: shape `(N, C, H, W)`, with H and W of at least 4."""
    return (
        not tensor.is_nested
        and tensor.layout is torch.strided
        and not (tensor.is_complex() or tensor.is_quantized)
        and tensor.dim() == 4
        and tensor.numel() > 0
        and min(tensor.shape[2:]) >= _MIN_MAP_PIXELS
    )
