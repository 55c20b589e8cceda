"""Arrays as data: each row is an item. Mapped files stay on disk."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from hookline.data.buffer_pool import BufferPool
from hookline.data.fingerprints import N_SAMPLES, WHOLE_BYTES, spread_indices
from hookline.data.indexed_source import Items, RawBatch
from hookline.display.text import listed, name_without_torch
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError
from hookline.files.safetensors_file import to_byte_array

_PIECE_BYTES = 8 * 1024**2


class ArrayInFile(NamedTuple):
    """The bytes of an array inside a file."""

    path: Path  # the file
    offset: int  # the first byte of the first element
    dtype: str  # the dtype, as NumPy writes it
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # the bytes from one index to the next, for each dimension

    @property
    def end(self) -> int:
        """The first byte behind the array."""
        if 0 in self.shape:
            return self.offset
        steps = zip(self.shape, self.strides, strict=True)
        last = sum(max((n - 1) * step, 0) for n, step in steps)
        return self.offset + last + np.dtype(self.dtype).itemsize

    def map_readonly(self) -> NDArray[Any]:
        """Map the array read-only."""
        remedy = "Put the file back that the job was started with."
        try:
            data = np.memmap(self.path, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise InputError(
                f"{self.path} must be readable, got {type(error).__name__}: {error}.\n{remedy}"
            ) from error
        if self.end > len(data):
            raise InputError(
                f"{self.path} must have at least {self.end} bytes, got {len(data)}.\n{remedy}"
            )
        return np.ndarray(self.shape, np.dtype(self.dtype), data.data, self.offset, self.strides)


def find_array_in_file(array: Any) -> ArrayInFile | None:
    """Find the file of a memory-mapped array, or of a view of one; None for anything else."""
    base: Any = array
    while isinstance(base, np.ndarray):
        top, base = base, base.base
    if not isinstance(base, mmap.mmap) or not isinstance(top, np.memmap) or top.filename is None:
        return None
    if top.mode == "c":  # copy-on-write: memory may differ from the file
        return None
    start = top.offset - top.offset % mmap.ALLOCATIONGRANULARITY
    address = np.frombuffer(base, np.uint8).ctypes.data
    offset = start + array.ctypes.data - address
    return ArrayInFile(Path(top.filename), offset, array.dtype.str, array.shape, array.strides)


@final
class ArrayRows:
    """The rows of a tensor, an array of NumPy, or anything that gives one when it is sliced.

    It pickles as the place in its file where it is memory-mapped.

    Args:
        array: the array, or the place of one in a file.
        to: the dtype of the rows; None for the array's own.
    """

    def __init__(self, array: Any, to: torch.dtype | None = None) -> None:
        is_part = isinstance(array, ArrayInFile)
        self._array: Any = None if is_part else array
        self._part: ArrayInFile | None = array if is_part else find_array_in_file(array)
        self.shape: tuple[int, ...] = tuple(array.shape)
        self.dtype: Any = array.dtype
        self._to = to
        self._memory = BufferPool()

    def to_dtype(self, to: torch.dtype) -> ArrayRows:
        """Return the same rows in another dtype, as they are read."""
        return ArrayRows(self._array if self._part is None else self._part, to)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_array": None} if self._part is not None else vars(self)

    def read(
        self, start: int | None = None, stop: int | None = None, *, pinned: bool = False
    ) -> Tensor:
        """Copy rows into a tensor, in this machine's byte order.

        `pinned` copies rows that are not on a device into page-locked memory.
        """
        if self._array is None:
            assert self._part is not None
            self._array = self._part.map_readonly()
        rows = self._array[slice(start, stop) if self.shape else ()]
        if isinstance(rows, Tensor):  # copied: a model may change its input in place
            rows = rows.detach()
            is_here = type(rows) is Tensor and rows.device.type == "cpu"
            return self._empty_like(rows, pinned=pinned).copy_(rows) if is_here else rows.clone()
        rows = np.asarray(rows)
        form = torch.from_numpy(np.empty(rows.shape, rows.dtype.newbyteorder("=")))
        copy = self._empty_like(form, pinned=pinned)
        np.copyto(copy.numpy(), rows)
        return copy if self._to is None else copy.to(self._to)

    def _empty_like(self, tensor: Tensor, *, pinned: bool) -> Tensor:
        if pinned:
            return torch.empty_like(tensor, pin_memory=True)
        return self._memory.empty_like(tensor)


@final
class ArrayItems(Items):
    """Items that are rows of arrays of one length.

    Args:
        arrays: an array; a tuple of arrays, the model's arguments; or a dict of them, its keyword
            arguments.
        argument: the name of the argument, for messages.

    Raises:
        InputError: an array has no rows, a dtype that torch lacks, or a length of its own.
    """

    may_draw_random = False
    fix = "Give arrays of one length."

    def __init__(self, arrays: Any, argument: str = "data") -> None:
        self._arrays = arrays
        parts = _named_rows(arrays)
        for name, rows in parts:
            _check_rows(rows, argument + name)
        lengths = {rows.shape[0] for _, rows in parts}
        if len(lengths) != 1:
            texts = [f"{rows.shape[0]:,} in {argument}{name}" for name, rows in parts]
            raise InputError(
                f"{argument} must hold arrays of one length, got {listed(texts, 4)}."
                "\nCut them to one length, or leave out those that the model does not take."
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def identity(self) -> dict[str, Any]:
        """Return shape, dtype and fingerprint of each array."""
        parts = {name: _shape_and_fingerprint(rows) for name, rows in _named_rows(self._arrays)}
        if "" in parts:
            return {"kind": "array", **parts[""]}
        return {"kind": "arrays", "arrays": parts}

    def load_batch(self, number: int, indices: range, *, pinned: bool = False) -> RawBatch:
        """Copy rows. Errors are raised: the rows are of one file or memory."""
        start, stop = indices.start, indices.stop
        parts = [rows.read(start, stop, pinned=pinned) for _, rows in _named_rows(self._arrays)]
        is_lone = isinstance(self._arrays, ArrayRows)
        data = parts[0] if is_lone else tree.rebuild(self._arrays, parts)
        return RawBatch(number, list(indices), data)


def is_array(value: Any) -> bool:
    """Return whether a value is a tensor, or has a shape, a dtype and rows."""
    if isinstance(value, type):
        return False
    return isinstance(value, Tensor | ArrayRows) or all(
        hasattr(value, name) for name in ("shape", "dtype", "__len__", "__getitem__")
    )


def array_items(data: Any, argument: str = "data") -> ArrayItems:
    """Return the rows of an array, or of a tuple or mapping of arrays, as items."""
    if is_array(data):
        return ArrayItems(_dense_rows(data, argument), argument)
    is_several = isinstance(data, Mapping | tuple | list)
    keys: Any = list(data) if isinstance(data, Mapping) else range(len(data) if is_several else 0)
    for key in keys:
        if not is_array(data[key]):
            fix = "Leave it out, or give a list or a Dataset, whose items may be anything."
            if isinstance(data, Mapping) and isinstance(data[key], list):
                fix = "Make it a tensor: a tokenizer does with return_tensors='pt', padding=True."
            raise InputError(
                f"{argument}[{key!r}] must be an array or a tensor, got"
                f" {describe.in_words(data[key])}.\n{fix}"
            )
    if not keys:
        raise InputError(
            f"{argument} must hold at least one array, got"
            f" {'an empty ' * is_several}{type(data).__name__}."
            "\nGive the arrays that the model takes."
        )
    rows = {key: _dense_rows(data[key], f"{argument}[{key!r}]") for key in keys}
    return ArrayItems(rows if isinstance(data, Mapping) else tuple(rows.values()), argument)


def read_rows(rows: ArrayRows, name: str, *bounds: int) -> Tensor:
    """Copy rows; all of them without bounds."""
    try:
        return rows.read(*bounds)
    except InputError:  # the file is damaged
        raise
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{name} must hold numbers of a dtype that torch has, got {rows.dtype}."
            "\nConvert it first, such as array.astype('float32')."
        ) from error


def _dense_rows(array: Any, name: str) -> ArrayRows:
    """Return the rows of an array."""
    if not isinstance(array, Tensor):
        return array if isinstance(array, ArrayRows) else ArrayRows(array)
    if array.is_meta:
        raise InputError(
            f"{name} must hold numbers, got a tensor on the meta device, which holds a shape alone."
            "\nMake it on the CPU or an accelerator."
        )
    if array.is_nested or array.layout is not torch.strided:
        kind = "nested" if array.is_nested else name_without_torch(array.layout)
        dense = "to_padded_tensor(0.0)" if array.is_nested else "to_dense()"
        raise InputError(
            f"{name} must be a dense tensor, whose rows can be cut out, got a {kind} one."
            f"\nGive what its {dense} returns, or a list of tensors, one for each item."
        )
    return ArrayRows(array.detach())


def _named_rows(arrays: Any) -> list[tuple[str, ArrayRows]]:
    if isinstance(arrays, dict):
        return [(f"[{key!r}]", rows) for key, rows in arrays.items()]
    if isinstance(arrays, tuple):
        return [(f"[{index}]", rows) for index, rows in enumerate(arrays)]
    return [("", arrays)]


def _check_rows(rows: ArrayRows, name: str) -> None:
    """Check that an array has rows, in a dtype that torch has."""
    if not rows.shape or not rows.shape[0]:
        raise InputError(
            f"{name} must have at least one row, got shape {list(rows.shape)}."
            "\nGive an array whose first dimension counts the items."
        )
    read_rows(rows, name, 0, 1)


def _shape_and_fingerprint(rows: ArrayRows) -> dict[str, Any]:
    """Return shape, dtype and a fingerprint: of all rows, or of a large array's 1,024."""
    first = rows.read(0, 1)
    n, row_bytes = rows.shape[0], max(first.nbytes, 1)
    digest = xxh3_128()
    if n * row_bytes <= WHOLE_BYTES:
        step = max(_PIECE_BYTES // row_bytes, 1)
        ranges = [(start, min(start + step, n)) for start in range(0, n, step)]
    else:
        most = max(min(N_SAMPLES, WHOLE_BYTES // row_bytes), 2)
        ranges = [(row, row + 1) for row in spread_indices(n, most)]
    for start, stop in ranges:
        digest.update(to_byte_array(rows.read(start, stop)).data)
    dtype = name_without_torch(first.dtype)
    return {"shape": list(rows.shape), "dtype": dtype, "fingerprint": digest.hexdigest()}
