"""Tell whether two ways of running one change agree up to rounding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hookline.engine.pytree import tree
from hookline.verbs.sweep.rows_per_change import batching_tolerance

_PART = 0.001  # of the effect, by which two ways may differ
_N_EPS = 4  # of the size of a metric, by which rounding moves it


def is_same_number(a: float, b: float) -> bool:
    """Tell whether two numbers are equal; NaN is NaN."""
    return a == b or (math.isnan(a) and math.isnan(b))


def numbers_agree(number: float, plain: float, base: float, output: Any) -> bool:
    """Tell whether two metrics of one change differ by a small part of its effect.

    Args:
        number: the metric of the change, measured in the other way.
        plain: its metric in a whole forward.
        base: the metric without a change.
        output: an output, which has the dtype.
    """
    if is_same_number(number, plain):
        return True
    dtype = next(
        iter(_floating_tensors(output).values()), torch.empty(0, dtype=torch.float64)
    ).dtype
    rounding = _N_EPS * torch.finfo(dtype).eps * max(abs(plain), abs(base))
    return abs(number - plain) <= _PART * abs(plain - base) + rounding


def outputs_agree(output: Any, plain: Any, base: Any) -> bool:
    """Tell whether two outputs of one change agree, where their metric is a difference of them.

    Each element has its own scale, so that a large constant, as of a masked class, allows nothing.
    But where a value is small by chance, rounding moves it as it moves its neighbours.

    Args:
        output: the output of the change, of the other way.
        plain: its output in a whole forward.
        base: the output without a change.
    """
    parts, others, bases = (
        _floating_tensors(output),
        _floating_tensors(plain),
        _floating_tensors(base),
    )
    return bool(parts) and all(
        leaf in others
        and leaf in bases
        and tensor.shape == others[leaf].shape == bases[leaf].shape
        and _tensors_agree(tensor, others[leaf], bases[leaf])
        for leaf, tensor in parts.items()
    )


def _floating_tensors(output: Any) -> dict[Any, Tensor]:
    tensors = tree.tensors(output)
    return {leaf: t for leaf, t in tensors if t.is_floating_point() and t.numel()}


def _tensors_agree(output: Tensor, plain: Tensor, base: Tensor) -> bool:
    """Compare each vector along the last dimension by itself: a change often moves a few alone."""
    error, most = batching_tolerance(output.dtype), torch.finfo(output.dtype).max
    dtype = torch.promote_types(output.dtype, torch.float32)
    output, plain, base = (
        (t if t.dim() else t[None]).to(dtype).clamp(-most, most) for t in (output, plain, base)
    )
    gap, effect = (
        _absolute_difference(output, plain),
        torch.maximum(_absolute_difference(output, base), _absolute_difference(plain, base)),
    )
    effect = effect.masked_fill(effect.isinf() & (gap == 0), 0)  # NaN allows nothing beside it
    varies = effect > 0
    size = torch.maximum(plain.abs(), base.abs())
    usual = size.where(varies, math.nan).nanmedian(-1, keepdim=True).values
    scale = torch.maximum(size, usual).clamp(min=torch.finfo(dtype).tiny)
    n = varies.sum(-1).clamp(min=1)
    gaps, effects = (
        ((part / scale).where(varies, 0).square().sum(-1) / n).sqrt() for part in (gap, effect)
    )
    return bool(((gaps < math.inf) & (gaps <= _PART * effects + error)).all())


def _absolute_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return how far the elements of two tensors lie apart, infinitely if one of them is NaN."""
    are_same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().masked_fill(are_same, 0).nan_to_num(math.inf, posinf=math.inf)


def may_be_rounding(number: float, plain: float, output: Any) -> bool:
    """Tell whether rounding may lie between two metrics whose outputs are not both known.

    Args:
        number: a metric.
        plain: the other one.
        output: an output, whose usual size is what rounding grows with.
    """
    for tensor in _floating_tensors(output).values():
        size = max(abs(plain), float(tensor.abs().float().flatten().nanmedian()))
        return (
            is_same_number(number, plain)
            or abs(number - plain) <= batching_tolerance(tensor.dtype) * size
        )
    return is_same_number(number, plain)
