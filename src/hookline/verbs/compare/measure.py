"""Measure a pair of values: their tensors, paired by leaf, and the four numbers of each pair."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.display.text import first_line, name_without_torch
from hookline.engine import has_numbers
from hookline.engine.pytree import describe, tree
from hookline.engine.pytree.tree import Leaf
from hookline.recordings import NotSaved
from hookline.statistics.difference import Difference, difference, difference_of_blocks
from hookline.statistics.finiteness import detach_local_numbers
from hookline.stores import Column
from hookline.verbs.compare.common_items import RowsOfItems
from hookline.verbs.compare.read_sides import StepNumbers

_DEEPEST = 20  # levels of nesting; a cache may hold itself
_BLOCK_NUMEL = 2**22  # of a store, read at once

Array = Tensor | Column | RowsOfItems


class MeasuredPair(NamedTuple):
    """Hold the measurements of a pair of tensors."""

    leaf: Leaf  # the leaf of the first value that holds the tensor
    forms: tuple[str, str]  # shape and dtype of both; empty where one is not there
    dtypes: tuple[torch.dtype, ...] = ()  # the dtypes of both
    gap: Difference | None = None  # the difference; None if they cannot be compared
    why: str = ""  # the reason, if so
    n_alone: int = 0  # for how many tokens or rows one of the two has no value
    n_elements: int = 1  # how many elements the second tensor has

    @property
    def alone_in(self) -> str:
        """The side that has the tensor alone, "a" or "b"; else empty."""
        return "" if all(self.forms) else "ba"[bool(self.forms[0])]


def measure_values(a: Any, b: Any) -> Iterator[MeasuredPair]:
    """Yield what is found of each pair of tensors in two values.

    Tensors are paired by their leaf. If one value holds a single tensor, it is paired with the
    first of the other that has its shape.
    """
    if isinstance(a, StepNumbers) and isinstance(b, StepNumbers):
        yield _measure_common_steps(a, b)
        return
    ours, theirs = dict(arrays_in(a)), dict(arrays_in(b))
    for leaf, form in {**dict(_unsaved_in(a)), **dict(_unsaved_in(b))}.items():
        forms = (
            _shape_and_dtype_text(arrays.pop(leaf)) if leaf in arrays else form
            for arrays in (ours, theirs)
        )
        yield MeasuredPair(leaf, (next(forms), next(forms)), why="not saved in its folder")
    for leaf, leaf_b in pair_leaves(ours, theirs).items():
        yield measure_pair(leaf, ours[leaf], theirs.pop(leaf_b))
        del ours[leaf]
    yield from measure_unpaired(*(
        {
            leaf: _shape_and_dtype_text(array)
            for leaf, array in arrays.items() if not holds_number(value, leaf)
        }
        for value, arrays in ((a, ours), (b, theirs))
    ))  # fmt: skip


def measure_unpaired(ours: dict[Leaf, str], theirs: dict[Leaf, str]) -> Iterator[MeasuredPair]:
    """Yield what is said of tensors that one value has alone, given their forms."""
    yield from (MeasuredPair(leaf, (form, ""), why="only in a") for leaf, form in ours.items())
    yield from (MeasuredPair(leaf, ("", form), why="only in b") for leaf, form in theirs.items())


def pair_leaves(ours: Mapping[Leaf, Array], theirs: Mapping[Leaf, Array]) -> dict[Leaf, Leaf]:
    """Pair the leaves of two values: equal ones, or a lone tensor with one of its shape."""
    if len(ours) == len(theirs) == 1:
        return dict(zip(ours, theirs, strict=True))
    if min(len(ours), len(theirs)) == 1 and not ours.keys() & theirs.keys():
        pairs = ((leaf, leaf_b) for leaf in ours for leaf_b in theirs)
        like = (
            pair for pair in pairs if _shape_text(ours[pair[0]]) == _shape_text(theirs[pair[1]])
        )
        return dict(itertools.islice(like, 1))
    return {leaf: leaf for leaf in ours if leaf in theirs}


def measure_pair(leaf: Leaf, a: Array, b: Array) -> MeasuredPair:
    """Measure how far two tensors lie apart, or say why they cannot be compared."""
    forms = _shape_and_dtype_text(a), _shape_and_dtype_text(b)
    dtypes = a.dtype, b.dtype
    n_elements = b.numel() if isinstance(b, Tensor) else math.prod(b.shape)
    result = MeasuredPair(leaf, forms, dtypes, n_elements=n_elements)
    are_nested = any(isinstance(array, Tensor) and array.is_nested for array in (a, b))
    if not are_nested and tuple(a.shape) != tuple(b.shape):
        return result._replace(why=f"shapes {_shape_text(a)} and {_shape_text(b)}")
    if _has_fractions(a.dtype) != _has_fractions(b.dtype):
        return result._replace(
            why=f"dtypes {name_without_torch(a.dtype)} and {name_without_torch(b.dtype)}"
        )
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _measure_tensors(result, a, b)
    return result._replace(gap=_measure_columns(a, b))


def _measure_tensors(result: MeasuredPair, a: Tensor, b: Tensor) -> MeasuredPair:
    without = next((tensor for tensor in (a, b) if not has_numbers(tensor)), None)
    if without is not None:
        return result._replace(why=f"{describe.in_full(without)} has no numbers")
    try:
        gap = difference(a, b)
    except NotImplementedError:  # packed dtypes
        return result._replace(why=f"torch cannot read numbers of {name_without_torch(a.dtype)}")
    except RuntimeError as error:  # large sparse tensors
        return result._replace(why=first_line(error))
    if math.isinf(gap.worst_element) and gap.problem.startswith("shapes"):  # of nested tensors
        return result._replace(why=gap.problem)
    if not gap.differs and _is_all_nan(b):
        return result._replace(why="all elements are NaN in both")
    return result._replace(gap=gap)


def _is_all_nan(tensor: Tensor) -> bool:
    """Tell whether all elements of a tensor are NaN: then nothing was compared."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    plain = detach_local_numbers(tensor).flatten()
    return bool(plain[:1].isnan().all()) and bool(plain.isnan().all())  # the first says no at once


def _measure_columns(a: Array, b: Array) -> Difference:
    """Measure columns of two stores, of which a few rows are read at once."""
    n_rows = max(1, _BLOCK_NUMEL // max(1, math.prod(a.shape[1:])))

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(a), n_rows):
            yield a[start : start + n_rows], b[start : start + n_rows]

    return difference_of_blocks(blocks)


def _measure_common_steps(a: StepNumbers, b: StepNumbers) -> MeasuredPair:
    steps = np.intersect1d(a.steps, b.steps)
    forms = tuple(f"{len(numbers.steps)} steps" for numbers in (a, b))
    result = MeasuredPair((), (forms[0], forms[1]), (torch.float32, torch.float32))
    if not len(steps):
        return result._replace(why="no step is in both")
    return result._replace(gap=difference(a.numbers_at(steps), b.numbers_at(steps)))


# -- tensors in a value --------------------------------------------------------------------------


def arrays_in(value: Any, leaf: Leaf = ()) -> Iterator[tuple[Leaf, Array]]:
    """Yield the tensors, arrays and numbers in a value, each as a tensor with its leaf."""
    if isinstance(value, Array):
        yield leaf, value
    elif isinstance(value, bool | int | float | complex):
        dtype = torch.float64 if isinstance(value, float) else None
        if isinstance(value, int) and value.bit_length() > 63:  # an int64 cannot hold it
            value = list(value.to_bytes(value.bit_length() // 8 + 1, signed=True))
        yield leaf, torch.tensor(value, dtype=dtype, device="cpu")
    elif hasattr(value, "__array__") and not isinstance(value, type):
        array = np.asarray(value)
        tensor = _as_tensor(array)
        if tensor is not None:
            yield leaf, tensor
        elif array.dtype == object and array.ndim:  # as NumPy holds rows of different lengths
            yield from arrays_in(array.tolist(), leaf)
    elif hasattr(value, "read") and hasattr(value, "dtype"):  # rows of a file
        yield leaf, value.read()
    elif len(leaf) < _DEEPEST:
        for key, part in tree.items(value) or ():
            yield from arrays_in(part, (*leaf, key))


def _unsaved_in(value: Any, leaf: Leaf = ()) -> Iterator[tuple[Leaf, str]]:
    """Yield what a folder holds in place of tensors that could not be saved, with their leaves."""
    if isinstance(value, NotSaved) and value.is_tensor:
        yield leaf, value.what
    elif not isinstance(value, Array) and len(leaf) < _DEEPEST:
        for key, part in tree.items(value) or ():
            yield from _unsaved_in(part, (*leaf, key))


def _as_tensor(array: NDArray[Any]) -> Tensor | None:
    """Return an array as a tensor; None if torch lacks its dtype, such as that of texts."""
    if array.dtype.name == "bfloat16":  # which other libraries add to NumPy
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    try:
        return torch.from_numpy(np.array(array, array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError):
        return None


def holds_number(value: Any, leaf: Leaf) -> bool:
    """Tell whether a leaf holds a plain number, such as a flag."""
    for key in leaf:
        value = next((part for name, part in tree.items(value) or () if name == key), None)
    return isinstance(value, bool | int | float | complex)


def _shape_and_dtype_text(array: Array) -> str:
    return f"{_shape_text(array)} {name_without_torch(array.dtype)}"


def _shape_text(array: Array) -> str:
    return describe.shape(array) if isinstance(array, Tensor) else str(list(array.shape))


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex or dtype in _QUANTISED


_QUANTISED = frozenset((torch.qint8, torch.quint8, torch.qint32))
