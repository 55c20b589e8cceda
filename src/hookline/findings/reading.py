"""Read the numbers of a tensor that findings need: few passes over it, and no copy of it is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.statistics.finiteness import flat

_N_SAMPLED = 4096  # elements whose median tells the spread without outliers
_N_DIGESTED = 64  # elements that tell values apart
_NORMAL = 1.4826  # the standard deviation of normal numbers by their median deviation
_LEAST_ROWS = 8  # rows of an attention map; with fewer, one key takes all by chance
_SATURATED = 0.999  # a softmax whose largest share is above it has no gradient
_SUM_ERROR = 0.02
_CHANNELS_FIRST = ("Conv", "BatchNorm", "GroupNorm", "InstanceNorm")


@final
@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of one tensor.

    Args:
        shape: its shape.
        dtype: its dtype.
        numel: the number of elements.
        n_nan: the number of NaNs.
        n_inf: the number of positive infinities.
        n_masked: the number of elements that stand for minus infinity: -inf, or close to the
            least number of the dtype. Masks are made of them.
        mean: the mean of the other elements; NaN without any, as for the numbers below.
        std: their standard deviation.
        spread: their spread by the median of a sample, which single outliers do not change.
        low: their least.
        high: their greatest.
        zeros: the number of elements that are exactly zero.
        dead: the indices of the channels that are all zero, if some are and others are not.
        n_channels: the number of channels.
        per_channel: the number of elements of a channel.
        saturated: of attention weights the share of rows in which one key has all the weight; None
            for other values.
        digest: equal for tensors of equal numbers.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    numel: int
    n_nan: int = 0
    n_inf: int = 0
    n_masked: int = 0
    mean: float = math.nan
    std: float = math.nan
    spread: float = math.nan
    low: float = math.nan
    high: float = math.nan
    zeros: int = 0
    dead: tuple[int, ...] = ()
    n_channels: int = 0
    per_channel: int = 0
    saturated: float | None = None
    digest: int = 0

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
    """One tensor of a run in firing order, with its numbers.

    Args:
        site: the site as in a look-up, with the leaf.
        path: the path of the module or parameter.
        port: the port.
        leaf: the leaf as text.
        module_type: the class of the module.
        call: the number of the module's call in the pass.
        numbers: the numbers.
    """

    site: str
    path: str
    port: str
    leaf: str
    module_type: str
    call: int
    numbers: Numbers


def numbers_of(tensor: Tensor, module_type: str) -> Numbers:
    """Read the numbers of a tensor.

    Args:
        tensor: a tensor with data.
        module_type: the class of its module, which says where the channels are.

    Raises:
        RuntimeError: torch cannot read the numbers.
    """
    shape, dtype = tuple(tensor.shape), tensor.dtype
    plain = flat(tensor)
    if plain.is_complex():
        plain = plain.abs()
    if not plain.is_floating_point() or not plain.numel():
        return Numbers(shape, dtype, plain.numel(), digest=_digest(plain, 0, 0, shape))
    wide = plain if plain.dtype in (torch.float32, torch.float64) else plain.float()
    low, high = map(float, torch.aminmax(wide))
    floor = torch.finfo(dtype if dtype.is_floating_point else torch.float32).min / 4
    if low > floor and high < math.inf:  # false if a number is NaN
        return _of_finite(wide, Numbers(shape, dtype, wide.numel(), low=low, high=high), module_type)
    is_kept = wide.isfinite() & (wide > floor)
    kept, n_nan = wide[is_kept], int(wide.isnan().sum())
    n_inf = int((wide == math.inf).sum())
    counts = {"n_nan": n_nan, "n_inf": n_inf, "n_masked": wide.numel() - n_nan - n_inf - len(kept)}
    if not len(kept):
        return Numbers(shape, dtype, wide.numel(), **counts)
    std, mean = torch.var_mean(kept, correction=0)
    return Numbers(
        shape, dtype, wide.numel(), **counts, mean=float(mean), std=math.sqrt(float(std)),
        spread=_spread(kept), low=float(kept.min()), high=float(kept.max()),
        zeros=len(kept) - int(kept.count_nonzero()),
    )  # fmt: skip


def _of_finite(wide: Tensor, known: Numbers, module_type: str) -> Numbers:
    """Read the numbers of a tensor whose elements are all finite."""
    variance, mean = map(float, torch.var_mean(wide, correction=0))
    if not math.isfinite(variance):  # the squares overflow
        variance = float(torch.var(wide.double(), correction=0))
    zeros = 0 if known.low > 0 or known.high < 0 else wide.numel() - int(wide.count_nonzero())
    shape, n_channels, dim = known.shape, 0, None
    if zeros and zeros < wide.numel():
        dim = _channel_dim(wide, module_type)
        n_channels = 0 if dim is None else wide.shape[dim]
    dead: tuple[int, ...] = ()
    if dim is not None and zeros * n_channels >= wide.numel():
        dims = [other for other in range(wide.dim()) if other != dim]
        dead = tuple((wide == 0).all(dims[0]).nonzero().flatten().tolist()) if len(dims) == 1 else (
            tuple(torch.amax(wide.abs(), dims).eq(0).nonzero().flatten().tolist())
        )
    return Numbers(
        shape, known.dtype, known.numel, mean=mean, std=math.sqrt(variance), spread=_spread(wide),
        low=known.low, high=known.high, zeros=zeros, dead=dead, n_channels=n_channels,
        per_channel=wide.numel() // n_channels if n_channels else 0,
        saturated=_saturated(wide, known), digest=_digest(wide, known.low, known.high, shape),
    )  # fmt: skip


def _channel_dim(tensor: Tensor, module_type: str) -> int | None:
    """Return the dimension of channels: 1 of images, else the last one."""
    if tensor.dim() < 2:
        return None
    if module_type.startswith(_CHANNELS_FIRST) and module_type != "Conv1D":
        return 1
    if module_type == "Linear" or module_type.endswith(("LayerNorm", "RMSNorm")):
        return tensor.dim() - 1
    return 1 if tensor.dim() == 4 else tensor.dim() - 1


def _sample(tensor: Tensor, count: int) -> Tensor:
    """Return about so many elements, evenly spaced in memory order."""
    elements = tensor.reshape(-1)
    return elements[:: max(len(elements) // count, 1) | 1][:count]


def _spread(tensor: Tensor) -> float:
    sample = _sample(tensor, _N_SAMPLED)
    return _NORMAL * float((sample - sample.median()).abs().median())


def _saturated(tensor: Tensor, known: Numbers) -> float | None:
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


def _digest(tensor: Tensor, low: float, high: float, shape: Sequence[int]) -> int:
    numbers: Any = _sample(tensor, _N_DIGESTED).tolist()
    return hash((*shape, low, high, *numbers))
