"""The moments of tensors, computed on their device."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

from hookline.statistics.elements import (
    CHUNK_NUMEL,
    check_has_data,
    chunks,
    real64,
    slot_device,
    strided,
)
from hookline.statistics.moments import Moments

# The slots: count, non-finite, zeros, the sums of x, x² and x⁴, then the greatest -x and x.
# The first six add up; of the last two the greater one counts.
_N_SUMS = 6


@final
class MomentsStatistic:
    """A `Statistic` whose result is `Moments`."""

    def start(self, value: Tensor) -> Tensor:
        """Return empty slots on the value's device."""
        empty = [0.0] * _N_SUMS + [-math.inf] * 2
        return torch.tensor(empty, dtype=torch.float64, device=slot_device(value))

    @torch.no_grad()
    def update(self, slots: Tensor, value: Tensor) -> Tensor:
        """Return the slots with one more value.

        Raises:
            StructureError: the value is a meta tensor.
            RuntimeError: torch cannot read the tensor's numbers.
        """
        check_has_data(value)
        for part in strided(value):
            pieces = [part] if torch.compiler.is_compiling() else chunks(part, CHUNK_NUMEL)
            for piece in pieces:
                if piece.numel():
                    slots = self.merge(slots, _measure(real64(piece).reshape(-1)))
        return slots

    def merge(self, slots: Tensor, other: Tensor) -> Tensor:
        """Add up two sets of slots."""
        sums = slots[:_N_SUMS] + other[:_N_SUMS]
        return torch.cat([sums, torch.maximum(slots[_N_SUMS:], other[_N_SUMS:])])

    def result(self, slots: Tensor) -> Moments:
        """Read slots."""
        count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
        return Moments(
            int(count), int(non_finite), int(zeros), sum1, sum2, sum4, -negated_min, greatest
        )


def _measure(values: Tensor) -> Tensor:
    """Measure flat float64 numbers, at least one of them."""
    clean = values.nan_to_num(0.0, 0.0, 0.0)
    squares = clean * clean
    lowest = -math.inf
    sums = [
        torch.full((), values.numel(), dtype=torch.float64, device=values.device),
        (clean != values).sum(),
        (values == 0).sum(),
        clean.sum(),
        squares.sum(),
        (squares * squares).sum(),
        (-values).nan_to_num(lowest, lowest, lowest).amax(),
        values.nan_to_num(lowest, lowest, lowest).amax(),
    ]
    return torch.stack([one.to(torch.float64) for one in sums])
