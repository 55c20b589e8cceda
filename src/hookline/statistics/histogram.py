"""Counts of numbers in fixed bins that are spaced by magnitude, and histograms of these."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.units import measure
from hookline.display.wrapped_text import replace_missing_signs
from hookline.errors import InputError
from hookline.statistics.flat_numbers import (
    SumsAndExtremes,
    check_slots,
    flat_chunks,
    negated_min_and_max,
    numeric_strided_parts,
    to_real_float,
)

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 64
_CHUNK_NUMEL = 2**16  # elements whose bins stay in a core's cache

# What the bits of a float64 and of a float32 are: the integer, its mantissa's length, the exponent
# of 1, and the bits of infinity.
_LAYOUTS = {
    torch.float64: (torch.int64, 52, 1023, 0x7FF0_0000_0000_0000),
    torch.float32: (torch.int32, 23, 127, 0x7F80_0000),
}


@final
@dataclass(frozen=True)
class Histogram:
    """The counts of elements between fixed edges: the result of `histogram()`.

        >>> statistic = hl.stats.histogram(low=1, high=4)
        >>> x = torch.tensor([0.5, 2.0, 3.0])
        >>> result = statistic.result(statistic.update(statistic.start(x), x))
        >>> result.edges
        (-inf, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, inf)
        >>> result.counts
        (0, 0, 0, 0, 1, 0, 2, 0)

    `count` is the number of all elements. `finite_bins()` returns counts and finite edges to draw.

    Args:
        counts: the number of elements in each bin, without zeros and non-finite ones.
        edges: the edges, one more than there are bins, from -inf over 0 to inf. A bin includes the
            edge that is nearer to 0.
        zeros: how many elements are exactly 0.
        non_finite: how many are NaN or infinite.
        min: the smallest finite element; inf without any.
        max: the greatest finite element; -inf without any.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    zeros: int
    non_finite: int
    min: float
    max: float

    @property
    def count(self) -> int:
        """The number of elements."""
        return sum(self.counts) + self.zeros + self.non_finite

    def finite_bins(self) -> tuple[list[int], list[float]]:
        """Return the bins from the first to the last that hold a number, with finite edges.

        Zeros count in the bin below 0. An edge at infinity becomes the extreme of the numbers.

        Returns:
            The counts, and the edges, one more.
        """
        counts = list(self.counts)
        counts[self.edges.index(0.0) - 1] += self.zeros
        filled = [place for place, count in enumerate(counts) if count]
        if not filled:
            return [], []
        edges = list(self.edges[filled[0] : filled[-1] + 2])
        if math.isinf(edges[0]):
            edges[0] = min(self.min, math.nextafter(edges[1], -math.inf))
        if math.isinf(edges[-1]):
            edges[-1] = max(self.max, math.nextafter(edges[-2], math.inf))
        return counts[filled[0] : filled[-1] + 1], edges

    def __str__(self) -> str:
        filled = [place for place, count in enumerate(self.counts) if count]
        text = f"{self.count:,} elements, {self.zeros:,} zeros, {self.non_finite:,} non-finite"
        if not filled:
            return text
        n = filled[-1] + 1 - filled[0]
        per_bar = -(-n // _MOST_BARS)  # bins to a bar
        counts = [
            sum(self.counts[start : start + per_bar])
            for start in range(filled[0], filled[-1] + 1, per_bar)
        ]
        top = max(counts)
        bars = "".join(_BARS[-(-7 * count // top)] if count else " " for count in counts)
        ends = (measure(self.edges[place]) for place in (filled[0], filled[-1] + 1))
        return replace_missing_signs(f"{text}\n{next(ends)} {bars} {next(ends)}")


class BinnedStatistic(SumsAndExtremes):
    """Count in bins from `low` to `high` and from `-high` to `-low`, spaced by magnitude.

    Each octave, from a power of two to the next, is divided into equal bins. So the bin of a number
    is in the first bits of the number. It is exact, and the same on each device and for each dtype.

    The slots are the counts in increasing order, zero in the middle: numbers up to `-high`, the
    negative bins, numbers between `-low` and 0, zeros, and so on. Then come the count of non-finite
    numbers and the greatest -x and x. A statistic inherits from this class, and adds the result.
    """

    def __init__(self, low: float, high: float, per_octave: int) -> None:
        are_numbers = isinstance(low, int | float) and isinstance(high, int | float)
        if not (are_numbers and 2.0**-126 <= low < high <= 2.0**127):
            raise InputError(
                f"low and high must be 2**-126 <= low < high <= 2**127, got {low!r} and {high!r}."
                "\nGive magnitudes: low=1e-9, high=1e9."
            )
        if per_octave not in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
            raise InputError(
                f"per_octave must be a power of two from 1 to 1024, got {per_octave!r}."
                "\nGive per_octave=4."
            )
        self._first = math.floor(math.log2(low))
        octaves = math.ceil(math.log2(high)) - self._first
        self._bits = per_octave.bit_length() - 1  # of the mantissa
        self._n = octaves * per_octave
        self.zero: int = self._n + 2
        self.non_finite: int = 2 * self.zero + 1
        self.n_slots = self.non_finite + 1 + 2

    def edges(self) -> list[float]:
        """Return the edges from 0 up: 0, the lowest magnitude, ..., the highest one, infinity."""
        per_octave = 2**self._bits
        inner = (
            math.ldexp(1 + bin / per_octave, self._first + octave)
            for octave, bin in itertools.product(range(self._n // per_octave), range(per_octave))
        )
        highest = math.ldexp(1.0, self._first + self._n // per_octave)
        return [0.0, *inner, highest, math.inf]

    def update(self, slots: Tensor, value: Tensor) -> Tensor:
        """Return the slots with one more value."""
        check_slots(slots, self.n_slots)
        for part in numeric_strided_parts(value):
            if torch.compiler.is_compiling():
                pieces: Iterable[Tensor] = (part.reshape(-1),)
            else:
                pieces = flat_chunks(part, _CHUNK_NUMEL if part.is_cpu else None)
            for piece in pieces:
                if piece.numel():
                    slots = self._count_values(slots, to_real_float(piece))
        return slots

    def _count_values(self, slots: Tensor, values: Tensor) -> Tensor:
        unit = torch.ones((), dtype=torch.float64, device=values.device)
        slots = slots.index_add(
            0, self._bin_indices(values).to(torch.int64), unit.expand(values.shape)
        )
        greatest = torch.maximum(slots[-2:], negated_min_and_max(values, values.abs() < math.inf))
        return torch.cat([slots[:-2], greatest])

    def _bin_indices(self, values: Tensor) -> Tensor:
        """Return the place of each number among the slots, by its bits."""
        integer, mantissa, bias, infinity = _LAYOUTS[values.dtype]
        bits = values.contiguous().view(integer)
        magnitude = bits & ((1 << (8 * values.dtype.itemsize - 1)) - 1)
        offset = (bias + self._first) << self._bits
        bins = ((magnitude >> (mantissa - self._bits)) - offset).clamp(-1, self._n) + 2
        bins = torch.where(magnitude == 0, 0, bins)
        bins = self.zero + torch.where(bits < 0, -bins, bins)
        return torch.where(magnitude >= infinity, self.non_finite, bins)


@final
class HistogramStatistic(BinnedStatistic):
    """A `Statistic` whose result is a `Histogram`."""

    def __init__(self, low: float, high: float, per_octave: int) -> None:
        super().__init__(low, high, per_octave)
        self.options: dict[str, Any] = {"low": low, "high": high, "per_octave": per_octave}

    def result(self, slots: Tensor) -> Histogram:
        """Read slots."""
        check_slots(slots, self.n_slots)
        *counts, negated_min, greatest = slots.tolist()
        whole = [int(count) for count in counts]
        upper = self.edges()
        return Histogram(
            counts=(*whole[: self.zero], *whole[self.zero + 1 : self.non_finite]),
            edges=tuple(itertools.chain((-edge for edge in reversed(upper[1:])), upper)),
            zeros=whole[self.zero],
            non_finite=whole[self.non_finite],
            min=-negated_min,
            max=greatest,
        )
