"""Noise floors: how large each of the four numbers gets by rounding alone.

The floors by dtype are multiples of the dtype's eps. The largest multiples that clean copies of
twelve models showed (GPT-2, Llama, BERT, T5, Mixtral, Gemma 2, ViT, ResNet-18 and -50, MobileNet,
DenseNet; float32 against float64, scaled-dot-product against eager attention, bfloat16 and float16
against float32; 75 to 433 sites each):

                            relative   norm   row    element
    outputs, float32        9          2.1    65     53
    outputs, 16 bits        2.4        0.8    15     16
    gradients, float32      42         8      253    534
    gradients, 16 bits      159        10     2,990  5,660

Trained weights and compiled code gave up to 33 in float32 and 4.5 in 16 bits. Two models are
outside: in float16, gradients of a MobileNet vanish without a loss scale; and a ReLU near zero may
pass a gradient in one run of a DenseNet alone. Both are differences that a user wants to be told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal, final

import torch

from hookline.statistics.difference import Difference

# What a value is: "stored" values, such as weights and inputs, are rounded once, and "output" and
# "gradient" by every operation before them.
Kind = Literal["stored", "output", "gradient"]

# What a value was measured to be off by rounding, times this, is still noise.
MARGIN = 4.0

# Even in float64, models compute norms, softmax and rotary tables in float32.
_EPS = {torch.float64: 2.0**-26, torch.complex128: 2.0**-26}
_COARSEST = 0.5
FINE = 2.0**-20  # the eps of float32 is below, that of dtypes of 16 bits and fewer above

_MULTIPLES = {
    ("output", True): (64.0, 8.0, 256.0, 256.0),
    ("output", False): (8.0, 3.0, 24.0, 32.0),
    ("gradient", True): (256.0, 32.0, 2048.0, 4096.0),
    ("gradient", False): (192.0, 16.0, math.inf, math.inf),
}
_MOST = (0.75, 0.125, math.inf, math.inf)  # a larger difference is never noise
_N_MODULES = 256  # in deeper models, errors grow with the square root of the depth


@final
@dataclass(frozen=True, slots=True)
class Floor:
    """The largest numbers of a difference that rounding alone explains.

    Attributes:
        relative: the relative error.
        norm_ratio: the distance of the ratio of norms from 1.
        worst_row: the worst row.
        worst_element: the worst element.
    """

    relative: float = 0.0
    norm_ratio: float = 0.0
    worst_row: float = 0.0
    worst_element: float = 0.0

    def exceeded_by(self, gap: Difference) -> list[str]:
        """Return the names of the numbers of a difference that are above the floor."""
        # The norm of few elements is off by as much as these are.
        norm = max(self.norm_ratio, 2 * self.relative / math.sqrt(max(gap.numel, 1)))
        floors = asdict(replace(self, norm_ratio=norm))
        pairs = zip(floors.items(), four_errors(gap), strict=True)
        return [name for (name, most), number in pairs if not number <= most]


def four_errors(gap: Difference) -> tuple[float, float, float, float]:
    """Return the four numbers of a difference, each 0 for equal values."""
    return gap.relative, abs(gap.norm_ratio - 1), gap.worst_row, gap.worst_element


def estimate_floor(eps: float, kind: Kind, n_modules: int = 0) -> Floor:
    """Return the floor of values that were computed with this eps.

    Args:
        eps: the coarsest eps on the way to the value; 0 for integers, which have no noise.
        kind: what the value is.
        n_modules: how many modules without children come before it.
    """
    if kind == "stored":
        return Floor(eps, eps, eps, eps)
    if not eps:
        return Floor()
    unit = eps * math.sqrt(max(1.0, n_modules / _N_MODULES))
    pairs = zip(_MULTIPLES[kind, eps < FINE], _MOST, strict=True)
    return Floor(*(min(unit * multiple, most) for multiple, most in pairs))


def measured_floor(gap: Difference) -> Floor:
    """Return the floor of a value that rounding was measured to change by this difference."""
    return Floor(*(MARGIN * number for number in four_errors(gap)))


def eps_of(dtypes: Iterable[torch.dtype]) -> float:
    """Return the coarsest eps of dtypes; 0 for integers.

    >>> eps_of([torch.float32, torch.bfloat16, torch.int64])
    0.0078125
    """
    return max(map(_eps, dtypes), default=0.0)


def _eps(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    try:
        return _EPS.get(dtype) or torch.finfo(dtype).eps
    except NotImplementedError:  # packed dtypes of 4 bits
        return _COARSEST
