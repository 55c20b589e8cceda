"""Reduce large values for drawing: areas, ranges, orders, counts."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from hookline.display.text import plural
from hookline.display.units import measure
from hookline.errors import InputError
from hookline.statistics.to_numbers import pieces
from hookline.views.plots.checks import check_count
from hookline.views.statistics import Statistics, site_statistics

Array = npt.NDArray[Any]

# The quantile at which a robust scale of colours is cut off, at both ends.
_ROBUST = 0.995


@final
@dataclass(frozen=True)
class Scale:
    """A range of colours, and whether it is centred at zero for signed numbers."""

    low: float
    high: float
    is_signed: bool
    cuts: bool = False


def smaller(maps: Tensor, largest: int) -> Tensor:
    """Reduce maps to a maximal side length; each new element is the mean of an area.

    Args:
        maps: the maps, shape `(channels, height, width)` or `(channels, length)`.
        largest: the most elements along a side.
    """
    sides = maps.shape[1:]
    if max(sides) <= largest:
        return maps
    if len(sides) == 1:
        return adaptive_avg_pool1d(maps[None], largest)[0]
    shrink = largest / max(sides)
    height, width = (max(1, round(side * shrink)) for side in sides)
    return adaptive_avg_pool2d(maps[None], (height, width))[0]


def cells(table: Tensor, largest: tuple[int, int]) -> Tensor:
    """Reduce a table to a maximal number of rows and columns; each cell is the mean of an area."""
    height, width = (min(side, most) for side, most in zip(table.shape, largest, strict=True))
    if (height, width) == table.shape:
        return table
    return adaptive_avg_pool2d(table[None, None], (height, width))[0, 0]


def order_of(data: Tensor, order: str | Iterable[int], n: int | None, label: str) -> list[int]:
    """Return the indices of the channels to draw, in order.

    Args:
        data: the value, shape `(channels, *space)`.
        order: "index"; or "mean", "std" or "max" for the largest first; or the indices themselves.
        n: the most channels to draw; None means all. It does not limit given indices.
        label: the site, for messages.

    Raises:
        InputError: the order is unknown, or a channel does not exist.
    """
    n_channels = data.shape[0]
    if not isinstance(order, str):
        chosen = [index(one) for one in order]
        for one in chosen:
            if not -n_channels <= one < n_channels:
                raise InputError(
                    f"a channel of {label} must be a number from 0 to {n_channels - 1}, got {one}."
                    "\nGive order='index' for the first ones."
                )
        if not chosen:
            raise InputError(
                "order must name at least one channel, got an empty list.\nGive order='index'."
            )
        return [one % n_channels for one in chosen]
    if n is not None:
        check_count("n", n)
    if order == "index":
        return list(range(n_channels))[:n]
    flat = data.reshape(n_channels, -1).double()
    finite = flat.isfinite()
    count = finite.sum(1)
    held = flat.where(finite, 0.0)
    mean = held.sum(1) / count
    if order == "mean":
        key = mean
    elif order == "std":
        key = ((held - mean[:, None]).where(finite, 0.0).square().sum(1) / count).sqrt()
    elif order == "max":
        key = flat.where(finite, -math.inf).amax(1)
    else:
        raise InputError(
            "order must be 'index', 'mean', 'std' or 'max', or a list of channels, got"
            f" {order!r}.\nWrite order='std', for instance."
        )
    found: list[int] = key.nan_to_num(-math.inf).argsort(descending=True, stable=True).tolist()
    return found[:n]


def scale_of(data: Tensor, *, robust: bool = False, signed: bool | None = None) -> Scale:
    """Compute the range of colours for numbers; NaN and infinity are left out.

    Args:
        data: the numbers.
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
        return Scale(*around(low), False)
    return Scale(low, high, False, cuts)


def around(number: float) -> tuple[float, float]:
    """Return the ends of an axis around a single number, at least 0.5 above and below it."""
    reach = max(0.5, abs(number) * 1e-3)
    return max(number - reach, -sys.float_info.max), min(number + reach, sys.float_info.max)


def histogram(tensor: Tensor, bins: int) -> tuple[Array, Array, Statistics]:
    """Count the elements in equal bins from the smallest to the largest finite element.

    The result equals `numpy.histogram` of the finite elements in float64. The tensor is read in
    chunks.

    Returns:
        The counts, shape `(bins,)`; the edges, shape `(bins + 1,)`; the statistics.
    """
    found = site_statistics(tensor)
    if found is None:
        raise InputError("the value has no numbers.")
    low, high = found.min, found.max
    if low is None or high is None:
        return np.zeros(bins, np.int64), np.linspace(0.0, 1.0, bins + 1), found
    if low == high:
        low, high = around(low)
    # Halved if the range would overflow.
    part = 0.5 if math.isinf(high - low) else 1.0
    ends = (low * part, high * part)
    edges = np.linspace(*ends, bins + 1)
    counts = np.zeros(bins, np.int64)
    for piece in pieces(tensor):
        flat = piece.flatten().cpu()
        if found.non_finite:
            flat = flat[flat.isfinite()]
        counts += _counts((flat * part if part != 1 else flat).numpy(), edges)
    edges /= part
    return counts, edges, found


def _counts(numbers: Array, edges: Array) -> Array:
    try:
        return np.histogram(numbers, len(edges) - 1, (edges[0], edges[-1]))[0]
    except ValueError:  # float64 has fewer numbers in the range than there are bins
        places = np.searchsorted(edges[1:-1], numbers, side="right")
        return np.bincount(places, minlength=len(edges) - 1)


def range_text(data: Tensor) -> str:
    """Format a range and the count of non-finite numbers: `-1.2 to 3.4; 12 NaN or infinite`."""
    finite = data.isfinite()
    n_bad = data.numel() - int(finite.sum())
    bad = f"{n_bad:,} NaN or infinite" if n_bad else ""
    if n_bad == data.numel():
        return f"all {bad}"
    held = data[finite] if n_bad else data
    low, high = float(held.min()), float(held.max())
    text = f"all {measure(low)}" if low == high else f"{measure(low)} to {measure(high)}"
    return "; ".join(filter(None, [text, bad]))


def some_of(items: list[Any], n: int) -> list[Any]:
    """Choose at most n items, evenly spaced, the first and the last included."""
    if len(items) <= n:
        return items
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def shown(text: str) -> str:
    """Escape all characters that do not print, newlines included.

    >>> print(shown("a\\nb"))
    a\\nb
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def short(text: str, most: int) -> str:
    """Shorten a text by cutting out its middle, because paths differ at their ends."""
    text = shown(text)
    if len(text) <= most:
        return text
    tail = (most - 1) * 2 // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def share_text(shown: int, total: int, one: str, many: str | None = None) -> str:
    """Format a share as `64 of 512 channels`, or `64 channels` if all are shown."""
    whole = plural(total, one, many)
    return whole if shown == total else f"{shown:,} of {whole}"
