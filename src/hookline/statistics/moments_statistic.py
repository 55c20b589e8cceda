"""The moments of tensors, computed on their device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from hookline.engine import is_plain_eager, is_wrapped
from hookline.errors import InputError
from hookline.statistics.batched_moments import MOST_NUMEL, batched_moments, is_on_default_stream
from hookline.statistics.c_functions import CompileMeter, NativeMoments, compile_moments
from hookline.statistics.compiled_reduction import LONGEST, CompiledReduction, Reduction
from hookline.statistics.flat_numbers import (
    CHUNK_NUMEL,
    ORDINARY,
    SumsAndExtremes,
    add_to_slots,
    check_slots,
    flat_chunks,
    in_memory_order,
    measurable_parts,
    signed_extremes,
    to_real_float,
)
from hookline.statistics.moments import Moments

# The slots: count, non-finite, zeros, the sums of x, x² and x⁴, then the greatest -x and x.
# The first six add up; of the last two the greater one counts.
_EMPTY = [0.0] * 6 + [-math.inf] * 2

# Compilation is not worth its seconds for tensors smaller than this alone.
_LARGE_NUMEL = 2**14

# The elements after which compilation has paid: NumPy takes 1.7 ns longer for each on a CPU, which
# makes 3.6 s, and compilation takes 3 to 5 s.
_WORTH_COMPILING = 2**31

# The elements after which the function in C is compiled. It takes 1.4 ns less for each than NumPy.
# Its compilation takes 0.1 to 0.7 s, which a training of minutes gets back.
_WORTH_A_COMPILER = 2**20
_NATIVE_NUMEL = 2**16  # elements whose float32 copy stays in a core's cache

# The dtypes that the compiled function reads itself.
_COMPILED_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_NUMPY_DTYPES = frozenset((torch.float32, torch.float64))

# The CPU has faster ways, MPS has no float64, and meta tensors have no numbers.
_NOT_BATCHED = frozenset(("cpu", "mps", "meta"))


@final
class MomentsStatistic(SumsAndExtremes):
    """A `Statistic` whose result is `Moments`."""

    n_slots = len(_EMPTY)

    def __init__(self, compile: bool | None) -> None:
        self.options: dict[str, Any] = {}  # how it is compiled is not what it measures
        if compile not in (None, True, False):
            raise InputError(
                f"compile must be None, True or False, got {compile!r}."
                "\nLeave it out, and the function is compiled when it pays."
            )
        self._until_compiled = {None: _WORTH_COMPILING, True: 0, False: math.inf}[compile]
        self._meter = CompileMeter(
            _WORTH_A_COMPILER if compile is None else math.inf, compile_moments
        )

    def update(self, slots: Tensor, value: Tensor) -> Tensor:
        """Return the slots with one more value.

        Raises:
            StructureError: the value is a meta tensor.
            RuntimeError: torch cannot read the tensor's numbers.
        """
        check_slots(slots, self.n_slots)
        if torch.compiler.is_compiling() or not is_plain_eager():
            for part in measurable_parts(value):
                if part.numel():
                    slots = _add_by_torch(slots, to_real_float(part).reshape(-1))
            return slots
        for part in (value.detach(),) if _suits_numpy(value) else measurable_parts(value):
            if part.numel():
                slots = self._add_part(slots, part)
        return slots

    def result(self, slots: Tensor) -> Moments:
        """Read slots."""
        check_slots(slots, self.n_slots)
        count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
        counts = int(count), int(non_finite), int(zeros)
        return Moments(*counts, sum1, sum2, sum4, -negated_min, greatest)

    def _add_part(self, slots: Tensor, part: Tensor) -> Tensor:
        """Measure a strided tensor, by the fastest form that there is."""
        if not part.is_contiguous():
            part = in_memory_order(part)
        native = self._meter.native(part.numel()) if part.is_cpu and slots.is_cpu else None
        if native is not None and part.dtype in _COMPILED_DTYPES:
            return _add_native(native, slots, part)
        function = self._find_compiled(part)
        if function is not None:
            if part.is_contiguous() and part.numel() <= LONGEST:
                return function(slots, part.view(-1))
            for piece in flat_chunks(part):
                slots = function(slots, piece.contiguous())
            return slots
        if _suits_numpy(part):
            return _add_moments(slots, Moments.of(part.numpy()))
        for piece in flat_chunks(part):
            flat = to_real_float(piece)
            if flat.is_cpu:
                slots = _add_moments(slots, Moments.of(flat.numpy()))
            else:
                slots = _add_by_torch(slots, flat)
        return slots

    def measure_many(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Measure many tensors together: on the CPU by one call of the function in C or by NumPy.

        Returns:
            The slots of each tensor; None where the tensors must be measured one by one.
        """
        if is_plain_eager() and tensors and all(map(may_share_a_batch, tensors)):
            are_in_turn = all(map(is_on_default_stream, {tensor.device for tensor in tensors}))
            return self._measure_on_gpus(tensors) if are_in_turn else None
        if not is_plain_eager() or not all(map(_suits_numpy, tensors)):
            return None
        native = self._meter.native(sum(map(Tensor.numel, tensors)))
        if native is not None and all(tensor.dtype is torch.float32 for tensor in tensors):
            slots = torch.tensor([_EMPTY] * len(tensors), dtype=torch.float64, device="cpu")
            native.measure_many(tensors, slots)
        elif 0 < self._meter.until_native < math.inf and not _COMPILED.reductions:
            rows = [_slots_of(Moments.of(tensor.numpy())) for tensor in tensors]
            slots = torch.tensor(rows, dtype=torch.float64, device="cpu")
        else:
            return None
        return list(slots.unbind())

    def _measure_on_gpus(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        slots: dict[int, Tensor] = {}
        alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
        for number, tensor in enumerate(tensors):
            if tensor.numel() > MOST_NUMEL:
                with torch.autocast(tensor.device.type, enabled=False):
                    slots[number] = self._add_part(self.start(tensor), tensor)
            else:
                alike.setdefault((tensor.device, tensor.dtype), {})[number] = tensor
        for group in alike.values():
            slots.update(zip(group, batched_moments(list(group.values())), strict=True))
        return [slots[number] for number in range(len(tensors))]

    def _find_compiled(self, part: Tensor) -> Reduction | None:
        """Return the compiled function for a tensor; None until compilation is worth it."""
        numel = part.numel()
        if self._until_compiled == math.inf or numel < 2 or part.dtype not in _COMPILED_DTYPES:
            return None
        if numel < _LARGE_NUMEL:
            return _COMPILED.find(part, compile=False) if _COMPILED.reductions else None
        self._until_compiled -= numel
        return _COMPILED.find(part, compile=self._until_compiled < 0)


def _suits_numpy(value: Tensor) -> bool:
    """Tell whether NumPy reads a tensor as it is: a float, contiguous, and not too long."""
    return (
        type(value) in ORDINARY
        and value.dtype in _NUMPY_DTYPES
        and value.is_cpu
        and value.layout is torch.strided
        and not value.is_nested
        and value.is_contiguous()
        and value.numel() <= CHUNK_NUMEL
        and not value.is_neg()
        and not is_wrapped(value)
    )


def may_share_a_batch(value: Tensor) -> bool:
    """Tell whether a tensor is on a device where operations cost more than small tensors."""
    return (
        value.device.type not in _NOT_BATCHED
        and type(value) in ORDINARY
        and value.dtype in _COMPILED_DTYPES
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_neg()
        and not is_wrapped(value)
    )


def _add_native(native: NativeMoments, slots: Tensor, part: Tensor) -> Tensor:
    slots = slots.clone()
    if part.dtype.itemsize >= 4 and part.is_contiguous():
        native.add(slots, part)
        return slots
    for piece in flat_chunks(part, _NATIVE_NUMEL):
        native.add(slots, to_real_float(piece).contiguous())
    return slots


def measure_moments(tensor: Tensor) -> Moments:
    """Measure one tensor without compiling anything.

    Raises:
        StructureError: it is a meta tensor.
        RuntimeError: torch cannot read its numbers.
    """
    if not tensor.is_cpu:
        statistic = MomentsStatistic(compile=False)
        return statistic.result(statistic.update(statistic.start(tensor), tensor))
    moments = Moments()
    for part in measurable_parts(tensor):
        for piece in flat_chunks(part):
            moments = moments + Moments.of(to_real_float(piece).numpy())
    return moments


def _add_moments(slots: Tensor, moments: Moments) -> Tensor:
    count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
    fields = [
        count + moments.count, non_finite + moments.non_finite, zeros + moments.zeros,
        sum1 + moments.sum, sum2 + moments.sum2, sum4 + moments.sum4,
        max(negated_min, -moments.min), max(greatest, moments.max),
    ]  # fmt: skip
    return torch.from_numpy(np.array(fields))  # in half the time of torch.tensor


def _slots_of(moments: Moments) -> list[float]:
    """Return the slots of moments."""
    return [
        moments.count, moments.non_finite, moments.zeros, moments.sum, moments.sum2, moments.sum4,
        -moments.min, moments.max,
    ]  # fmt: skip


def _add_by_torch(slots: Tensor, values: Tensor) -> Tensor:
    """Add flat numbers to slots, in torch operations alone: to be compiled, or for a device."""
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.to(torch.float32)
    is_finite = values.abs() < math.inf  # NaN is not less
    numbers = torch.where(is_finite, values, 0.0).to(torch.float64)
    squares = numbers * numbers
    count_dtype = torch.int64 if values.shape[0] > LONGEST else torch.int32  # which is faster
    sums = (
        torch.full((), values.shape[0], dtype=torch.float64, device=values.device),
        (~is_finite).sum(dtype=count_dtype),
        (values == 0).sum(dtype=count_dtype),
        numbers.sum(),
        squares.sum(),
        (squares * squares).sum(),
    )
    added = torch.stack([total.to(torch.float64) for total in sums])
    return add_to_slots(slots, added, signed_extremes(values, is_finite))


_COMPILED = CompiledReduction(_add_by_torch, len(_EMPTY))
