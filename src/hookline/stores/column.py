"""A column of a store: the values at one site, read like an array."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from hookline.display.text import name_without_torch, plural
from hookline.engine import hide_from_dir
from hookline.errors import StructureError
from hookline.files.safetensors_file import DTYPES
from hookline.stores.mapped_shards import MISSING, MappedRows, RowGatherer, Shards, find_shard
from hookline.stores.shard_file import LENGTH, ColumnForm, array_to_tensor, numpy_dtype

_MOST_AT_ONCE = 8192  # rows: they may lie in as many files


@final
@hide_from_dir("shard_array", "mapped_rows", "to_tensor")
class Column:
    """The values at one site, row after row, read from disk when they are asked for.

        >>> column = store["fc"]
        >>> column.shape, column.dtype
        ((100, 3), torch.float32)
        >>> column[40:42].shape, column[[3, -1]].shape, column[5].shape
        (torch.Size([2, 3]), torch.Size([2, 3]), torch.Size([3]))

    A column is indexed like a NumPy array: by a number, a slice, a mask of booleans, or a list,
    array or tensor of indices. Further indices pick parts of the rows: `column[5:9, :3]`. Indexing
    returns a tensor with its own copy. `np.asarray(column)` and `column.numpy(index)` give arrays,
    `torch.as_tensor(column)` a tensor.

    A row is an item, or a token if the site has a value for each token. Then `column.of_item(3)`
    reads the tokens of one item. `column.padded([3, 5])` reads those of several items, with a mask.

    Args:
        shards: the shards (files) of the store.
        form: the form of the column.

    Attributes:
        name: the site, as the store writes it.
        shape: the number of rows, and the shape of a row.
        ndim: the number of dimensions.
        dtype: the dtype of torch.
        nbytes: the bytes of all rows.
        is_ragged: whether rows are tokens, so that items have several.

    Raises:
        IndexError: by `column[index]`: a row is out of range.
        FolderError: by `column[index]`: a shard is gone or damaged.
    """

    def __init__(self, shards: Shards, form: ColumnForm) -> None:
        self._shards, self._form = shards, form
        bounds = self._shards.bounds_of(per_token=self._form.per_token)
        self._starts, self._stops, self._stop_array = bounds
        self._mapped = self._shards.mapped_by_shard(self._form.name)
        self.dtype: torch.dtype = DTYPES[self._form.dtype]
        self._numpy_dtype = numpy_dtype(self.dtype)
        self._is_plain = from_numpy(np.empty(0, self._numpy_dtype)).dtype is self.dtype
        self._length = bounds.length
        self._row_bytes = math.prod(self._form.shape) * self.dtype.itemsize
        # What a row is copied from: single numbers, and dtypes that NumPy lacks, need more.
        self._simple = self._mapped if self._is_plain and self._form.shape else {}
        self._gatherer: RowGatherer | None = None
        if self._shards.is_mapped and RowGatherer.can_gather(self._form.shape):
            self._gatherer = RowGatherer(self._form.shape, self._numpy_dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return Column, (self._shards, self._form)

    @property
    def name(self) -> str:
        """The site, as the store writes it."""
        return self._form.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows, and the shape of a row."""
        return (self._length, *self._form.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return 1 + len(self._form.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return self._length * self._row_bytes

    @property
    def is_ragged(self) -> bool:
        """Tell whether rows are tokens, so that items have several."""
        return self._form.per_token

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(self._length))

    def __getitem__(self, index: Any) -> Tensor:
        # A single row is asked for most often, and there a tenth of a microsecond counts.
        if type(index) is int and index >= 0:
            shard = bisect_right(self._stops, index)
            try:
                array = self._simple[shard].array
            except KeyError:  # not mapped yet, out of range, or not to be copied so simply
                return self.to_tensor(self._read(index))
            return from_numpy(array[index - self._starts[shard]].copy())
        return self.to_tensor(self._read(index))

    def numpy(self, index: Any = slice(None)) -> NDArray[Any]:
        """Return rows as a NumPy array with its own copy of the values.

            >>> store["fc"].numpy([3, 4]).shape
            (2, 3)

        Args:
            index: which rows, as in `column[index]`; all by default.

        Returns:
            The array, with the shape of `column[index]`.

        Raises:
            IndexError: a row is out of range.
            StructureError: NumPy does not have the dtype, such as bfloat16.
            FolderError: a shard is gone or damaged.
        """
        if type(index) is int and index >= 0:  # as in column[index]
            shard = bisect_right(self._stops, index)
            mapped = self._simple.get(shard)
            if mapped is not None:
                row: NDArray[Any] = mapped.array[index - self._starts[shard]].copy()
                return row
        if not self._is_plain:
            raise StructureError(
                f"{self.name} must have a dtype that NumPy has, got {self.dtype}."
                f"\nConvert a tensor: store[{self.name!r}][:1000].float().numpy()."
            )
        return self._read(index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a column must be copied to become an array: leave out copy=False.")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    # torch.as_tensor and np.from_dlpack ask for these; torch would read a sequence row by row.
    def __dlpack__(self, **options: Any) -> Any:
        return self[:].__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self[:0].__dlpack_device__()

    # -- items of several rows ------------------------------------------------------------------

    @property
    def lengths(self) -> Column:
        """The number of tokens of each item, as a column of int64.

            >>> ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
            >>> tokens = hl.extract(
            ...     nn.Embedding(9, 4), ids, "", tmp_path / "tokens", mask=lambda ids: ids != 0
            ... )
            >>> tokens[""].lengths[:]
            tensor([2, 1])

        Raises:
            StructureError: the rows of this column are items, not tokens.
        """
        self._check_ragged("lengths")
        return Column(self._shards, ColumnForm(LENGTH, "I64", (), "item"))

    def of_item(self, item: int) -> Tensor:
        """Return the rows of one item, of shape `(tokens, ...)`.

            >>> ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
            >>> tokens = hl.extract(
            ...     nn.Embedding(9, 4), ids, "", tmp_path / "tokens", mask=lambda ids: ids != 0
            ... )
            >>> tokens[""].of_item(0).shape
            torch.Size([2, 4])

        Args:
            item: the position of the item in the store; negative numbers count from the end.

        Returns:
            A tensor with its own copy of the rows.

        Raises:
            IndexError: there is no such item.
            StructureError: the rows of this column are items, not tokens; write `column[item]`.
            FolderError: a shard is gone or damaged.
        """
        return self.to_tensor(self._rows_of_item(item))

    def of_items(self, items: Any) -> list[Tensor]:
        """Return a list of the rows of several items, a tensor `(tokens, ...)` for each item.

            >>> ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
            >>> tokens = hl.extract(
            ...     nn.Embedding(9, 4), ids, "", tmp_path / "tokens", mask=lambda ids: ids != 0
            ... )
            >>> [len(rows) for rows in tokens[""].of_items([1, 0])]
            [1, 2]

        Args:
            items: the positions of the items in the store: indices, a slice or a mask.

        Raises:
            IndexError: there is no such item.
            StructureError: the rows of this column are items, not tokens; write `column[items]`.
            FolderError: a shard is gone or damaged.
        """
        return [
            self.to_tensor(self._rows_of_item(item)) for item in self._items_to_positions(items)
        ]

    def padded(self, items: Any) -> tuple[Tensor, Tensor]:
        """Return the rows of several items in one tensor, with zeros behind the shorter ones.

            >>> ids = torch.tensor([[1, 2, 0], [3, 0, 0]])
            >>> tokens = hl.extract(
            ...     nn.Embedding(9, 4), ids, "", tmp_path / "tokens", mask=lambda ids: ids != 0
            ... )
            >>> values, mask = tokens[""].padded([1, 0])
            >>> values.shape, mask.tolist()
            (torch.Size([2, 2, 4]), [[True, False], [True, True]])

        Args:
            items: the positions of the items in the store: indices, a slice or a mask.

        Returns:
            The values, of shape `(items, longest, ...)`, where `longest` is the number of tokens of
            the longest item. And a mask of shape `(items, longest)`, which is True at each token.

        Raises:
            IndexError: there is no such item.
            StructureError: the rows of this column are items, not tokens; write `column[items]`.
            FolderError: a shard is gone or damaged.
        """
        rows = [self._rows_of_item(item, copied=False) for item in self._items_to_positions(items)]
        lengths = np.array([len(tokens) for tokens in rows], np.int64)
        longest = int(lengths.max(initial=0))
        padded = np.zeros((len(rows), longest, *self._form.shape), self._numpy_dtype)
        for target, tokens in zip(padded, rows, strict=True):
            target[: len(tokens)] = tokens
        return self.to_tensor(padded), from_numpy(np.arange(longest) < lengths[:, None])

    def _rows_of_item(self, item: int, *, copied: bool = True) -> NDArray[Any]:
        self._check_ragged("of_item")
        n_items = self._shards.item_bounds.length
        if not hasattr(item, "__index__"):
            raise TypeError(
                f"an item must be a number, got {item!r}.\nGive column.of_item(0) for the first."
            )
        at = item + n_items if item < 0 else item
        if not 0 <= at < n_items:
            raise IndexError(f"an item must be below {n_items:,}, the number of items, got {item}.")
        shard, number = find_shard(self._shards.item_bounds.stops, at)
        stops = self._shards.item_stops(shard)
        rows = self.shard_array(shard)[stops[number - 1] if number else 0 : stops[number]]
        return rows.copy() if copied else rows

    def _items_to_positions(self, items: Any) -> list[int]:
        n_items = self._shards.item_bounds.length
        numbers: list[int] = index_to_positions(items, n_items, "items").reshape(-1).tolist()
        return numbers

    def _check_ragged(self, attribute: str) -> None:
        if not self._form.per_token:
            raise StructureError(
                f"{self.name} must have a row for each token for {attribute}, got one for each"
                f" item.\nWrite store[{self.name!r}][item]."
            )

    # -- rows -----------------------------------------------------------------------------------

    def _read(self, index: Any) -> NDArray[Any]:
        """Read rows, and what further indices pick of them, as an array of its own memory."""
        rows, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
        if rows is Ellipsis or rows is None or (isinstance(index, tuple) and not index):
            return self._copy(self._read_slice(slice(None), ())[index])
        is_basic = all(
            part is None or part is Ellipsis or isinstance(part, slice) or type(part) is int
            for part in rest
        )
        if isinstance(rows, slice):
            if is_basic:
                return self._read_slice(rows, tuple(rest))
            return self._copy(self._read_slice(rows, ())[(slice(None), *_tensors_to_arrays(rest))])
        rows = index_to_positions(rows, self._length, "rows")
        if is_basic:
            values = self._gather_rows(rows.reshape(-1), tuple(rest))
            return values.reshape((*rows.shape, *values.shape[1:]))
        values = self._gather_rows(rows.reshape(-1), ())
        places = np.arange(rows.size).reshape(rows.shape) if rows.ndim else 0
        return self._copy(values[(places, *_tensors_to_arrays(rest))])

    def _read_slice(self, rows: slice, rest: tuple[Any, ...]) -> NDArray[Any]:
        """Copy the rows of a slice, shard by shard."""
        span = range(*rows.indices(self._length))
        values = self._allocate_rows(len(span), rest)
        target = values
        if span.step < 0:
            span, target = span[::-1], values[::-1]
        n_copied = 0
        while n_copied < len(span):
            shard, first = find_shard(self._stops, span[n_copied])
            part = self.shard_array(shard)[first :: span.step][: len(span) - n_copied]
            target[n_copied : n_copied + len(part)] = part[(slice(None), *rest)] if rest else part
            n_copied += len(part)
        return values

    def _gather_rows(self, rows: NDArray[np.int64], rest: tuple[Any, ...]) -> NDArray[Any]:
        """Copy rows in the order in which they are asked for."""
        n_rows = len(rows)
        if not n_rows or (rows[-1] - rows[0] == n_rows - 1 and np.all(np.diff(rows) == 1)):
            first = int(rows[0]) if n_rows else 0
            return self._read_slice(slice(first, first + n_rows), rest)
        if n_rows > _MOST_AT_ONCE:
            values = self._allocate_rows(n_rows, rest)
            for start in range(0, n_rows, _MOST_AT_ONCE):
                part = slice(start, start + _MOST_AT_ONCE)
                values[part] = self._gather_rows(rows[part], rest)
            return values
        shards = self._stop_array.searchsorted(rows, "right")
        if self._gatherer is None or rest:
            return self._gather_rows_by_shard(rows, shards, rest)
        # Held until the rows are copied: another thread may drop what is mapped.
        origins = self._shards.row_addresses(self._form.name)
        addresses = origins.of_shard[shards]
        if addresses.min() == MISSING:
            for shard in set(shards.tolist()):
                array, address = self.mapped_rows(shard)
                origins.add_shard(shard, array, address - self._starts[shard] * self._row_bytes)
            addresses = origins.of_shard[shards]
        addresses += rows * self._row_bytes
        return self._gatherer(addresses)

    def _gather_rows_by_shard(
        self, rows: NDArray[np.int64], shards: NDArray[np.int64], rest: tuple[Any, ...]
    ) -> NDArray[Any]:
        values = self._allocate_rows(len(rows), rest)
        for shard in np.unique(shards).tolist():
            places = np.flatnonzero(shards == shard)
            array = self.shard_array(shard)[(slice(None), *rest)]
            values[places] = array[rows[places] - self._starts[shard]]
        return values

    def _allocate_rows(self, n_rows: int, rest: tuple[Any, ...]) -> NDArray[Any]:
        """Make room for rows. If that fails, check first that the shards have so many rows."""
        try:
            return np.empty((n_rows, *self._shape_after_index(rest)), self._numpy_dtype)
        except (MemoryError, ValueError):
            self._shards.check_rows_of_column(self._form)
            raise

    def _shape_after_index(self, rest: tuple[Any, ...]) -> tuple[int, ...]:
        """Return the shape of what further indices pick of a row."""
        if not rest:
            return self._form.shape
        return np.empty((0, *self._form.shape), np.bool_)[(slice(None), *rest)].shape[1:]

    def shard_array(self, shard: int) -> NDArray[Any]:
        """Return the rows of a shard where they are mapped. Do not write to them."""
        return self.mapped_rows(shard).array

    def mapped_rows(self, shard: int) -> MappedRows:
        """Return the rows of a shard where they are mapped, and their address."""
        mapped = self._mapped.get(shard)
        return self._shards.mapped_rows(shard, self._form) if mapped is None else mapped

    def _copy(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def to_tensor(self, array: NDArray[Any]) -> Tensor:
        """Return an array of rows as a tensor that shares its memory."""
        if not array.ndim:
            return self.to_tensor(array.reshape(1))[0]
        return from_numpy(array) if self._is_plain else array_to_tensor(array, self.dtype)

    def __repr__(self) -> str:
        kind = "token" if self._form.per_token else "item"
        dtype = name_without_torch(self.dtype)
        return (
            f"Column {self.name!r}: {plural(self._length, 'row')} of {list(self._form.shape)}"
            f" {dtype}, one for each {kind}"
        )


def index_to_positions(index: Any, length: int, word: str) -> NDArray[np.int64]:
    """Return a number, a slice, numbers or a mask as an array of numbers from 0.

    `length` is the number of rows or items, and `word` the word for them.

    Raises:
        IndexError: one is out of range, or they are neither integers nor a mask.
    """
    if isinstance(index, slice):
        return np.arange(*index.indices(length))
    if isinstance(index, Tensor):
        index = index.detach().cpu().numpy()
    numbers = np.asarray(index)
    if numbers.dtype == np.bool_ and numbers.ndim == 1:
        if len(numbers) != length:
            raise IndexError(f"a mask of {word} must have {length:,} values, got {len(numbers):,}.")
        return np.flatnonzero(numbers)
    if numbers.size == 0 and isinstance(index, Sequence):
        numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "iu":
        raise IndexError(
            f"an index must be of integers, a slice or a mask of booleans, got {index!r}."
            f"\nGive the numbers of {word}, such as [0, 5], or a slice such as [:100]."
        )
    if numbers.dtype.kind == "u":
        # Else it would become negative.
        numbers = np.minimum(numbers.astype(np.uint64), np.uint64(2**63 - 1))
    numbers = numbers.astype(np.int64, copy=False)
    if not numbers.size or numbers.view(np.uint64).max() < length:
        return numbers  # the common case, in one look: a negative number would be a large one
    is_outside = (numbers < -length) | (numbers >= length)
    if is_outside.any():
        raise IndexError(
            f"{word} must be below {length:,}, the number of {word}, got"
            f" {int(numbers[is_outside].flat[0]):,}."
        )
    return np.where(numbers < 0, numbers + length, numbers)


def _tensors_to_arrays(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.detach().cpu().numpy() if isinstance(part, Tensor) else part for part in rest)
