"""What is drawn of large values: areas, ranges, orders, counts."""

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
from hookline.views.plots.checks import check_count
from hookline.views.statistics import Statistics, pieces, site_statistics

Array = npt.NDArray[Any]

# Of a share this large the extremes may be cut off, where many values have one scale of colours.
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
    """Maps of at most so many elements along each side: each new one is the mean of an area.

    Args:
        maps: shape `(channels, height, width)` or `(channels, length)`.
        largest: the most that a side may have.
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
    """A table of at most so many rows and columns: each cell is the mean of an area."""
    height, width = (min(side, most) for side, most in zip(table.shape, largest, strict=True))
    if (height, width) == table.shape:
        return table
    return adaptive_avg_pool2d(table[None, None], (height, width))[0, 0]


def order_of(data: Tensor, order: str | Iterable[int], n: int | None, label: str) -> list[int]:
    """The numbers of the channels to draw, in order.

    Args:
        data: shape `(channels, *space)`.
        order: "index", or "mean", "std" or "max" for the largest first; or the numbers themselves.
        n: at most so many; None is all. Of numbers that are given, all are drawn.
        label: the site, for messages.

    Raises:
        InputError: there is no such order, or no such channel.
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
            raise InputError("the list of channels is empty; name at least one.")
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
    """The range of colours for numbers; NaN and infinity are left out.

    Args:
        data: the numbers.
        robust: cut off the outermost half percent, so that one outlier does not hide the rest.
        signed: centre at zero; None does so where there are negative numbers.
    """
    finite = data[data.isfinite()]
    if not finite.numel():
        return Scale(0.0, 1.0, bool(signed))
    low, high = float(finite.min()), float(finite.max())
    if signed is None:
        signed = low < 0
    cuts = False
    if robust and finite.numel() > 1000:
        # Of millions of numbers every k-th tells as much.
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
    """Ends of an axis for a number that is alone: half above and below, or more of a large one."""
    reach = max(0.5, abs(number) * 1e-3)
    return max(number - reach, -sys.float_info.max), min(number + reach, sys.float_info.max)


def histogram(tensor: Tensor, bins: int) -> tuple[Array, Array, Statistics]:
    """How many elements lie in each of equal bins from the least to the greatest finite one.

    The same numbers as `numpy.histogram` of the finite elements in float64, read in pieces.

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
    # Halved where the range itself would overflow.
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
    """The range of the numbers, and how many are not finite: `-1.2 to 3.4; 12 NaN or infinite`."""
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
    """At most n of the items, evenly spaced, the first and the last among them."""
    if len(items) <= n:
        return items
    return [items[round(k * (len(items) - 1) / max(n - 1, 1))] for k in range(n)]


def shown(text: str) -> str:
    """A text as it can be seen: what is not printable (a line break, a mark of direction) escaped.

    >>> print(shown("a\\nb"))
    a\\nb
    """
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def short(text: str, most: int) -> str:
    """A text without its middle if it is longer: what tells paths apart is their end."""
    text = shown(text)
    if len(text) <= most:
        return text
    tail = (most - 1) * 2 // 3
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"


def share_text(shown: int, total: int, one: str, many: str | None = None) -> str:
    """`64 of 512 channels`, or `64 channels` where that is all."""
    whole = plural(total, one, many)
    return whole if shown == total else f"{shown:,} of {whole}"
