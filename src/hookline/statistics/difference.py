"""Measure how far two tensors lie apart, by four numbers that no fault passes together.

The relative error misses a wrong row among many, the ratio of norms a permutation, and both miss a
single wrong element. The worst row and the worst element see these.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

from hookline.display.text import plural
from hookline.engine.pytree import describe
from hookline.statistics.c_functions import (
    READ_BY_C,
    CompileMeter,
    Gaps,
    RowPair,
    compile_difference,
)
from hookline.statistics.flat_numbers import ORDINARY, strided_parts

# Elements of a block, whose float64 copies fit a cache.
_BLOCK_NUMEL = 2**18

# Elements after which the compiler of the functions in C has cost no more than they save.
_WORTH_A_COMPILER = 2**23

# Between these, sums of squares have neither overflown nor lost small numbers.
_LEAST, _LARGEST = 1e-280, 1e280

Blocks = Callable[[], Iterator[tuple[Tensor, Tensor]]]
_Measurement = TypeVar("_Measurement")


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two values, relative to the second, over elements finite in both."""

    # The L2 norm of the difference over that of the second value; infinite if the second value is
    # zero and the first is not.
    relative: float = math.inf
    # The L2 norm of the first value over that of the second; 1 if both are zero.
    norm_ratio: float = math.nan
    # The largest L2 norm of the difference of a row, a vector along the last dimension, over that
    # of the second value's row. Rows below the mean norm are measured by the mean.
    worst_row: float = math.inf
    # The largest difference of an element over the second value's element. Elements below the root
    # mean square are measured by it.
    worst_element: float = math.inf
    row: int = 0  # the number of the worst row, with the leading dimensions flattened
    element: tuple[int, ...] = ()  # the index of the worst element
    numel: int = 0  # the number of elements
    n_unequal: int = 0  # the number of elements that are not equal
    # The reason why the values cannot be compared: other shapes, or elements that are NaN or
    # infinite in one value only. Otherwise empty.
    problem: str = ""

    @property
    def differs(self) -> bool:
        """True if the values are not equal to the last bit."""
        return bool(self.problem) or self.n_unequal > 0


EQUAL = Difference(0.0, 1.0, 0.0, 0.0)


def difference(a: Tensor, b: Tensor) -> Difference:
    """Measure the difference between two tensors, read in blocks of float64.

    >>> reference = torch.ones(64, 8)
    >>> gap = difference(reference.index_fill(0, torch.tensor([5]), 0.5), reference)
    >>> round(gap.relative, 3), round(gap.worst_row, 3), gap.row
    (0.062, 0.5, 5)

    Args:
        a: the first tensor, of any layout.
        b: the second tensor, which the numbers are relative to.

    Raises:
        RuntimeError: torch cannot read the numbers, or a sparse tensor is too large.
    """
    if a.is_nested != b.is_nested or (not a.is_nested and a.shape != b.shape):
        return Difference(problem=f"shapes {describe.shape(a)} and {describe.shape(b)}")
    parts_a, parts_b = (list(strided_parts(tensor.detach())) for tensor in (a, b))
    shapes = [[list(part.shape) for part in parts] for parts in (parts_a, parts_b)]
    if shapes[0] != shapes[1]:
        return Difference(problem=f"shapes {shapes[0]} and {shapes[1]} of nested tensors")
    if all(map(_are_equal, parts_a, parts_b)):
        return EQUAL

    gap = difference_of_blocks(lambda: zip(parts_a, parts_b, strict=True))
    return (
        gap if len(parts_b) > 1 else replace(gap, element=_unravel_index(gap.element, parts_b[0]))
    )


def difference_of_blocks(blocks: Blocks) -> Difference:
    """Measure the difference of values that come in pairs of blocks: whole rows, in order.

    Args:
        blocks: yields the pairs of strided tensors anew at each call, since they are read twice.

    Returns:
        The difference; `element` holds the number of the element, with all dimensions flattened.
    """
    scale = 1.0
    sizes = _measure_reference_norms(blocks, scale)
    gaps = _measure_gaps(blocks, scale, sizes)
    if gaps.n_odd:
        elements = plural(gaps.n_odd, "element")
        return Difference(
            n_unequal=gaps.n_unequal, problem=f"{elements} NaN or infinite in one of the two"
        )
    if not gaps.n_unequal:
        return EQUAL
    if not (gaps.gap and all(_LEAST < norm < _LARGEST for norm in (gaps.norm_a, sizes.norm_b))):
        scale = _largest_magnitude(blocks)  # squares underflow or overflow, or a value is zero
        sizes = _measure_reference_norms(blocks, scale)
        gaps = _measure_gaps(blocks, scale, sizes)
    norm = math.sqrt(sizes.norm_b)
    ratio = math.sqrt(gaps.norm_a) / norm if norm else math.inf
    # Unequal integers beyond 2^53 may be equal in float64, and are not equal all the same.
    relative = max(math.sqrt(gaps.gap) / norm if norm else math.inf, sys.float_info.min)
    return Difference(
        relative, ratio, gaps.row[0], gaps.element[0], gaps.row[1], (gaps.element[1],),
        sizes.n_elements, gaps.n_unequal,
    )  # fmt: skip


_METER = CompileMeter(_WORTH_A_COMPILER, compile_difference)


# Sizes and gaps hold sums over elements that are finite in both values, divided by a scale.


class _ReferenceNorms(NamedTuple):
    """The size of the second value, by which differences are measured."""

    norm_b: float = 0.0  # the sum of the squares
    rows_b: float = 0.0  # the sum of the norms of the rows
    n_rows: int = 0
    n_elements: int = 0

    @property
    def least_denominators(self) -> tuple[float, float]:
        """The mean norm of a row and the root mean square; smaller ones are measured by these."""
        row = self.rows_b / max(self.n_rows, 1)
        return row, math.sqrt(self.norm_b / max(self.n_elements, 1))


def _measure_reference_norms(blocks: Blocks, scale: float) -> _ReferenceNorms:
    total = _ReferenceNorms()
    by_c = partial(_reference_norms_by_c, scale)
    for _, sizes in _measure_block_pairs(blocks, by_c, partial(_reference_norms_by_torch, scale)):
        total = _ReferenceNorms(*map(operator.add, total, sizes))
    return total


def _measure_gaps(blocks: Blocks, scale: float, sizes: _ReferenceNorms) -> Gaps:
    total, n_rows, n_elements = Gaps(), 0, 0
    by_c = partial(_gaps_by_c, scale, sizes.least_denominators)
    by_torch = partial(_gaps_by_torch, scale, sizes.least_denominators)
    for b, gaps in _measure_block_pairs(blocks, by_c, by_torch):
        total = Gaps(
            total.gap + gaps.gap,
            total.norm_a + gaps.norm_a,
            _larger_ratio(total.row, gaps.row, n_rows),
            _larger_ratio(total.element, gaps.element, n_elements),
            total.n_unequal + gaps.n_unequal,
            total.n_odd + gaps.n_odd,
        )
        n_rows += math.prod(b.shape[:-1])
        n_elements += b.numel()
    return total


def _measure_block_pairs(
    blocks: Blocks,
    by_c: Callable[[Tensor, Tensor], _Measurement | None],
    by_torch: Callable[[Tensor, Tensor], _Measurement],
) -> Iterator[tuple[Tensor, _Measurement]]:
    """Measure pairs of blocks by C, which need no copy there, or else by torch in small blocks.

    Yields:
        What is measured, with the second block.
    """
    for a, b in blocks():
        is_plain = a.dtype == b.dtype and a.is_contiguous() and b.is_contiguous()
        measurement = by_c(a, b) if is_plain and _METER.until_native <= 0 else None
        if measurement is not None:
            yield b, measurement
            continue
        for pair in _split_into_blocks(a, b):
            yield pair[1], by_c(*pair) or by_torch(*pair)


def _reference_norms_by_torch(scale: float, a: Tensor, b: Tensor) -> _ReferenceNorms:
    _, y, *_ = _finite_float64_pair(a, b, scale)
    rows_b = _row_norms(y)
    return _ReferenceNorms(
        float(rows_b.square().sum()), float(rows_b.sum()), rows_b.numel(), y.numel()
    )


def _reference_norms_by_c(scale: float, a: Tensor, b: Tensor) -> _ReferenceNorms | None:
    """Return the size of a block; None if the functions in C cannot tell it."""
    native = _METER.count_and_compile(b.numel()) if scale == 1.0 else None
    rows = None if native is None else _rows_for_c(a, b)
    sizes = None if native is None or rows is None else native.reference_norms(rows)
    return None if sizes is None else _ReferenceNorms(*sizes, math.prod(b.shape[:-1]), b.numel())


def _gaps_by_torch(scale: float, least: tuple[float, float], a: Tensor, b: Tensor) -> Gaps:
    x, y, n_odd, n_unequal = _finite_float64_pair(a, b, scale)
    gap = (x - y).abs()
    rows_gap = _row_norms(gap)
    return Gaps(
        float(rows_gap.square().sum()),
        float(_row_norms(x).square().sum()),
        _max_and_index(_ratios(rows_gap, _row_norms(y), least[0])),
        _max_and_index(_ratios(gap, y.abs(), least[1])),
        n_unequal,
        n_odd,
    )


def _gaps_by_c(scale: float, least: tuple[float, float], a: Tensor, b: Tensor) -> Gaps | None:
    """Return how far two blocks lie apart; None if the functions in C cannot tell it."""
    native = _METER.count_and_compile(0) if scale == 1.0 and all(least) else None
    rows = None if native is None else _rows_for_c(a, b)
    return None if native is None or rows is None else native.gaps(rows, *least)


def _rows_for_c(a: Tensor, b: Tensor) -> RowPair | None:
    """Return two blocks in a form that the functions in C take; None if there is none."""
    is_plain = all(type(block) in ORDINARY and block.is_cpu and block.numel() for block in (a, b))
    if not is_plain or a.dtype not in READ_BY_C or b.dtype not in READ_BY_C:
        return None
    if a.dtype == b.dtype:
        return RowPair(*(block.resolve_neg().contiguous() for block in (a, b)))
    if a.min() == torch.finfo(a.dtype).min:  # a mask
        return None
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return RowPair(*(block.resolve_neg().to(wide).contiguous() for block in (a, b)))


def _largest_magnitude(blocks: Blocks) -> float:
    """Return the largest finite magnitude in both values; 1 if all are zero."""
    small = (pair for a, b in blocks() for pair in _split_into_blocks(a, b))
    pairs = (_finite_float64_pair(a, b, 1.0)[:2] for a, b in small)
    return max((float(x.abs().max()) for pair in pairs for x in pair if x.numel()), default=0) or 1


def _ratios(gaps: Tensor, sizes: Tensor, least: float) -> Tensor:
    if not least:  # the second value is zero
        return torch.where(gaps > 0, math.inf, 0.0)
    return gaps / sizes.clamp_(min=least)


def _max_and_index(ratios: Tensor) -> tuple[float, int]:
    if not ratios.numel():
        return 0.0, 0
    flat = ratios.reshape(-1)
    at = int(flat.argmax())
    return float(flat[at]), at


def _larger_ratio(
    worst: tuple[float, int], other: tuple[float, int], offset: int
) -> tuple[float, int]:
    """Return the larger of two; the number of the second counts from a start."""
    return worst if other[0] <= worst[0] else (other[0], offset + other[1])


def _finite_float64_pair(a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor, int, int]:
    """Convert two blocks to float64 over a scale, with 0 where one of them is not finite.

    Returns:
        The blocks, the number of elements that are not finite in one of them only, and the number
        of elements that are not equal.
    """
    x, y = _widen_pair(a, b)
    n_odd, unequal = 0, x != y
    if not (a.is_floating_point() or b.is_floating_point() or a.is_complex()):
        unequal = a.cpu() != b.cpu()
    if not (x.sum() + y.sum()).isfinite():  # a sum of finite numbers may overflow, too
        finite = x.isfinite() & y.isfinite()
        unequal &= ~(x.isnan() & y.isnan())
        n_odd = int((unequal & ~finite).sum())
        x, y = (value.where(finite, 0.0) for value in (x, y))
    if scale != 1.0:
        x, y = x / scale, y / scale
    return x, y, n_odd, int(unequal.count_nonzero())


def _widen_pair(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Convert two blocks to float64, or to complex128, on the CPU.

    The least number of a dtype means minus infinity in masks, and depends on the dtype.
    """
    x, y = (
        block.cpu().to(torch.complex128 if block.is_complex() else torch.float64)
        for block in (a, b)
    )
    if a.dtype != b.dtype and a.is_floating_point() and b.is_floating_point():
        are_least = (x == torch.finfo(a.dtype).min) & (y == torch.finfo(b.dtype).min)
        x, y = (value.masked_fill(are_least, -math.inf) for value in (x, y))
    return x, y


def _row_norms(block: Tensor) -> Tensor:
    """Return the L2 norm of each row, a vector along the last dimension."""
    return torch.linalg.vector_norm(block, dim=-1) if block.dim() else block.abs()


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors of one dtype are equal; False may mean that torch cannot tell."""
    if a.dtype != b.dtype:
        return False
    try:
        return torch.equal(a, b)
    except (RuntimeError, NotImplementedError):  # 8-bit floats, two devices
        return False


def _split_into_blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split two tensors of one shape into pairs of blocks of whole rows, in row-major order."""
    if a.numel() <= _BLOCK_NUMEL:
        yield a, b
        return
    dims = range(a.dim() - 1)
    split = next((dim for dim in dims if a.shape[dim] > 1), a.dim() - 1)
    size = max(a.shape[split] // math.ceil(a.numel() / _BLOCK_NUMEL), 1)
    for pair in zip(torch.split(a, size, split), torch.split(b, size, split), strict=True):
        yield from _split_into_blocks(*pair)


def _unravel_index(element: tuple[int, ...], tensor: Tensor) -> tuple[int, ...]:
    """Return the index of an element by its number; none of equal values."""
    if not element or not tensor.numel():
        return ()
    return tuple(map(int, np.unravel_index(sum(element), tuple(tensor.shape))))
