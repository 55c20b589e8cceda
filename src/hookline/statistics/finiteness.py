"""Tell whether tensors are finite: by deferred sums while the model trains, exactly afterwards.

No NaN and no infinity vanishes in a sum. A sum of finite numbers may overflow, so a sum that is not
finite is only a suspicion.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from enum import Flag
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import UninitializedBuffer, UninitializedParameter

from hookline.engine import (
    has_numbers,
    is_wrapped,
    local_part,
    norms_of_each,
    unwrap_all_transforms,
)
from hookline.engine.pytree import tree
from hookline.statistics.flat_numbers import is_quantised, to_float64
from hookline.statistics.moments import Moments
from hookline.util.view_as_array import view_as_array

# Sums of these overflow, or lose their digits, unless they are added up in float32.
_WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})
# A sum of the magnitudes of these is right in float32.
_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
# torch's own is_lazy cannot be part of a compiled graph.
_LAZY = (UninitializedBuffer, UninitializedParameter)
_PLAIN = (Tensor, nn.Parameter)

Measure = Callable[[Any], Tensor | None]


class NonFinite(Flag):
    """The kinds of numbers that are not finite."""

    NONE = 0
    NAN = 1
    INF = 2
    MINUS_INF = 4


def probe_sum(value: Any) -> Tensor | None:
    """Return a number that is not finite if any number of a value is not; None without numbers."""
    if (
        type(value) is Tensor
        and value.dtype is torch.float32
        and value.layout is torch.strided
        and not value.is_nested
    ):
        return value.detach().sum()
    sums = [_sum_local_numbers(tensor) for tensor in find_measurable_tensors(value)]
    if len(sums) < 2:
        return sums[0] if sums else None
    first = sums[0].device
    parts = [torch.view_as_real(part).sum() if part.is_complex() else part for part in sums]
    return torch.stack([part.to(first, torch.float32) for part in parts]).sum()


def probe_sum_of_each(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Do the same for each tensor that has numbers: plain ones on a GPU by one call."""
    pairs = [(tensor.detach(), _can_sum_in_one_call(tensor)) for tensor in tensors]
    shared = [tensor for tensor, is_shared in pairs if is_shared]
    norms = iter(norms_of_each(shared, 1, torch.float32))
    probes = [next(norms) if is_shared else probe_sum(tensor) for tensor, is_shared in pairs]
    return [probe for probe in probes if probe is not None]


def _can_sum_in_one_call(tensor: Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and tensor.is_cuda
        and tensor.dtype in _NARROW
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_wrapped(tensor)
    )


def probe_nan(value: Any) -> Tensor | None:
    """Do the same for a site where infinities are meant: only a NaN makes the number not finite."""
    return probe_sum(
        [zero_infinities(local_part(tensor.detach())) for tensor in find_measurable_tensors(value)]
    )


def zero_infinities(tensor: Tensor) -> Tensor:
    """Return a tensor with 0 in place of each infinity, and each NaN as it is."""
    return torch.nan_to_num(tensor, torch.nan, 0.0, 0.0)


def probe_extremes(value: Any) -> Tensor | None:
    """Do the same for a site where sums overflow; it takes twice the time, and is exact."""
    plain = [
        detach_local_numbers(tensor) for tensor in find_measurable_tensors(value) if tensor.numel()
    ]
    real = [torch.view_as_real(part) if part.is_complex() else part for part in plain]
    wide = [part.float() if part.dtype not in _WIDE else part for part in real]
    # Zero times an infinity or a NaN is a NaN.
    return probe_sum([torch.stack(torch.aminmax(part)) * 0.0 for part in wide])


def probe_except_negative_infinity(value: Any) -> Tensor | None:
    """Do the same for a site where -inf may be meant: NaN and infinity count, -inf does not."""
    plain = map(detach_local_numbers, find_measurable_tensors(value))
    return probe_extremes([torch.nan_to_num(part, torch.nan, torch.inf, 0.0) for part in plain])


def probe_in_transform(measure: Measure, value: Any) -> Tensor | None:
    """Measure a value inside a transform of torch.func: all examples of a batch together."""
    number = measure([unwrap_all_transforms(tensor.detach()) for _, tensor in tree.tensors(value)])
    return None if number is None else unwrap_all_transforms(number)


def find_measurable_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value that hold numbers that may be infinite."""
    tensors = [value] if isinstance(value, Tensor) else [part for _, part in tree.tensors(value)]
    return [tensor for tensor in tensors if is_measurable(tensor)]


def is_measurable(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers that may be infinite."""
    return (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and is_readable(tensor)


def is_readable(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers, of any dtype, that can be read."""
    if type(tensor) in _PLAIN:
        if tensor.is_meta:
            return False
    elif not has_numbers(tensor) or isinstance(tensor, _LAZY):
        return False
    return is_dynamo_compiling() or not is_wrapped(tensor)  # no graph holds a wrapped tensor


def detach_local_numbers(tensor: Tensor) -> Tensor:
    """Return the numbers that a tensor holds on this rank, without their graph."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        tensor = local_part(tensor)
        tensor = tensor.dequantize() if is_quantised(tensor) else tensor
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # for float8, torch has few operations
    if tensor.layout is torch.strided:
        is_nested = tensor.is_nested
        return torch.cat([part.reshape(-1) for part in tensor.unbind()]) if is_nested else tensor
    if tensor.is_mkldnn:
        return tensor.to_dense()
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def _sum_local_numbers(tensor: Tensor) -> Tensor:
    plain = detach_local_numbers(tensor)
    return plain.sum() if plain.dtype in _WIDE else plain.sum(dtype=torch.float32)


def indices_of_non_finite(sums: Sequence[Tensor]) -> list[int]:
    """Return the indices of the numbers that are not finite: one transfer a device and dtype."""
    groups: dict[Any, list[int]] = {}
    for index, number in enumerate(sums):
        groups.setdefault((number.dtype, number.device), []).append(index)
    bad: list[int] = []
    with torch.no_grad():
        for (_, device), members in groups.items():
            if device.type == "meta":
                continue
            finite = torch.stack([sums[index] for index in members]).isfinite()
            if not finite.all():
                flags = zip(members, finite.tolist(), strict=True)
                bad += [index for index, is_finite in flags if not is_finite]
    return sorted(bad)


def non_finite_kinds(tensor: Tensor) -> NonFinite:
    """Return the kinds of numbers in a tensor that are not finite; exact."""
    if not is_measurable(tensor) or not tensor.numel():
        return NonFinite.NONE
    plain = detach_local_numbers(tensor)
    if plain.isfinite().all():
        return NonFinite.NONE
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    kinds = NonFinite.NAN if plain.isnan().any() else NonFinite.NONE
    kinds |= NonFinite.INF if (plain == torch.inf).any() else NonFinite.NONE
    return kinds | (NonFinite.MINUS_INF if (plain == -torch.inf).any() else NonFinite.NONE)


def union_of_kinds(kinds: Iterable[NonFinite]) -> NonFinite:
    """Return several kinds as one."""
    return functools.reduce(operator.or_, kinds, NonFinite.NONE)


def count_nan_and_inf(tensor: Tensor) -> tuple[int, int]:
    """Return the number of NaNs and of infinities in a tensor.

    A complex number counts once, and a sparse tensor by the values that it holds.
    """
    plain = detach_local_numbers(tensor)
    n_nan = int(plain.isnan().sum())
    return n_nan, int((~plain.isfinite()).sum()) - n_nan


def measure_local_moments(tensor: Tensor) -> Moments:
    """Measure the numbers of a tensor; those of a complex tensor as real and imaginary parts."""
    plain = detach_local_numbers(tensor)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    wide = plain if plain.dtype in (torch.float32, torch.float64) else to_float64(plain)
    return Moments.of(view_as_array(wide.cpu()))
