"""Tell whether tensors are finite: by deferred sums while the model trains, exactly afterwards.

No NaN and no infinity vanishes in a sum. A sum of finite numbers may overflow, so a sum that is not
finite is a suspicion, and no more.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from enum import Flag
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import UninitializedBuffer, UninitializedParameter

from hookline.engine import has_numbers, innermost, is_wrapped, local_part
from hookline.engine.pytree import tree
from hookline.statistics import Moments

# Sums of these overflow, or lose their digits, unless they are added up in float32.
_WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
# torch's own is_lazy cannot be part of a compiled graph.
_LAZY = (UninitializedBuffer, UninitializedParameter)

Measure = Callable[[Any], Tensor | None]


class Kind(Flag):
    """The kinds of numbers that are not finite."""

    NONE = 0
    NAN = 1
    INF = 2
    MINUS_INF = 4


def total(value: Any) -> Tensor | None:
    """Return a number that is not finite if any number of a value is not; None without numbers."""
    if type(value) is Tensor and value.dtype is torch.float32 and value.layout is torch.strided:
        return value.detach().sum()
    sums = [_sum(tensor) for _, tensor in tree.tensors(value) if is_measurable(tensor)]
    if not sums:
        return None
    if len(sums) == 1:
        return sums[0]
    first = sums[0].device
    parts = [torch.view_as_real(one).sum() if one.is_complex() else one for one in sums]
    return torch.stack([one.to(first, torch.float32) for one in parts]).sum()


def total_nan(value: Any) -> Tensor | None:
    """Do the same for a site where infinities are meant: only a NaN makes the number not finite."""
    plain = [local_part(one) for _, one in tree.tensors(value) if is_measurable(one)]
    return total([torch.nan_to_num(one.detach(), torch.nan, 0.0, 0.0) for one in plain])


def without_infinity(number: Tensor) -> Tensor:
    """Return a number with 0 in place of an infinity, and a NaN as it is."""
    return torch.nan_to_num(number, torch.nan, 0.0, 0.0)


def extremes(value: Any) -> Tensor | None:
    """Do the same for a site where sums overflow; it takes twice the time, and is exact."""
    plain = [flat(one) for _, one in tree.tensors(value) if is_measurable(one) and one.numel()]
    real = [torch.view_as_real(one) if one.is_complex() else one for one in plain]
    # Zero times an infinity or a NaN is a NaN.
    return total([torch.stack(torch.aminmax(one.float() if one.dtype not in _WIDE else one)) * 0.0
                  for one in real])  # fmt: skip


def beside_masks(value: Any) -> Tensor | None:
    """Do the same for a site where -inf may be meant: NaN and infinity count, -inf does not."""
    plain = [flat(one) for _, one in tree.tensors(value) if is_measurable(one)]
    return extremes([torch.nan_to_num(one, torch.nan, torch.inf, 0.0) for one in plain])


def transformed(measure: Measure, value: Any) -> Tensor | None:
    """Measure a value inside a transform of torch.func: all examples of a batch together."""
    number = measure([innermost(one.detach()) for _, one in tree.tensors(value)])
    return None if number is None else innermost(number)


def is_measurable(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers that may be infinite."""
    is_number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    is_there = has_numbers(tensor) and not isinstance(tensor, _LAZY)
    if not is_number or not is_there or tensor.is_quantized:
        return False
    return is_dynamo_compiling() or not is_wrapped(tensor)  # no graph holds a wrapped tensor


def flat(tensor: Tensor) -> Tensor:
    """Return the numbers that a tensor holds on this rank, without their graph."""
    tensor = local_part(tensor.detach())
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # for float8, torch has few operations
    if tensor.layout is torch.strided and not tensor.is_nested:
        return tensor
    if tensor.is_nested and tensor.layout is torch.strided:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def _sum(tensor: Tensor) -> Tensor:
    plain = flat(tensor)
    return plain.sum() if plain.dtype in _WIDE else plain.sum(dtype=torch.float32)


def are_finite(sums: Sequence[Tensor]) -> list[bool]:
    """Read many numbers at once: one transfer for each device and dtype.

    Returns:
        For each number, whether it is finite. An empty list if all are.
    """
    groups: dict[Any, list[int]] = {}
    for index, one in enumerate(sums):
        groups.setdefault((one.dtype, one.device), []).append(index)
    found = [True] * len(sums)
    with torch.no_grad():
        for (_, device), members in groups.items():
            if device.type == "meta":
                continue
            finite = torch.stack([sums[index] for index in members]).isfinite()
            if not finite.all():
                for index, is_finite in zip(members, finite.tolist(), strict=True):
                    found[index] = is_finite
    return [] if all(found) else found


def kinds_in(tensor: Tensor) -> Kind:
    """Return the kinds of numbers in a tensor that are not finite; exact."""
    if not is_measurable(tensor) or not tensor.numel():
        return Kind.NONE
    plain = flat(tensor)
    if plain.isfinite().all():
        return Kind.NONE
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    found = Kind.NAN if plain.isnan().any() else Kind.NONE
    found |= Kind.INF if (plain == torch.inf).any() else Kind.NONE
    return found | (Kind.MINUS_INF if (plain == -torch.inf).any() else Kind.NONE)


def all_kinds(kinds: Iterable[Kind]) -> Kind:
    """Return several kinds as one."""
    return functools.reduce(operator.or_, kinds, Kind.NONE)


def counted(tensor: Tensor) -> tuple[int, int]:
    """Return the number of NaNs and of infinities in a tensor.

    A complex number counts once, and a sparse tensor by the values that it holds.
    """
    plain = flat(tensor)
    n_nan = int(plain.isnan().sum())
    return n_nan, int((~plain.isfinite()).sum()) - n_nan


def moments(tensor: Tensor) -> Moments:
    """Measure the numbers of a tensor; those of a complex tensor as real and imaginary parts."""
    plain = flat(tensor)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    wide = plain if plain.dtype in (torch.float32, torch.float64) else plain.double()
    return Moments.of(wide.cpu().numpy())
