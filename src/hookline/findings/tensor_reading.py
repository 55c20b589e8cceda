"""Read the numbers of a tensor that findings need, in few passes over it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.statistics.channel_dim import channel_dim
from hookline.statistics.finiteness import detach_local_numbers
from hookline.statistics.flat_numbers import sum_of_squares, to_float64
from hookline.util.view_as_array import view_as_array

_N_SAMPLED = 1024  # elements, at least, whose quartiles tell the spread without outliers
_COARSE = 1e-3  # of the squared mean
_TINY = 1e-30  # a mean of squares, of which float32 has all digits
_QUARTILES = 1.349  # the distance of the quartiles of normal numbers, in standard deviations
_PRIMES = (1999, 997, 499, 251, 127, 61, 31, 17, 7, 3)  # strides of samples
_LEAST_ROWS = 8  # rows of an attention map; with fewer, one key takes all by chance
_SATURATED = 0.999  # a softmax whose largest share is above it has no gradient
_SUM_ERROR = 0.02


@final
@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one tensor."""

    shape: tuple[int, ...]  # its shape
    dtype: torch.dtype  # its dtype
    numel: int  # the number of elements
    n_nan: int = 0  # the number of NaNs
    n_inf: int = 0  # the number of positive infinities
    # The number of elements that stand for minus infinity: -inf, or close to the least number of
    # the dtype. Masks are made of them.
    n_masked: int = 0
    # The mean of the other elements; NaN without any, as for the numbers below.
    mean: float = math.nan
    std: float = math.nan  # their standard deviation
    # The same by the quartiles of a sample, which single outliers do not change.
    spread: float = math.nan
    low: float = math.nan  # their least
    high: float = math.nan  # their greatest
    zeros: int = 0  # the number of elements that are exactly zero; 0 also if a sample has none
    # The indices of the channels that are all zero, if some are and others are not.
    dead: tuple[int, ...] = ()
    n_channels: int = 0  # the number of channels
    per_channel: int = 0  # the number of elements of a channel
    # Of attention weights the share of rows in which one key has all the weight; None for other
    # values.
    saturated: float | None = None
    digest: int = 0  # equal for tensors of equal numbers

    @property
    def n_bad(self) -> int:
        """The number of NaNs and positive infinities."""
        return self.n_nan + self.n_inf

    @property
    def is_zero(self) -> bool:
        """Tell whether every element is exactly zero."""
        return self.zeros == self.numel > 0

    @property
    def rms(self) -> float:
        """The root of the mean square."""
        return math.hypot(self.mean, self.std)


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """One tensor of a run in firing order, with its numbers."""

    site: str  # the site as in a look-up, with the leaf
    path: str  # the path of the module or parameter
    port: str  # the port
    leaf: str  # the leaf as text
    module_type: str  # the class of the module
    call: int  # the number of the module's call in the pass
    numbers: Numbers  # the numbers

    @property
    def is_floating(self) -> bool:
        """Tell whether the tensor holds floating-point numbers."""
        return self.numbers.dtype.is_floating_point


def measure_numbers(tensor: Tensor, module_type: str) -> Numbers:
    """Read the numbers of a tensor.

    Args:
        tensor: a tensor with data.
        module_type: the class of its module, which says where the channels are.

    Raises:
        RuntimeError: torch cannot read the numbers.
    """
    plain, dtype = detach_local_numbers(tensor).resolve_neg(), tensor.dtype
    shape = tuple(plain.shape if tensor.is_nested else tensor.shape)
    if plain.is_complex():
        plain = plain.abs()
    if not plain.is_floating_point() or not plain.numel():
        return Numbers(shape, dtype, plain.numel())
    wide = plain if plain.dtype in (torch.float32, torch.float64) else plain.float()
    low, high = map(float, torch.aminmax(wide))
    floor = torch.finfo(dtype if dtype.is_floating_point else torch.float32).min / 4
    known = Numbers(shape, dtype, wide.numel(), low=low, high=high)
    if low > floor and high < math.inf:  # false if a number is NaN
        return _measure_finite(wide, known, module_type)
    is_kept = wide.isfinite() & (wide > floor)
    kept, n_nan = wide[is_kept], int(wide.isnan().sum())
    n_inf = int((wide == math.inf).sum())
    n_masked = wide.numel() - n_nan - n_inf - len(kept)
    counts = Numbers(shape, dtype, wide.numel(), n_nan=n_nan, n_inf=n_inf, n_masked=n_masked)
    if not len(kept):
        return counts
    mean, std = _mean_and_std(kept)
    return replace(
        counts,
        mean=mean,
        std=std,
        spread=_spread_by_quartiles(_sample_elements(kept)),
        low=float(kept.min()),
        high=float(kept.max()),
        zeros=len(kept) - int(kept.count_nonzero()),
    )


def _measure_finite(wide: Tensor, known: Numbers, module_type: str) -> Numbers:
    """Read the numbers of a tensor whose elements are all finite."""
    mean, std = _mean_and_std(wide.reshape(-1))
    sample = _sample_elements(wide)
    # A sample without a zero has no dead channel, so that counting all elements is not needed.
    zeros = 0 if sample.all() else known.numel - int(wide.count_nonzero())
    dim = channel_dim(wide.dim(), module_type) if 0 < zeros < known.numel else None
    n_channels = 0 if dim is None else wide.shape[dim]
    return replace(
        known,
        mean=mean,
        std=std,
        spread=_spread_by_quartiles(sample),
        zeros=zeros,
        dead=() if dim is None or zeros * n_channels < known.numel else _dead_channels(wide, dim),
        n_channels=n_channels,
        per_channel=known.numel // n_channels if n_channels else 0,
        saturated=_saturated_share(wide, known),
        digest=hash((known.low, known.high, sample.tobytes())),
    )


def _mean_and_std(finite: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation of finite numbers in one dimension.

    torch.var_mean takes twenty times as long on the CPU.
    """
    count, mean = len(finite), float(finite.mean())
    squares = float(sum_of_squares(finite)) / count
    if not _TINY < squares < math.inf:  # they overflow or vanish
        unit = float(finite.abs().max())
        if not unit:
            return 0.0, 0.0
        mean, std = _mean_and_std(to_float64(finite) / unit)
        return mean * unit, std * unit
    variance = squares - mean * mean
    if variance <= _COARSE * mean * mean:  # the difference of squares has few digits
        deviations = finite - mean
        variance = float(sum_of_squares(deviations)) / count
    return mean, math.sqrt(max(variance, 0.0))


def _dead_channels(tensor: Tensor, dim: int) -> tuple[int, ...]:
    dims = [other for other in range(tensor.dim()) if other != dim]
    return tuple(tensor.abs().amax(dims).eq(0).nonzero().flatten().tolist())


def _sample_elements(tensor: Tensor) -> NDArray[Any]:
    """Return some elements, evenly spaced in memory, and over the indices of each dimension."""
    elements = tensor.reshape(-1)
    wanted = len(elements) // _N_SAMPLED
    stride = next((p for p in _PRIMES if p <= wanted and len(elements) % p), 1)
    sample: NDArray[Any] = view_as_array(elements[: stride * _N_SAMPLED : stride].cpu())
    return sample


def _spread_by_quartiles(sample: NDArray[Any]) -> float:
    ordered = np.sort(sample)
    return float(ordered[3 * len(ordered) // 4] - ordered[len(ordered) // 4]) / _QUARTILES


def _saturated_share(tensor: Tensor, known: Numbers) -> float | None:
    """Return the share of saturated rows of attention weights; None for what is no such map."""
    is_map = tensor.dim() >= 3 and tensor.shape[-1] > 1 and tensor.shape[-2] >= _LEAST_ROWS
    if not is_map or known.low < 0 or not 0 < known.high <= 1 + _SUM_ERROR:
        return None
    first = tensor.reshape(-1, tensor.shape[-1])[:_LEAST_ROWS].sum(-1)
    if float((first - 1).abs().max()) > _SUM_ERROR:
        return None
    # The first queries of a causal map see few keys.
    rows = tensor[..., _LEAST_ROWS // 2 :, :]
    return float((rows.amax(-1) > _SATURATED).float().mean())
