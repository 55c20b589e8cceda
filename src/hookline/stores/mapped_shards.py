"""The shards of an opened store: which rows each holds, and its bytes, memory-mapped on use.

A file is mapped once for all of its columns, and keeps no file open. Past `MOST_MAPPED` files, the
one that was mapped first is unmapped: Linux lets a process map 65,530.
"""

from __future__ import annotations

import errno
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from hookline.display.text import first_line
from hookline.errors import FolderError
from hookline.files.folder_or_url import LocalPlace, Place
from hookline.files.safetensors_file import DTYPES, header_end
from hookline.files.unreadable_or_damaged import DAMAGE, convert_read_errors
from hookline.stores.shard_file import (
    LENGTH,
    ColumnForm,
    ColumnSpan,
    Shard,
    bytes_to_array,
    decode_header,
    numpy_dtype,
    shard_file_name,
    verify_checksum,
)
from hookline.util.fork_safe_lock import fork_safe_lock

MOST_MAPPED = 16_000  # files
MOST_DOWNLOADED = 256 * 2**20  # bytes, of a store that is not on this machine
_LISTS = ("places", "numbers", "sizes", "seals", "n_items", "n_rows")  # with an entry a shard


class MappedRows(NamedTuple):
    """A column's rows in a shard."""

    array: NDArray[Any]  # the rows
    address: int  # where they begin in the memory of this process


class _OpenShard(NamedTuple):
    """A shard in memory: its description, and its file; None if only columns are downloaded."""

    shard: Shard
    data: NDArray[np.uint8] | None
    state: Any


class ShardBounds(NamedTuple):
    """Hold the number of each shard's first item or row, and of the first one after it."""

    starts: list[int]  # the first of each shard, and the length
    stops: list[int]  # the first after each shard
    stop_array: NDArray[np.int64]  # the same as an array

    @classmethod
    def of(cls, sizes: list[int]) -> ShardBounds:
        """Return the bounds of shards of these sizes."""
        stop_array = np.cumsum(np.array(sizes, np.int64))
        stops = stop_array.tolist()
        return cls([0, *stops], stops, stop_array)

    @property
    def length(self) -> int:
        """The number of all items or rows."""
        return self.starts[-1]


@final
class Shards:
    """The shards of one store, or of several that are read as one.

    Args:
        place: where the store is.
        written: the manifest's `"shards"`.

    Raises:
        ValueError, KeyError, TypeError: the manifest is damaged.
    """

    def __init__(self, place: Place, written: Mapping[str, list[Any]]) -> None:
        sizes, seals = written["sizes"], written["seals"]
        self.places: list[Place] = [place] * len(sizes)
        self.numbers: list[int] = list(range(len(sizes)))
        self.sizes: list[int] = sizes
        self.seals: list[str] = seals
        self.n_items: list[int] = written["items"]
        self.n_rows: list[int] = written["rows"]
        if not len(sizes) == len(seals) == len(self.n_items) == len(self.n_rows):
            raise ValueError("it must list each shard in each of its lists")
        self._init_bounds_and_caches()

    @staticmethod
    def joined(parts: Iterable[Shards]) -> Shards:
        """Return the shards of several stores as one; nothing is copied or read."""
        stores = list(parts)
        joined = Shards.__new__(Shards)
        for name in _LISTS:
            setattr(joined, name, [entry for part in stores for entry in getattr(part, name)])
        joined._init_bounds_and_caches()
        return joined

    def _init_bounds_and_caches(self) -> None:
        self.item_bounds: ShardBounds = ShardBounds.of(self.n_items)
        are_items = self.n_rows == self.n_items
        self.row_bounds: ShardBounds = (
            self.item_bounds if are_items else ShardBounds.of(self.n_rows)
        )
        # Whether values are read where they are mapped, and never downloaded.
        self.is_mapped: bool = all(isinstance(place, LocalPlace) for place in {*self.places})
        self._lock = fork_safe_lock()
        # By column and shard. Look-ups of rows read these dicts without a lock.
        self._mapped: dict[str, dict[int, MappedRows]] = {}
        self._origins: dict[str, RowAddresses] = {}
        self._stops: dict[int, NDArray[np.int64]] = {}
        self._open_shards: dict[int, _OpenShard] = {}
        self._alive: WeakValueDictionary[tuple[int, str], NDArray[np.uint8]] = WeakValueDictionary()
        self._downloaded: dict[int, int] = {}  # bytes, by shard
        # What was verified needs no second look while its file is unchanged.
        self._verified: dict[int, tuple[Any, set[str]]] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def bounds_of(self, *, per_token: bool) -> ShardBounds:
        """Return the bounds of rows that are tokens, or items."""
        return self.row_bounds if per_token else self.item_bounds

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is mapped: another process maps it again."""
        return {name: getattr(self, name) for name in _LISTS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_bounds_and_caches()

    def full_file_name(self, shard: int) -> str:
        """Return the name of a shard's file, with its place."""
        return f"{self.places[shard]}/{shard_file_name(self.numbers[shard])}"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the file, the items, the rows and the bytes of each shard, as plain values."""
        return [
            {
                "file": self.full_file_name(shard),
                "items": int(self.n_items[shard]),
                "rows": int(self.n_rows[shard]),
                "bytes": int(self.sizes[shard]),
            }
            for shard in range(len(self))
        ]

    def mapped_by_shard(self, column: str) -> dict[int, MappedRows]:
        """Return the rows of a column that are mapped now, by shard. Others change this dict."""
        return self._mapped.setdefault(column, {})

    def row_addresses(self, column: str) -> RowAddresses:
        """Return where the rows of a column are mapped now."""
        origins = self._origins.get(column)
        if origins is None:
            origins = self._origins.setdefault(column, RowAddresses(len(self)))
        return origins

    def mapped_rows(self, shard: int, form: ColumnForm) -> MappedRows:
        """Return a column's rows in a shard, verified on first use. Do not write to them.

        Raises:
            FolderError: the shard is gone or damaged.
        """
        mapped = self.mapped_by_shard(form.name).get(shard)
        if mapped is not None:
            return mapped
        with self._lock, self._forget_if_damaged(shard):
            return self._read_rows(shard, form)

    def item_stops(self, shard: int) -> NDArray[np.int64]:
        """Return the row after the last of each item of a shard, counted within the shard."""
        stops = self._stops.get(shard)
        if stops is None:
            stops = np.cumsum(self.mapped_rows(shard, ColumnForm(LENGTH, "I64", (), "item")).array)
            self._stops[shard] = stops
        return stops

    def items_of_rows(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the item that each row belongs to, for rows that are tokens."""
        shards = self.row_bounds.stop_array.searchsorted(rows, "right")
        items = np.empty_like(rows)
        for shard in np.unique(shards).tolist():
            is_in_shard = shards == shard
            within = rows[is_in_shard] - self.row_bounds.starts[shard]
            before = self.item_bounds.starts[shard]
            items[is_in_shard] = before + np.searchsorted(self.item_stops(shard), within, "right")
        return items

    def read_description(self, shard: int) -> Shard:
        """Return the description of a shard."""
        with self._lock, self._forget_if_damaged(shard):
            return self._open(shard).shard

    def check_rows_of_column(self, form: ColumnForm) -> None:
        """Check that each shard has the rows of a column that the manifest lists."""
        for shard in range(len(self)):
            with self._lock, self._forget_if_damaged(shard):
                if n_rows := self._n_rows(shard, form):
                    _checked_span(self._open(shard).shard.spans.get(form.name), form, n_rows)

    def _n_rows(self, shard: int, form: ColumnForm) -> int:
        return int((self.n_rows if form.per_token else self.n_items)[shard])

    def release(self) -> None:
        """Unmap all files. Arrays that are still referenced stay valid."""
        with self._lock:
            for shard in list(self._open_shards):
                self._forget(shard)

    @contextmanager
    def _forget_if_damaged(self, shard: int) -> Iterator[None]:
        """Forget a shard that turns out to be damaged, so that a mended shard is read again."""
        try:
            with convert_read_errors(self.full_file_name(shard)):
                yield
        except FolderError:
            raise
        except FileNotFoundError as error:
            self._forget(shard)
            raise self._damaged_error(shard, "is gone") from error
        except DAMAGE as error:
            self._forget(shard)
            raise self._damaged_error(shard, f"is damaged: {first_line(error)}") from error

    def _read_rows(self, shard: int, form: ColumnForm) -> MappedRows:
        opened = self._open(shard)
        n_rows = self._n_rows(shard, form)
        span = opened.shard.spans.get(form.name)
        if span is None and not n_rows:  # all of its items were skipped
            empty = np.empty((0, *form.shape), numpy_dtype(DTYPES[form.dtype]))
            return self.mapped_by_shard(form.name).setdefault(shard, MappedRows(empty, 0))
        span = _checked_span(span, form, n_rows)
        if opened.data is None:
            data = self._download(shard, form.name, span)
        else:
            data = opened.data[span.start : span.stop]
        _, verified = self._verified[shard]
        if form.name not in verified or opened.state is None:
            try:
                verify_checksum(span, data)
            except ValueError as error:
                self._alive.pop((shard, form.name), None)  # an error's frames may keep it alive
                raise ValueError(f"{form.name!r}: {error}") from None
            verified.add(form.name)
        array = bytes_to_array(span, data)
        mapped = MappedRows(array, array.__array_interface__["data"][0])
        self.mapped_by_shard(form.name)[shard] = mapped
        return mapped

    def _open(self, shard: int) -> _OpenShard:
        """Map a shard's file, or download its description."""
        opened = self._open_shards.get(shard)
        if opened is not None:
            return opened
        place, file = self.places[shard], self._file_name(shard)
        data, state = None, None
        if isinstance(place, LocalPlace):
            while len(self._open_shards) >= MOST_MAPPED:
                self._forget(next(iter(self._open_shards)))
            state = place.state(file)
            data = self._map_file(place, file)
            size, first = len(data), data[:8].tobytes()
            read = data[: header_end(first)].tobytes()
        else:
            size = place.size(file)
            first = place.read(file, 0, min(8, size))
            read = first + place.read(file, 8, min(header_end(first), size))
        if size != self.sizes[shard]:
            raise ValueError(f"it must be {self.sizes[shard]:,} bytes long, got {size:,}")
        description = decode_header(read, size)
        if description.seal != self.seals[shard]:
            raise ValueError(f"its seal must be {self.seals[shard]}, got {description.seal}")
        if self._verified.get(shard, (None,))[0] != state or state is None:
            self._verified[shard] = state, set()
        opened = self._open_shards[shard] = _OpenShard(description, data, state)
        return opened

    def _map_file(self, place: LocalPlace, file: str) -> NDArray[np.uint8]:
        size = place.size(file)
        try:
            return place.view(file, 0, size)
        except RuntimeError as error:
            # Others in this process have used up its mappings: give ours back, and try once more.
            if f"({errno.ENOMEM})" not in str(error) or not self._open_shards:
                raise
            self.release()
            return place.view(file, 0, size)

    def _download(self, shard: int, column: str, span: ColumnSpan) -> NDArray[np.uint8]:
        # What somebody still holds need not be downloaded again.
        data = self._alive.get((shard, column))
        if data is None:
            data = self.places[shard].view(self._file_name(shard), span.start, span.stop)
            self._alive[shard, column] = data
        self._evict_downloads(data.nbytes, shard)
        return data

    def _evict_downloads(self, n_bytes: int, shard: int) -> None:
        """Forget what was downloaded first, for columns that are not on this machine."""
        self._downloaded[shard] = self._downloaded.get(shard, 0) + n_bytes
        while sum(self._downloaded.values()) > MOST_DOWNLOADED and len(self._downloaded) > 1:
            self._forget(next(number for number in self._downloaded if number != shard))

    def _forget(self, shard: int) -> None:
        self._open_shards.pop(shard, None)
        self._downloaded.pop(shard, None)
        self._stops.pop(shard, None)
        self._origins.clear()
        for column in self._mapped.values():
            column.pop(shard, None)

    def _file_name(self, shard: int) -> str:
        return shard_file_name(self.numbers[shard])

    def _damaged_error(self, shard: int, fault: str) -> FolderError:
        return FolderError(
            f"{self.full_file_name(shard)} {fault}.\nRemove what is damaged with `hookline store"
            f" repair {self.places[shard]}`, then start the same hl.extract again."
        )


def find_shard(stops: list[int], index: int) -> tuple[int, int]:
    """Return the shard that holds a row, and the row's index in it."""
    shard = bisect_right(stops, index)
    return shard, index - (stops[shard - 1] if shard else 0)


def _checked_span(span: ColumnSpan | None, form: ColumnForm, n_rows: int) -> ColumnSpan:
    """Return the span of a column in a shard."""
    if span is None:
        raise ValueError(f"it must hold {form.name!r}")
    if span.dtype != form.dtype or span.shape != (n_rows, *form.shape):
        raise ValueError(
            f"{form.name!r} must be {form.dtype} of {[n_rows, *form.shape]}, got {span.dtype}"
            f" of {list(span.shape)}"
        )
    return span


MISSING = np.iinfo(np.int64).min  # the origin of rows that are not mapped
_FIRST = 64  # an array cannot begin at address 0
_MEMORY_BYTES = 2**48  # no process of a 64-bit system has more
_MOST_NUMBERS = 2**14  # of a row: NumPy computes the bytes of the whole array in 63 bits


@final
class RowGatherer:
    """Copies rows of one shape and dtype from wherever they lie in this process."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape, self._dtype = shape, dtype
        self._shift = dtype.itemsize.bit_length() - 1
        self._memory = np.asarray(_ProcessMemory(math.prod(shape) * dtype.itemsize, dtype.itemsize))

    @staticmethod
    def can_gather(shape: tuple[int, ...]) -> bool:
        """Tell whether rows of a shape can be gathered; copy larger ones one by one."""
        return 0 < math.prod(shape) <= _MOST_NUMBERS

    def __call__(self, addresses: NDArray[np.int64]) -> NDArray[Any]:
        """Copy the rows at these addresses, which are changed. The caller holds their arrays."""
        addresses -= _FIRST
        addresses >>= self._shift
        rows = self._memory[addresses]
        return rows.view(self._dtype).reshape(len(rows), *self._shape)


@final
class RowAddresses:
    """The addresses of the rows of each shard, for all that is mapped.

    It holds the arrays: what a reader finds here stays mapped until the reader lets go of this,
    even if another thread drops the shard. So shards are only ever added.
    """

    def __init__(self, n_shards: int) -> None:
        self.of_shard: NDArray[Any] = np.full(n_shards, MISSING)
        self._arrays: list[NDArray[Any]] = []

    def add_shard(self, shard: int, array: NDArray[Any], base_address: int) -> None:
        """Add a shard: its rows, and the address at which row 0 of the store would begin."""
        self._arrays.append(array)
        self.of_shard[shard] = base_address


class _ProcessMemory:
    """The memory of this process in NumPy's array interface: rows of bytes that overlap."""

    def __init__(self, row_bytes: int, number_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{row_bytes}",
            "data": (_FIRST, True),
            "shape": ((_MEMORY_BYTES - _FIRST - row_bytes) // number_bytes,),
            "strides": (number_bytes,),
        }
