"""Write a value as small maps of numbers, which the page's script colours and reads out."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hookline.views.page.what_to_draw import Choice, arrange_sample
from hookline.views.pixels import finite_range, scale_to_unit, shrink, shrink_table
from hookline.views.plots.arrange_value import pick_channels

_MOST_HEADS = 32
_LEAST_TOKENS = 4
_SUM_ERROR = 0.02
_DIGITS = 6


class MapLimits(NamedTuple):
    """The most that is kept of a value."""

    maps: int  # channels
    side: int  # the longest side of a channel
    table: tuple[int, int]  # rows and columns
    bits: int  # of a number; the highest code stands for NaN and infinity


# In a file; pictures there are many. The server sends one at a time.
IN_FILE = MapLimits(8, 28, (96, 160), 8)
ASKED_FOR = MapLimits(16, 64, (160, 480), 16)


def quantised_maps(
    tensor: Tensor, module_type: str, choice: Choice, limits: MapLimits
) -> dict[str, Any]:
    """Return one sample of a value as maps: channels, the heads of attention, or one table.

        >>> maps = quantised_maps(torch.rand(2, 3, 4, 4), "Conv2d", Choice(), IN_FILE)
        >>> maps["kind"], len(maps["tiles"]), maps["samples"]
        ('channels', 3, 2)

    Channels come in the order of the choice, from `first` on, and heads by their number.

    Args:
        tensor: the value.
        module_type: the class of its module, which says where channels are.
        choice: the sample, and the order of channels, or the channels of another value.
        limits: what is kept.

    Raises:
        InputError: the value cannot be drawn; the first line says why.
        RuntimeError, TypeError: torch cannot read the numbers.
    """
    made, n_samples = arrange_sample(tensor, module_type, choice.sample)
    data = made.data.double()
    if len(made.space) < 2 or data[0].numel() == 1:
        rows = data.reshape(len(data), -1).T
        maps = quantise([(0, shrink_table(rows, limits.table))], limits.bits)
        kind, of, first = "table", 1, 0
    else:
        kind = "heads" if _are_attention_weights(data) else "channels"
        rows, of = data[0], len(data)
        first = min(choice.first, of - 1) // limits.maps * limits.maps if kind == "channels" else 0
        channels = list(choice.channels) or _choose_channels(
            data, kind, choice.order, limits.maps, first
        )
        kept = [channel for channel in channels if channel < of]
        maps = quantise([*zip(kept, shrink(data[kept], limits.side), strict=True)], limits.bits)
    return maps | {
        "kind": kind, "rows": rows.shape[0], "columns": rows.shape[1],
        "of": of, "sample": choice.sample, "samples": n_samples,
        "down": "sample" if made.space == "N" else "row",
        "order": choice.order, "first": first,
        # A volume is drawn as one slice of it: `slice D = 4 of 9`.
        "slice": ", ".join(part for part in made.text.split(", ") if part.startswith("slice ")),
    }  # fmt: skip


def quantise(maps: Sequence[tuple[int | str, Tensor]], bits: int) -> dict[str, Any]:
    """Write maps of one size as codes, each from its least to its greatest finite number.

    The ends `lo` and `hi` of a map without a finite number are None.

        >>> quantise([("norm", torch.eye(2))], 8)["tiles"][0]["hi"]
        1.0

    Args:
        maps: the maps, each with its channel or caption, shape `(height, width)`.
        bits: the bits of a number; the highest code stands for NaN and infinity.
    """
    height, width = maps[0][1].shape
    tiles = [_quantise_map(channel, numbers, bits) for channel, numbers in maps]
    return {"h": height, "w": width, "bits": bits, "tiles": tiles}


def channels_of_maps(maps: dict[str, Any]) -> tuple[int, ...]:
    """Return the channels of maps, so that those of another value can be the same."""
    return () if maps["kind"] == "table" else tuple(tile["c"] for tile in maps["tiles"])


def choose_same_channels(choice: Choice, maps: dict[str, Any] | None) -> Choice:
    """Return a choice of the same channels as the maps of another value; of any without maps."""
    return choice if maps is None else replace(choice, channels=channels_of_maps(maps))


def _are_attention_weights(data: Tensor) -> bool:
    """Tell whether maps are attention weights: every row of a query sums to 1."""
    n_queries, n_keys = data.shape[1:]
    if len(data) > _MOST_HEADS or n_queries < _LEAST_TOKENS or n_keys < _LEAST_TOKENS:
        return False
    is_share = bool((data >= 0).all()) and bool((data <= 1 + _SUM_ERROR).all())
    return is_share and float((data.sum(-1) - 1).abs().max()) <= _SUM_ERROR


def _choose_channels(data: Tensor, kind: str, order: str, n_maps: int, first: int) -> list[int]:
    if kind == "heads":
        return list(range(len(data)))
    if order != "largest":
        return pick_channels(data, order, None, "the value")[first : first + n_maps]
    sizes = data.abs().nan_to_num(torch.inf).amax((1, 2))
    channels: list[int] = sizes.argsort(descending=True, stable=True).tolist()
    return channels[first : first + n_maps]


def _quantise_map(channel: int | str, numbers: Tensor, bits: int) -> dict[str, Any]:
    array = numbers.cpu().numpy()
    top = 2**bits - 1
    is_finite = np.isfinite(array)
    low, high = finite_range(array)
    codes = np.full(array.shape, top, np.uint8 if bits == 8 else "<u2")
    codes[is_finite] = np.round(scale_to_unit(array[is_finite], low, high) * (top - 1))
    text = base64.b64encode(codes.tobytes()).decode("ascii")
    ends = [float(f"{end:.{_DIGITS}g}") if is_finite.any() else None for end in (low, high)]
    return {"c": channel, "lo": ends[0], "hi": ends[1], "q": text}
