"""ClassMaps: the result of `cam`, and its overlays on the images."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hookline.display.text import escape_html, listed, plural
from hookline.engine.pytree import describe
from hookline.errors import HooklineError, InputError, warn
from hookline.util.optional_imports import how_to_install, require
from hookline.util.view_as_array import view_as_array

Pixels = npt.NDArray[np.uint8]

_IN_A_ROW = 8
_GAP = 4  # pixels between overlays
_LEAST = 96  # the least height, in pixels, of an overlay that is shown or saved

# inferno at 0, 0.1, ..., 1; colours between these are interpolated. Its lightness rises evenly from
# black, so it reads the same for colour-blind people and in black and white.
_ANCHORS = np.array(
    [
        (0, 0, 4), (22, 11, 57), (66, 10, 104), (106, 23, 110), (147, 38, 103), (188, 55, 84),
        (221, 81, 58), (243, 120, 25), (252, 165, 10), (246, 215, 70), (252, 255, 164),
    ],
    dtype=np.float64,
)  # fmt: skip


@final
@dataclass(frozen=True)
class ClassMaps:
    """Maps of the places in each image that raise the score of its class; made by `hl.cam`.

        >>> images, labels = load_demo_digits()
        >>> maps = hl.cam(load_model("demo:digits").model, images[:2])
        >>> maps
        ClassMaps of 2 images 8 x 8, by gradcam at block3: classes 0, 1
        >>> maps.overlay()[0].shape
        (8, 8, 3)

    Args:
        maps: float32, shape `(batch, height, width)`, the height and width of the images. Each map
            is scaled from 0, its least value, to 1, its largest. A constant map is 0 everywhere.
        layers: the layers of the maps, as written in `hl.select`.
        method: the name of the method.
        targets: the class of each image, also where the method does not use it. None for each image
            if `target=` was a function, or if such a method met an output without class scores.
        scores: the score of each image, shape `(batch,)`. Shape () if the function in `target=`
            returned one score for all images; None if there was no score.
        raw: a dict by layer of the maps before they were cut at zero, scaled and enlarged. Shape
            `(batch, height, width)`, the height and width of the layer's maps.
        images: the images as the model got them, shape `(batch, channels, height, width)`.
    """

    maps: Tensor
    layers: tuple[str, ...]
    method: str
    targets: tuple[int | None, ...]
    scores: Tensor | None
    raw: Mapping[str, Tensor] = field(repr=False)
    images: Tensor = field(repr=False)

    def overlay(self, image: Any = None, alpha: float = 0.5) -> list[Pixels]:
        """Lay each map over its image. A 0 in the map is black, a 1 is light yellow.

            >>> images, labels = load_demo_digits()
            >>> maps = hl.cam(load_model("demo:digits").model, images)
            >>> len(maps.overlay()), maps.overlay()[0].shape
            (8, (8, 8, 3))

        The image is drawn in grey, so every colour belongs to the map.

        Args:
            image: the pictures to use: one, or a list or batch of them. A picture is pillow's, an
                array `(height, width[, 3])` or a tensor `(1 or 3, height, width)`, of integers from
                0 to 255 or of floats from 0 to 1. The maps are stretched to the picture. So the
                picture may have any size, but must show exactly the part that the model got. None
                uses the model's input, with each image scaled to its own range.
            alpha: the weight of the map, from 0 to 1; the image has the rest.

        Returns:
            For each image a uint8 array of shape `(height, width, 3)`: red, green and blue.

        Raises:
            InputError: alpha is out of range, the pictures cannot be read, or their number is not
                that of the maps.
        """
        if not isinstance(alpha, Real) or not 0 <= alpha <= 1:
            raise InputError(
                f"alpha must be a number from 0 to 1, got {alpha!r}."
                "\nGive 0 for the image alone, 1 for the map alone, 0.5 for half of each."
            )
        pictures = (
            list(map(_contrast_stretched, self.images))
            if image is None
            else _list_of_pictures(image)
        )
        if len(pictures) != len(self.maps):
            raise InputError(
                f"image= must hold one picture for each of {plural(len(self.maps), 'map')}, got"
                f" {plural(len(pictures), 'picture')}.\nGive one for each map, as a list."
            )
        return [
            _blend(
                picture if image is None else _warn_if_cropped(_to_rgb_pixels(picture), map_HW),
                map_HW,
                alpha,
            )
            for picture, map_HW in zip(pictures, self.maps, strict=True)
        ]

    def save(self, path: str | os.PathLike[str], image: Any = None, alpha: float = 0.5) -> None:
        """Write the overlays as a picture, eight in a row, in the format of the file's ending.

            >>> images, labels = load_demo_digits()
            >>> maps = hl.cam(load_model("demo:digits").model, images)
            >>> maps.save(tmp_path / "maps.png")

        Overlays less than 96 pixels high are enlarged by a whole factor. `overlay` returns all of
        them at their own size.

        Args:
            path: the file, as in `"map.png"`.
            image: as in `overlay`.
            alpha: as in `overlay`.

        Raises:
            HooklineError: pillow is not installed.
            InputError: as in `overlay`. Or the file's ending names no picture format, or its folder
                does not exist or cannot be written to.
        """
        picture = self._side_by_side(image, alpha)
        try:
            picture.save(path)
        except ValueError as error:
            raise InputError(
                f"path must end in a picture format, got {os.fspath(path)!r}.\nEnd it in .png."
            ) from error
        except OSError as error:
            folder = os.path.dirname(path) or "."
            why = (
                error.strerror if os.path.isdir(folder) else f"its folder {folder!r} does not exist"
            )
            raise InputError(
                f"{os.fspath(path)!r} must be a file that can be written, got: {why}."
                "\nGive a path in a folder that exists and that you may write to."
            ) from error

    def _side_by_side(self, image: Any, alpha: float) -> Any:
        """Put the overlays side by side, eight in a row, with small ones enlarged."""
        needs = "writing a picture needs pillow", how_to_install("plots")
        pillow = require("PIL.Image", *needs, HooklineError)
        overlays = [
            pillow.fromarray(overlay.repeat(k, 0).repeat(k, 1))
            for overlay in self.overlay(image, alpha)
            for k in [-(-_LEAST // overlay.shape[0])]
        ]
        rows = [overlays[start : start + _IN_A_ROW] for start in range(0, len(overlays), _IN_A_ROW)]
        width = max(sum(picture.width + _GAP for picture in row) for row in rows) - _GAP
        heights = [max(picture.height for picture in row) + _GAP for row in rows]
        height = sum(heights) - _GAP
        whole = pillow.new("RGB", (width, height), "white")
        top = 0
        for row, row_height in zip(rows, heights, strict=True):
            left = 0
            for picture in row:
                whole.paste(picture, (left, top))
                left += picture.width + _GAP
            top += row_height
        return whole

    def _repr_png_(self) -> bytes | None:
        """Show the overlays in a notebook; without pillow it shows the text alone."""
        try:
            picture = self._side_by_side(None, 0.5)
        except HooklineError:
            return None
        out = io.BytesIO()
        picture.save(out, "PNG")
        return out.getvalue()

    def _repr_html_(self) -> str:
        """Show the text and the overlays in a notebook; without pillow the text alone."""
        picture = self._repr_png_()
        source = f"data:image/png;base64,{base64.b64encode(picture).decode()}" if picture else ""
        image = f'<img src="{source}" alt="overlays">' * bool(picture)
        return f"<div><p>{escape_html(repr(self))}</p>{image}</div>"

    def __repr__(self) -> str:
        n, height, width = self.maps.shape
        classes = listed(self.targets, 8)
        of = f": classes {classes}" if None not in self.targets else ""
        many = plural(n, "image")
        where = ", ".join(self.layers)
        return f"ClassMaps of {many} {height} x {width}, by {self.method} at {where}{of}"


def _warn_if_cropped(pixels: Pixels, map_HW: Tensor) -> Pixels:
    """Return the pixels; warn if they cannot be the model's input at another size."""
    (height, width), (rows, columns) = pixels.shape[:2], map_HW.shape
    # A side may be rounded by a pixel.
    if abs(height * columns - width * rows) > max(height, width, rows, columns):
        warn(
            f"the picture is {width} x {height}, and the model saw {columns} x {rows}: if it was"
            " cropped for the model, the map lies in the wrong place.\nGive the part that the model"
            " saw, or image=None. If the picture was only stretched, the map is right."
        )
    return pixels


def _blend(pixels: Pixels, map_HW: Tensor, alpha: float) -> Pixels:
    height, width = pixels.shape[:2]
    whole = map_HW.detach().float().cpu()[None, None]
    values = interpolate(whole, (height, width), mode="bilinear", align_corners=False)[0, 0].numpy()
    places = np.linspace(0, 1, len(_ANCHORS))
    colours = np.stack([np.interp(values, places, anchors) for anchors in _ANCHORS.T], axis=-1)
    # The weights of red, green and blue are those of BT.601, which pillow uses for grey.
    grey = (pixels.astype(np.float64) @ np.array([0.299, 0.587, 0.114]))[:, :, None]
    blended: Pixels = np.round((1 - alpha) * grey + alpha * colours).astype(np.uint8)
    return blended


def _contrast_stretched(image: Tensor) -> Pixels:
    """Return an input image of the model, scaled from black, its least value, to white."""
    values = image.detach().cpu().double()
    finite = values[values.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    values = ((values - low) / ((high - low) or 1.0)).nan_to_num(0.0).clamp(0, 1)
    if len(values) != 3:
        values = values.mean(0, keepdim=True).expand(3, -1, -1)
    return (values.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def _list_of_pictures(image: Any) -> list[Any]:
    if isinstance(image, list | tuple):
        return list(image)
    return list(image) if getattr(image, "ndim", 0) == 4 else [image]


def _to_rgb_pixels(picture: Any) -> Pixels:
    """Return a picture as an array of red, green and blue, 0 to 255.

    Raises:
        InputError: the picture cannot be read.
    """
    readable = picture
    if hasattr(picture, "convert"):  # pillow's
        if picture.mode.startswith(("I", "F")):  # pillow would silently cut values above 255
            raise InputError(
                f"image= must hold pictures of a known range, got pillow's mode {picture.mode!r}."
                "\nScale it to floats from 0 to 1, as in np.asarray(picture) / 65535."
            )
        readable = picture.convert("RGB")
    if isinstance(readable, Tensor):
        plain = readable.detach().cpu()
        if plain.is_floating_point():
            plain = plain.float()  # numpy has no bfloat16
        values = view_as_array(plain.permute(1, 2, 0) if plain.dim() == 3 else plain)
    else:
        values = np.asarray(readable)
    is_whole = np.issubdtype(values.dtype, np.integer)
    if values.ndim == 2:
        values = values[:, :, None]
    top = 255 if is_whole else 1
    if (
        values.ndim != 3
        or values.shape[2] not in (1, 3)
        or not values.size
        or not (is_whole or np.issubdtype(values.dtype, np.floating))
        or not (values.min() >= 0 and values.max() <= top)
    ):
        raise InputError(
            f"image= must hold pictures, got {_picture_text(picture, values)}.\nGive pillow's, an"
            " array (height, width[, 3]) or a tensor (1 or 3, height, width), with integers from 0"
            " to 255 or floats from 0 to 1."
        )
    pixels = values if is_whole else values * 255.0
    return np.broadcast_to(np.round(pixels).astype(np.uint8), (*values.shape[:2], 3))


def _picture_text(picture: Any, values: npt.NDArray[Any]) -> str:
    if isinstance(picture, Tensor):
        form = describe.in_full(picture)
    elif values.ndim:
        form = f"array {list(values.shape)} {values.dtype}"
    else:
        return type(picture).__name__
    is_number = values.size and np.issubdtype(values.dtype, np.number)
    return f"{form} from {values.min():.3g} to {values.max():.3g}" if is_number else form
