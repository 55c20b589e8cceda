"""Moments of numbers, which add up: two halves give the moments of the whole.

On the CPU they are computed by NumPy, block by block in float64: equal numbers in equal order give
equal bits, whatever the number of threads. Tensors elsewhere are measured on their device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.display.units import measure
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
    negated_min_and_max,
    numeric_strided_parts,
    to_real_float,
)
from hookline.util.view_as_array import view_as_array

_BLOCK = 65_536  # numbers: as float64, they fit into the cache

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
@dataclass(frozen=True, slots=True)
class Moments:
    """The count, the sums of powers and the extremes of numbers: the result of `moments()`.

        >>> import numpy as np
        >>> from hookline.statistics import Moments
        >>> both = Moments.of(np.array([1.0, 2.0])) + Moments.of(np.array([3.0, np.nan]))
        >>> both.count, both.non_finite, both.mean
        (4, 1, 2.0)

    Further attributes are `finite` (the count of finite numbers), `zero_share` (from 0 to 1),
    `mean`, `std`, `rms`, `norm`, `kurtosis` and `max_abs`. `std` divides by the count, not by the
    count minus 1. `rms` is the root of the mean square, and `norm` the L2 norm. `kurtosis` is the
    mean of the fourth powers over the squared mean of the squares: 3 for normal numbers of mean 0.

    Sums are in float64. So of float64 numbers above 1.3e154 the squares overflow, and `norm` and
    `rms` are inf; of those below 2e-162 the squares vanish, and both are 0. `min`, `max` and
    `max_abs` are right.

    Args:
        count: how many numbers there are.
        non_finite: how many of them are NaN or infinite. The fields below leave these out.
        zeros: how many are exactly 0.
        sum: the sum.
        sum2: the sum of squares.
        sum4: the sum of fourth powers.
        min: the least number; inf without finite numbers.
        max: the greatest number; -inf without finite numbers.
    """

    count: int = 0
    non_finite: int = 0
    zeros: int = 0
    sum: float = 0.0
    sum2: float = 0.0
    sum4: float = 0.0
    min: float = math.inf
    max: float = -math.inf

    @staticmethod
    def of(numbers: NDArray[Any]) -> Moments:
        """Measure an array of real numbers of any shape."""
        flat = np.ascontiguousarray(numbers).reshape(-1)
        if len(flat) <= _BLOCK:
            return _block_moments(flat)
        moments = Moments()
        for start in range(0, len(flat), _BLOCK):
            moments = moments + _block_moments(flat[start : start + _BLOCK])
        return moments

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.non_finite + other.non_finite,
            self.zeros + other.zeros,
            self.sum + other.sum,
            self.sum2 + other.sum2,
            self.sum4 + other.sum4,
            min(self.min, other.min),
            max(self.max, other.max),
        )

    @property
    def finite(self) -> int:
        """The count of finite numbers."""
        return self.count - self.non_finite

    @property
    def zero_share(self) -> float:
        """The share of all numbers that are exactly 0, from 0 to 1; NaN without any."""
        return self.zeros / self.count if self.count else math.nan

    @property
    def mean(self) -> float:
        """The mean of the finite numbers; NaN without any."""
        return self.sum / self.finite if self.finite else math.nan

    @property
    def std(self) -> float:
        """The standard deviation of the finite numbers, divided by their count; NaN without any.

        It loses digits where the mean is much larger: at a mean of 10^6 deviations, four remain.
        """
        if not self.finite:
            return math.nan
        if self.min == self.max:
            return 0.0  # exactly, whatever the sums were rounded to
        return math.sqrt(max(self.sum2 / self.finite - self.mean * self.mean, 0.0))

    @property
    def rms(self) -> float:
        """The root of the mean square of the finite numbers; NaN without any."""
        return math.sqrt(self.sum2 / self.finite) if self.finite else math.nan

    @property
    def norm(self) -> float:
        """The Euclidean norm of the finite numbers."""
        return math.sqrt(self.sum2)

    @property
    def kurtosis(self) -> float:
        """The mean of fourth powers over the squared mean of squares; NaN if all are 0.

        The mean is not subtracted. It is 3 for normal numbers of mean 0, 1 if all magnitudes are
        equal, and large where few numbers stand out.
        """
        return self.sum4 / self.sum2 * self.finite / self.sum2 if self.sum2 else math.nan

    @property
    def max_abs(self) -> float:
        """The greatest magnitude of the finite numbers; NaN without any."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.nan

    def __str__(self) -> str:
        text = f"{self.count:,} elements, {self.zeros:,} zeros, {self.non_finite:,} non-finite"
        if not self.finite:
            return text
        numbers = ", ".join(
            f"{name} {measure(getattr(self, name))}" for name in ("mean", "std", "min", "max")
        )
        return f"{text}\n{numbers}"

    def as_json(self) -> list[Any]:
        """Return the fields as a list that JSON can hold: null stands for a missing extreme."""
        extremes = [self.min, self.max] if self.finite else [None, None]
        counts = [self.count, self.non_finite, self.zeros]
        return [*counts, self.sum, self.sum2, self.sum4, *extremes]

    @staticmethod
    def from_json(fields: list[Any]) -> Moments:
        """Read the list that `as_json` made.

        Raises:
            ValueError, TypeError: it is not such a list.
        """
        count, non_finite, zeros, sum1, sum2, sum4, least, greatest = fields
        moments = Moments(
            int(count), int(non_finite), int(zeros), float(sum1), float(sum2), float(sum4),
            math.inf if least is None else float(least),
            -math.inf if greatest is None else float(greatest),
        )  # fmt: skip
        if min(moments.count, moments.non_finite, moments.zeros, moments.sum2) < 0:
            raise ValueError(f"counts and squares must be from 0 up, got {fields!r:.80}")
        return moments


def _block_moments(block: NDArray[Any]) -> Moments:
    with np.errstate(over="ignore", invalid="ignore"):
        values = block.astype(np.float64)
        squares = values * values
        sum2 = float(squares.sum())
        non_finite = 0
        if not math.isfinite(sum2):  # rarely: so only then are the numbers asked one by one
            is_finite = np.isfinite(values)
            non_finite = len(values) - int(np.count_nonzero(is_finite))
            values, squares = values[is_finite], squares[is_finite]
            sum2 = float(squares.sum())
        if not len(values):
            return Moments(len(block), non_finite)
        return Moments(
            len(block),
            non_finite,
            len(values) - int(np.count_nonzero(values)),
            float(values.sum()) + 0.0,  # zeros without a sign
            sum2,
            float((squares * squares).sum()),
            float(values.min()),
            float(values.max()),
        )


def merge_moments_by_key(parts: Iterable[Mapping[str, Moments]]) -> dict[str, Moments]:
    """Add up the moments of mappings, key by key."""
    merged: dict[str, Moments] = {}
    for part in parts:
        for key, moments in part.items():
            merged[key] = merged.get(key, Moments()) + moments
    return merged


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
            for part in numeric_strided_parts(value):
                if part.numel():
                    slots = _add_by_torch(slots, to_real_float(part).reshape(-1))
            return slots
        for part in (
            (value.detach(),) if _is_numpy_readable(value) else numeric_strided_parts(value)
        ):
            if part.numel():
                slots = self._add_part_to_slots(slots, part)
        return slots

    def result(self, slots: Tensor) -> Moments:
        """Read slots."""
        check_slots(slots, self.n_slots)
        count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
        counts = int(count), int(non_finite), int(zeros)
        return Moments(*counts, sum1, sum2, sum4, -negated_min, greatest)

    def _add_part_to_slots(self, slots: Tensor, part: Tensor) -> Tensor:
        """Measure a strided tensor, by the fastest form that there is."""
        if not part.is_contiguous():
            part = in_memory_order(part)
        native = (
            self._meter.count_and_compile(part.numel()) if part.is_cpu and slots.is_cpu else None
        )
        if native is not None and part.dtype in _COMPILED_DTYPES:
            return _add_by_c(native, slots, part)
        function = self._find_compiled(part)
        if function is not None:
            if part.is_contiguous() and part.numel() <= LONGEST:
                return function(slots, part.view(-1))
            for piece in flat_chunks(part):
                slots = function(slots, piece.contiguous())
            return slots
        if _is_numpy_readable(part):
            return _add_moments(slots, Moments.of(view_as_array(part)))
        for piece in flat_chunks(part):
            flat = to_real_float(piece)
            if flat.is_cpu:
                slots = _add_moments(slots, Moments.of(view_as_array(flat)))
            else:
                slots = _add_by_torch(slots, flat)
        return slots

    def measure_many(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Measure many tensors together: on the CPU by one call of the function in C or by NumPy.

        Returns:
            The slots of each tensor; None where the tensors must be measured one by one.
        """
        if is_plain_eager() and tensors and all(map(can_be_batched, tensors)):
            are_in_turn = all(map(is_on_default_stream, {tensor.device for tensor in tensors}))
            return self._measure_on_gpus(tensors) if are_in_turn else None
        if not is_plain_eager() or not all(map(_is_numpy_readable, tensors)):
            return None
        native = self._meter.count_and_compile(sum(map(Tensor.numel, tensors)))
        if native is not None and all(tensor.dtype is torch.float32 for tensor in tensors):
            slots = torch.tensor([_EMPTY] * len(tensors), dtype=torch.float64, device="cpu")
            native.measure_many(tensors, slots)
        elif 0 < self._meter.until_native < math.inf and not _COMPILED.reductions:
            rows = [_moments_to_slots(Moments.of(view_as_array(tensor))) for tensor in tensors]
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
                    slots[number] = self._add_part_to_slots(self.start(tensor), tensor)
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
            return _COMPILED.find_or_compile(part, compile=False) if _COMPILED.reductions else None
        self._until_compiled -= numel
        return _COMPILED.find_or_compile(part, compile=self._until_compiled < 0)


def _is_numpy_readable(value: Tensor) -> bool:
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


def can_be_batched(value: Tensor) -> bool:
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


def _add_by_c(native: NativeMoments, slots: Tensor, part: Tensor) -> Tensor:
    slots = slots.clone()
    if part.dtype.itemsize >= 4 and part.is_contiguous():
        native.add_tensor(slots, part)
        return slots
    for piece in flat_chunks(part, _NATIVE_NUMEL):
        native.add_tensor(slots, to_real_float(piece).contiguous())
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
    for part in numeric_strided_parts(tensor):
        for piece in flat_chunks(part):
            moments = moments + Moments.of(view_as_array(to_real_float(piece)))
    return moments


def _add_moments(slots: Tensor, moments: Moments) -> Tensor:
    count, non_finite, zeros, sum1, sum2, sum4, negated_min, greatest = slots.tolist()
    fields = [
        count + moments.count, non_finite + moments.non_finite, zeros + moments.zeros,
        sum1 + moments.sum, sum2 + moments.sum2, sum4 + moments.sum4,
        max(negated_min, -moments.min), max(greatest, moments.max),
    ]  # fmt: skip
    return torch.from_numpy(np.array(fields))  # in half the time of torch.tensor


def _moments_to_slots(moments: Moments) -> list[float]:
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
    return add_to_slots(slots, added, negated_min_and_max(values, is_finite))


_COMPILED = CompiledReduction(_add_by_torch, len(_EMPTY))
