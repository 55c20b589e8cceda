"""Turn numbers into pixels: reduced maps, scales of colours, palettes, PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from hookline.display.units import measure
from hookline.errors import HooklineError
from hookline.statistics.value_statistics import Array, axis_range_around
from hookline.util.optional_imports import how_to_install

if TYPE_CHECKING:
    from PIL.Image import Image

PAGE_NEEDS = "the page needs jinja2 and pillow", how_to_install("cli"), HooklineError

# The quantile at which a robust scale of colours is cut off, at both ends.
_ROBUST = 0.995
# Sums of numbers above the first could overflow float64; the second leaves room for them.
_HUGE, _ROOM = 1e290, 2.0**40


@final
@dataclass(frozen=True)
class Scale:
    """A range of colours, and whether it is centred at zero for signed numbers."""

    low: float
    high: float
    is_signed: bool
    cuts: bool = False


def shrink(maps: Tensor, max_side: int) -> Tensor:
    """Reduce maps to a maximal side length; each new element is the mean of an area.

    Args:
        maps: the maps, shape `(channels, height, width)` or `(channels, length)`.
        max_side: the most elements along a side.
    """
    sides = maps.shape[1:]
    if max(sides) <= max_side:
        return maps
    if len(sides) == 1:
        return _mean_areas(maps[None], lambda wide: adaptive_avg_pool1d(wide, max_side))[0]
    factor = max_side / max(sides)
    height, width = (max(1, round(side * factor)) for side in sides)
    return _mean_areas(maps[None], lambda wide: adaptive_avg_pool2d(wide, (height, width)))[0]


def shrink_table(table: Tensor, max_shape: tuple[int, int]) -> Tensor:
    """Reduce a table to a maximal number of rows and columns; each cell is the mean of an area."""
    height, width = (min(side, most) for side, most in zip(table.shape, max_shape, strict=True))
    if (height, width) == table.shape:
        return table
    pooled = _mean_areas(table[None, None], lambda wide: adaptive_avg_pool2d(wide, (height, width)))
    return pooled[0, 0]


def _mean_areas(numbers: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """Average areas in float64, so that the mean of finite numbers is finite."""
    wide = numbers.double()
    if not bool((wide.abs() > _HUGE).any()):
        return pool(wide).to(numbers.dtype)
    means, most = pool(wide / _ROOM), torch.finfo(wide.dtype).max / _ROOM
    return (means.where(means.isinf(), means.clamp(-most, most)) * _ROOM).to(numbers.dtype)


def colour_scale(data: Tensor, *, robust: bool = False, signed: bool | None = None) -> Scale:
    """Compute the range of colours for numbers; NaN and infinity are left out.

    Args:
        robust: cut off the outermost half percent, so that one outlier does not hide the rest.
        signed: True centres the range at zero; None does so if a number is negative.
    """
    finite = data[data.isfinite()]
    if not finite.numel():
        return Scale(0.0, 1.0, bool(signed))
    low, high = float(finite.min()), float(finite.max())
    if signed is None:
        signed = low < 0
    cuts = False
    if robust and finite.numel() > 1000:
        # A subsample of a million numbers is enough for the quantiles.
        some = finite.flatten()[:: max(1, finite.numel() // 1_000_000)]
        ends = np.quantile(some.numpy(), [1 - _ROBUST, _ROBUST])
        if ends[1] > ends[0]:
            cuts = bool(ends[0] > low or ends[1] < high)
            low, high = float(ends[0]), float(ends[1])
    if signed:
        reach = max(abs(low), abs(high)) or 1.0
        return Scale(-reach, reach, True, cuts)
    if low == high:
        return Scale(*axis_range_around(low), False)
    return Scale(low, high, False, cuts)


def finite_range(numbers: Array) -> tuple[float, float]:
    """Return the least and the greatest finite number; 0 and 1 if none is finite."""
    finite = numbers[np.isfinite(numbers)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)


def scale_to_unit(numbers: Array, low: float, high: float) -> Array:
    """Scale numbers to positions from 0 at `low` to 1 at `high`; NaN and infinity become NaN."""
    finite: Array = np.where(np.isfinite(numbers), numbers, np.nan)
    # Halved, because high - low could overflow.
    return (finite / 2 - low / 2) / ((high / 2 - low / 2) or 1.0)


def png_data_url(picture: Image) -> str:
    """Convert a picture to a `data:` address with a PNG."""
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def range_text(data: Tensor) -> str:
    """Format a range and the count of non-finite numbers: `-1.2 to 3.4; 12 NaN or infinite`."""
    finite = data.isfinite()
    n_bad = data.numel() - int(finite.sum())
    bad = f"{n_bad:,} NaN or infinite" if n_bad else ""
    if n_bad == data.numel():
        return f"all {bad}"
    low, high = float(data[finite].min()), float(data[finite].max())
    text = f"all {measure(low)}" if low == high else f"{measure(low)} to {measure(high)}"
    return "; ".join(filter(None, [text, bad]))
