"""Open pictures, preprocess them and stack them into one batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.errors import InputError
from hookline.models.loaded import LoadedModel, Preprocess, describe
from hookline.models.packages import import_package, in_short
from hookline.models.places import is_file, printable

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm",
)  # fmt: skip
MAX_PICTURES = 64

_IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
_IMAGENET_STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def open_picture(path: Path) -> Image:
    """Open a picture, fully loaded and rotated by its EXIF orientation.

        >>> open_picture(Path("chelsea.png")).size
        (451, 300)

    Args:
        path: the file.

    Returns:
        The picture in its own mode and size; the first frame of an animation.

    Raises:
        InputError: pillow is not installed, or the file is broken or not a picture.
    """
    image_module = import_package("PIL.Image", str(path), InputError)
    ops = import_package("PIL.ImageOps", str(path), InputError)
    try:
        with image_module.open(path) as picture:
            picture.load()
            upright: Image = ops.exif_transpose(picture)
            return upright
    except Exception as e:  # pillow's errors for broken files have no common base
        raise InputError(
            f"{path} cannot be read as a picture: {in_short(e)}.\n"
            f"Open it in a viewer and save it again, as .png for instance."
        ) from e


def find_pictures(folder: Path) -> tuple[list[Path], int]:
    """List the pictures in a folder, sorted by name.

        >>> find_pictures(Path("photos"))
        ([PosixPath('photos/a.png'), PosixPath('photos/b.jpg')], 1)

    Args:
        folder: the folder; subfolders are not searched.

    Returns:
        The pictures, and the number of other files without hidden ones.

    Raises:
        InputError: the folder holds no picture, or more than 64.
    """
    try:
        there = sorted(folder.iterdir())
    except OSError as error:
        raise InputError(
            f"the folder {printable(folder)} cannot be listed: {in_short(error)}.\n"
            "Give one that you may read."
        ) from error
    files = [path for path in there if is_file(path) and not path.name.startswith(".")]
    found = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not found:
        raise InputError(
            f"the folder {folder} must hold pictures, got {plural(len(files), 'other file')}.\n"
            f"Give pictures that end in {', '.join(SUFFIXES)}."
        )
    if len(found) > MAX_PICTURES:
        raise InputError(
            f"the folder {folder} must hold at most {MAX_PICTURES} pictures for a batch, got "
            f"{len(found)}.\nPut those that you want into a folder of their own."
        )
    return found, len(files) - len(found)


def stack_pictures(pictures: list[Image], names: list[str], loaded: LoadedModel) -> Tensor:
    """Preprocess pictures for a model and stack them into one batch.

        >>> stack_pictures([picture], ["chelsea.png"], load_model("timm:resnet18")).shape
        torch.Size([1, 3, 224, 224])

    Args:
        pictures: the pictures, of any mode and size.
        names: their names, for the messages.
        loaded: the model.

    Returns:
        The batch, shape `(pictures, channels, height, width)`.

    Raises:
        InputError: the model takes no pictures, its preprocessing fails for a picture, or it
            returns different shapes.
    """
    if loaded.preprocess is None:
        raise InputError(
            f"{names[0]} is a picture, and {loaded.name} takes none: hookline does not know how "
            "to prepare one for it.\nGive it "
            + ("text, or " if loaded.tokenize else "")
            + "tensors (.npy, .npz, .pt, .safetensors or random:SHAPE)."
        )
    rows: list[Tensor] = []
    for picture, name in zip(pictures, names, strict=True):
        try:
            row = loaded.preprocess(picture)
        except Exception as error:  # a library's transforms may raise anything
            raise InputError(
                f"{name} cannot be prepared for {loaded.name}: {in_short(error)}.\n"
                "Give the prepared tensors instead (.npy, .pt, .safetensors)."
            ) from error
        if rows and row.shape != rows[0].shape:
            raise InputError(
                f"{name} and {names[0]} differ in shape once prepared for {loaded.name} "
                f"({describe(row)} and {describe(rows[0])}), so they cannot be one batch.\n"
                "Give one picture at a time, or pictures of one size."
            )
        rows.append(row)
    return torch.stack(rows)


def in_mode(transform: Preprocess, mode: str = "RGB") -> Preprocess:
    """Wrap a transform so that it takes pictures of any mode (grey, with alpha, ...).

        >>> in_mode(ResNet18_Weights.DEFAULT.transforms())(Image.new("L", (300, 300))).shape
        torch.Size([3, 224, 224])

    Args:
        transform: a transform that takes pictures of mode `mode`.
        mode: "RGB", or "L" for models of one channel.
    """
    return partial(_transformed, transform, mode)  # it pickles, for processes that load pictures


def _transformed(transform: Preprocess, mode: str, picture: Image) -> Tensor:
    return transform(picture.convert(mode))


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
    """
    scale = 256 / min(picture.size)
    width, height = (max(256, round(side * scale)) for side in picture.size)
    left, top = (width - 224) // 2, (height - 224) // 2
    # 2 is PIL.Image.Resampling.BILINEAR, which antialiases when it shrinks a picture.
    small = picture.convert("RGB").resize((width, height), 2)
    pixels = np.asarray(small.crop((left, top, left + 224, top + 224)), dtype=np.float32) / 255
    normal = (pixels - _IMAGENET_MEAN) / _IMAGENET_STD
    return torch.from_numpy(np.ascontiguousarray(normal.transpose(2, 0, 1)))
