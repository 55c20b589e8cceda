"""The moments of tensors, computed on their device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from hookline.engine.torch_private.modes import is_ordinary
from hookline.errors import InputError
from hookline.statistics.compiled import LONGEST, CompiledReduction, Reduction
from hookline.statistics.moments import Moments
from hookline.statistics.native import NativeMoments, native_moments
from hookline.statistics.to_numbers import (
    flat_chunks,
    in_memory_order,
    real,
    slot_device,
    to_measure,
)

# The slots: count, non-finite, zeros, the sums of x, x² and x⁴, then the greatest -x and x.
# The first six add up; of the last two the greater one counts.
_N_SUMS = 6
_EMPTY = [0.0] * _N_SUMS + [-math.inf] * 2

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


@final
class MomentsStatistic:
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
        self._until_native = _WORTH_A_COMPILER if compile is None else math.inf

    def start(self, value: Tensor) -> Tensor:
        """Return empty slots on the value's device."""
        return torch.tensor(_EMPTY, dtype=torch.float64, device=slot_device(value))

    def update(self, slots: Tensor, value: Tensor) -> Tensor:
        """Return the slots with one more value.

        Raises:
            StructureError: the value is a meta tensor.
            RuntimeError: torch cannot read the tensor's numbers.
        """
        is_plain = not torch.compiler.is_compiling() and is_ordinary()
        for part in to_measure(value):
            if part.numel():
                slots = (
                    self._add(slots, part) if is_plain else _reduce(slots, real(part).reshape(-1))
                )
        return slots

    def merge(self, slots: Tensor, other: Tensor) -> Tensor:
        """Add up two sets of slots."""
        sums = slots[:_N_SUMS] + other[:_N_SUMS]
        return torch.cat([sums, torch.maximum(slots[_N_SUMS:], other[_N_SUMS:])])

    def result(self, slots: Tensor) -> Moments:
        """Read slots."""
        return _moments(slots)

    def _add(self, slots: Tensor, part: Tensor) -> Tensor:
        """Measure a strided tensor, by the fastest form that there is."""
        part = in_memory_order(part)
        native = self._native(part.numel()) if part.is_cpu else None
        if native is not None and part.dtype in _COMPILED_DTYPES:
            return _add_native(native, slots, part)
        function = self._compiled(part)
        if function is not None:
            if part.is_contiguous() and part.numel() <= LONGEST:
                return function(slots, part.view(-1))
            for piece in flat_chunks(part):
                slots = function(slots, piece.contiguous())
            return slots
        for piece in flat_chunks(part):
            flat = real(piece)
            if flat.is_cpu:
                slots = _add_moments(slots, Moments.of(flat.numpy()))
            else:
                slots = _reduce(slots, flat)
        return slots

    def measure_many(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Measure each of many tensors together, by one call of the function in C.

        Returns:
            The slots of each tensor; None where the function does not measure all of them.
        """
        if not all(_is_of_native(tensor) for tensor in tensors):
            return None
        native = self._native(sum(tensor.numel() for tensor in tensors))
        if native is None or not is_ordinary():
            return None
        slots = torch.tensor([_EMPTY] * len(tensors), dtype=torch.float64)
        native.measure_many(tensors, slots)
        return list(slots.unbind())

    def _native(self, numel: int) -> NativeMoments | None:
        """Return the function in C; None until its compiler is worth it, and without one."""
        if self._until_native > 0:
            self._until_native -= numel
            return None
        return native_moments()

    def _compiled(self, part: Tensor) -> Reduction | None:
        """Return the compiled function for a tensor; None until compilation is worth it."""
        numel = part.numel()
        if self._until_compiled == math.inf or numel < 2 or part.dtype not in _COMPILED_DTYPES:
            return None
        if numel < _LARGE_NUMEL:
            return _COMPILED.find(part, compile=False)
        self._until_compiled -= numel
        return _COMPILED.find(part, compile=self._until_compiled < 0)


def _is_of_native(tensor: Tensor) -> bool:
    """Tell whether a plain tensor is one that `NativeMoments.measure_many` reads."""
    return tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous()


def _add_native(native: NativeMoments, slots: Tensor, part: Tensor) -> Tensor:
    slots = slots.clone()
    if part.dtype.itemsize >= 4 and part.is_contiguous():
        native.add(slots, part)
        return slots
    for piece in flat_chunks(part, _NATIVE_NUMEL):
        native.add(slots, real(piece).contiguous())
    return slots


def measure(tensor: Tensor) -> Moments:
    """Measure one tensor without compiling anything.

    Raises:
        StructureError: it is a meta tensor.
        RuntimeError: torch cannot read its numbers.
    """
    if not tensor.is_cpu:
        statistic = MomentsStatistic(compile=False)
        return statistic.result(statistic.update(statistic.start(tensor), tensor))
    found = Moments()
    for part in to_measure(tensor):
        for piece in flat_chunks(part):
            found = found + Moments.of(real(piece).numpy())
    return found


def _add_moments(slots: Tensor, found: Moments) -> Tensor:
    count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
    fields = [
        count + found.count, non_finite + found.non_finite, zeros + found.zeros,
        sum1 + found.sum, sum2 + found.sum2, sum4 + found.sum4,
        max(negated_min, -found.min), max(greatest, found.max),
    ]  # fmt: skip
    return torch.from_numpy(np.array(fields))  # in half the time of torch.tensor


def _moments(slots: Tensor) -> Moments:
    count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
    counts = int(count), int(non_finite), int(zeros)
    return Moments(*counts, sum1, sum2, sum4, -negated_min, greatest)


def _reduce(slots: Tensor, values: Tensor) -> Tensor:
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
    extremes = (
        torch.where(is_finite, -values, -math.inf).amax(),
        torch.where(is_finite, values, -math.inf).amax(),
    )
    return torch.cat(
        [
            slots[:_N_SUMS] + torch.stack([one.to(torch.float64) for one in sums]),
            torch.maximum(slots[_N_SUMS:], torch.stack(extremes).to(torch.float64)),
        ]
    )


_COMPILED = CompiledReduction(_reduce, len(_EMPTY))
