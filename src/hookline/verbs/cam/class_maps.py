"""ClassMaps: what `cam` found, and how it is laid over the images."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Real
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from hookline.display.text import plural
from hookline.engine.pytree import describe
from hookline.errors import HooklineError, InputError, warn
from hookline.util.install import how_to_install

Pixels = npt.NDArray[np.uint8]

_IN_A_ROW = 8
_GAP = 4  # pixels between overlays
_LEAST = 96  # pixels that an overlay is high at least, where it is shown or saved

# inferno at 0, 0.1, ..., 1; colours between these are interpolated. Its lightness rises evenly from
# black, so it reads the same to colour-blind people and in black and white.
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
    """Maps of the places in each image that speak for its class; made by `hl.cam`.

        >>> images, labels = load_demo_digits()
        >>> found = hl.cam(loaded.model, images[:2])
        >>> found
        ClassMaps of 2 images 8 x 8, by gradcam at block3: classes 0, 1
        >>> found.overlay()[0].shape
        (8, 8, 3)

    Args:
        maps: each from its own least value, 0, to its own largest, 1; float32, shape `(batch,
            height, width)`, of the images' size. A map that is 0 all over had one value everywhere.
        layers: the layers, as written in `hl.select`, that they were made at.
        method: the name of the formula.
        targets: the class of each image; None where the target was a function, or no class.
        scores: of each image the number whose map it is, shape `(batch,)`, or () if the target's
            function gave one for all; None where there was none.
        raw: by layer, what the formula gave, before it was cut at zero, scaled and enlarged: shape
            `(batch, height, width)` of the layer's maps.
        images: the images as the model got them.
    """

    maps: Tensor
    layers: tuple[str, ...]
    method: str
    targets: tuple[int | None, ...]
    scores: Tensor | None
    raw: Mapping[str, Tensor] = field(repr=False)
    images: Tensor = field(repr=False)

    def overlay(self, image: Any = None, alpha: float = 0.5) -> list[Pixels]:
        """Lay each map over its image: black is 0, light yellow is 1.

        The image is drawn in grey, so that every colour is the map's.

        Args:
            image: the pictures to lay them over: one, or a list or batch of them; pillow's, arrays
                `(height, width[, 3])` or tensors `(1 or 3, height, width)`, of integers from 0 to
                255 or floats from 0 to 1. Of any size: the maps are stretched to it, so it has to
                show what the model was shown, and not more. None: what the model was given, each
                image scaled to its own range.
            alpha: how much of what is seen is the map, 0 to 1.

        Returns:
            For each image an array of shape `(height, width, 3)`, red, green and blue, 0 to 255.

        Raises:
            InputError: alpha is out of range, or these are no pictures, or not as many.
        """
        if not isinstance(alpha, Real) or not 0 <= alpha <= 1:
            raise InputError(
                f"alpha must be a number from 0 to 1, got {alpha!r}."
                "\nGive 0 for the image alone, 1 for the map alone, 0.5 for half of each."
            )
        pictures = [_stretched(one) for one in self.images] if image is None else _listed(image)
        if len(pictures) != len(self.maps):
            raise InputError(
                f"{plural(len(pictures), 'picture')} for {plural(len(self.maps), 'map')}."
                "\nGive one for each, as a list."
            )
        return [
            _blend(one if image is None else _fitting(_pixels(one), number), number, alpha)
            for one, number in zip(pictures, self.maps, strict=True)
        ]

    def save(self, path: str | os.PathLike[str], image: Any = None, alpha: float = 0.5) -> None:
        """Write the overlays as a picture, eight in a row; the name's ending says of which kind.

        Those that are less than 96 pixels high are enlarged by a whole factor; `overlay` gives all
        as they are.

        Args:
            path: the file, as in `"map.png"`.
            image: as in `overlay`.
            alpha: as in `overlay`.

        Raises:
            HooklineError: pillow is not installed.
            InputError: as in `overlay`; or the name's ending is of no kind of picture, or there
                is no such folder.
        """
        picture = self._side_by_side(image, alpha)
        try:
            picture.save(path)
        except ValueError as error:
            raise InputError(
                f"{os.fspath(path)!r} does not say which kind of picture it is.\nEnd it in .png."
            ) from error
        except OSError as error:
            folder = os.path.dirname(path) or "."
            why = (
                error.strerror if os.path.isdir(folder) else f"its folder {folder!r} does not exist"
            )
            raise InputError(
                f"{os.fspath(path)!r} cannot be written: {why}."
                "\nGive a place in a folder that is there, and that you may write to."
            ) from error

    def _side_by_side(self, image: Any, alpha: float) -> Any:
        """The overlays, eight in a row, small ones enlarged by a whole factor."""
        pillow = _pillow()
        overlays = [
            pillow.fromarray(one.repeat(k, 0).repeat(k, 1))
            for one in self.overlay(image, alpha)
            for k in [-(-_LEAST // one.shape[0])]
        ]
        rows = [overlays[start : start + _IN_A_ROW] for start in range(0, len(overlays), _IN_A_ROW)]
        width = max(sum(one.width + _GAP for one in row) for row in rows) - _GAP
        height = sum(max(one.height for one in row) + _GAP for row in rows) - _GAP
        whole = pillow.new("RGB", (width, height), "white")
        top = 0
        for row in rows:
            left = 0
            for one in row:
                whole.paste(one, (left, top))
                left += one.width + _GAP
            top += max(one.height for one in row) + _GAP
        return whole

    def _repr_png_(self) -> bytes | None:
        """The overlays side by side, for a notebook; without pillow it shows the text alone."""
        try:
            picture = self._side_by_side(None, 0.5)
        except HooklineError:
            return None
        out = io.BytesIO()
        picture.save(out, "PNG")
        return out.getvalue()

    def __repr__(self) -> str:
        n, height, width = self.maps.shape
        shown = ", ".join(map(str, self.targets[:8])) + (", …" if n > 8 else "")
        of = f": classes {shown}" if None not in self.targets else ""
        many = plural(n, "image")
        where = ", ".join(self.layers)
        return f"ClassMaps of {many} {height} x {width}, by {self.method} at {where}{of}"


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ModuleNotFoundError as error:
        raise HooklineError(
            f"to write a picture needs pillow.\n{how_to_install('plots')}"
        ) from error


def _fitting(pixels: Pixels, map_HW: Tensor) -> Pixels:
    """The same pixels; a warning if they cannot be what the model was shown, merely resized."""
    (height, width), (rows, columns) = pixels.shape[:2], map_HW.shape
    # A side may be rounded by a pixel.
    if abs(height * columns - width * rows) > max(height, width, rows, columns):
        warn(
            f"the picture is {width} x {height}, and the model saw {columns} x {rows}: if it was"
            " cropped for the model, the map lies in the wrong place.\nGive the part that the model"
            " was shown, or image=None; if the picture was only stretched, the map is right."
        )
    return pixels


def _blend(pixels: Pixels, map_HW: Tensor, alpha: float) -> Pixels:
    height, width = pixels.shape[:2]
    whole = map_HW.detach().float().cpu()[None, None]
    values = interpolate(whole, (height, width), mode="bilinear", align_corners=False)[0, 0].numpy()
    colours = _coloured(values.astype(np.float64))
    # Red, green and blue weigh as in BT.601, which is how pillow turns a picture grey.
    grey = (pixels.astype(np.float64) @ np.array([0.299, 0.587, 0.114]))[:, :, None]
    blended: Pixels = np.round((1 - alpha) * grey + alpha * colours).astype(np.uint8)
    return blended


def _coloured(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    places = np.linspace(0, 1, len(_ANCHORS))
    return np.stack([np.interp(values, places, _ANCHORS[:, k]) for k in range(3)], axis=-1)


def _stretched(image: Tensor) -> Pixels:
    """An image as the model got it, from its own least value, black, to its largest, white."""
    values = image.detach().cpu().double()
    finite = values[values.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    values = ((values - low) / ((high - low) or 1.0)).nan_to_num(0.0).clamp(0, 1)
    if len(values) != 3:
        values = values.mean(0, keepdim=True).expand(3, -1, -1)
    return (values.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()


def _listed(image: Any) -> list[Any]:
    if isinstance(image, list | tuple):
        return list(image)
    return list(image) if getattr(image, "ndim", 0) == 4 else [image]


def _pixels(picture: Any) -> Pixels:
    """A picture as an array of red, green and blue.

    Raises:
        InputError: it is no picture.
    """
    given = picture
    if hasattr(picture, "convert"):  # pillow's
        if picture.mode.startswith(("I", "F")):  # pillow would cut all above 255 off, silently
            raise InputError(
                f"this picture is of pillow's mode {picture.mode!r}, whose range nobody knows."
                "\nScale it: an array of floats from 0 to 1, such as np.asarray(picture) / 65535."
            )
        given = picture.convert("RGB")
    if isinstance(given, Tensor):
        plain = given.detach().cpu()
        if plain.is_floating_point():
            plain = plain.float()  # numpy has no bfloat16
        values = plain.permute(1, 2, 0).numpy() if plain.dim() == 3 else plain.numpy()
    else:
        values = np.asarray(given)
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
            f"image= must hold pictures, got {_described(picture, values)}.\nGive pillow's, an"
            " array (height, width[, 3]) or a tensor (1 or 3, height, width): integers from 0 to"
            " 255, or floats from 0 to 1."
        )
    pixels = values if is_whole else values * 255.0
    return np.broadcast_to(np.round(pixels).astype(np.uint8), (*values.shape[:2], 3))


def _described(picture: Any, values: npt.NDArray[Any]) -> str:
    if isinstance(picture, Tensor):
        what = describe.in_full(picture)
    elif values.ndim:
        what = f"array {list(values.shape)} {values.dtype}"
    else:
        return type(picture).__name__
    is_number = values.size and np.issubdtype(values.dtype, np.number)
    return f"{what} from {values.min():.3g} to {values.max():.3g}" if is_number else what
