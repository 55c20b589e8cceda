"""Preprocess pictures for models that publish no preprocessing, or take one mode only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hookline.errors import InputError
from hookline.models.loaded_model import Preprocess

if TYPE_CHECKING:
    from PIL.Image import Image

_IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
_IMAGENET_STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def accept_any_mode(transform: Preprocess, mode: str = "RGB") -> Preprocess:
    """Wrap a transform so that it takes pictures of any mode (grey, with alpha, ...).

        >>> accept_any_mode(ResNet18_Weights.DEFAULT.transforms())(Image.new("L", (300, 300))).shape
        torch.Size([3, 224, 224])

    Args:
        transform: a transform that takes pictures of mode `mode`.
        mode: "RGB", or "L" for models of one channel.
    """
    return partial(_convert_and_transform, transform, mode)  # it pickles, for worker processes


def _convert_and_transform(transform: Preprocess, mode: str, picture: Image) -> Tensor:
    return transform(to_8_bits(picture).convert(mode))


def to_8_bits(picture: Image) -> Image:
    """Return a grey picture of 16 bits with 8: pillow would take all from 255 on for white.

    Raises:
        InputError: the picture has 32 bits, so that nobody knows which number is white.
    """
    if picture.mode in ("I", "F"):
        kind = "whole numbers" if picture.mode == "I" else "floats"
        raise InputError(
            f"a picture must have 8 or 16 bits a channel, got 32-bit {kind}."
            "\nConvert it, or give the numbers as a tensor: a file .npy or .pt."
        )
    if not picture.mode.startswith("I;16"):
        return picture
    from PIL.Image import fromarray  # loaded: it has made the picture

    return fromarray((np.asarray(picture) / 257).round().astype(np.uint8))


def guess_preprocess(picture: Image) -> Tensor:
    """Preprocess a picture for a model that publishes no preprocessing. This is a guess.

    Most ImageNet models take this: RGB, the short side resized to 256, the middle 224x224,
    normalised with ImageNet's mean and standard deviation. A model trained on other data needs its
    own preprocessing: give it prepared tensors.

        >>> guess_preprocess(open_picture(Path("chelsea.png"))).shape
        torch.Size([3, 224, 224])

    Args:
        picture: a picture of any mode and size.

    Returns:
        Shape `(3, 224, 224)`, float32.

    Raises:
        InputError: the picture has 32 bits a channel.
    """
    scale = 256 / min(picture.size)
    width, height = (max(256, round(side * scale)) for side in picture.size)
    left, top = (width - 224) // 2, (height - 224) // 2
    # 2 is PIL.Image.Resampling.BILINEAR, which antialiases when it shrinks a picture.
    small = to_8_bits(picture).convert("RGB").resize((width, height), 2)
    pixels = np.asarray(small.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255
    normal = (pixels - _IMAGENET_MEAN) / _IMAGENET_STD
    return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))
