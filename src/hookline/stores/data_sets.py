"""Data sets of torch over a store: rows by index, and rows in a shuffled order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hookline.errors import InputError
from hookline.stores.column import Column, positions
from hookline.stores.epochs import Epochs
from hookline.stores.shards import Shards

Rows = Tensor | dict[str, Tensor]


@final
class StoreDataset(Dataset[Any]):
    """The rows of a store by index, for a DataLoader or by hand.

        >>> from torch.utils.data import DataLoader
        >>> rows = store.dataset("fc", "@item")
        >>> rows[3]["@item"], rows[10:12]["fc"].shape
        (tensor(3), torch.Size([2, 3]))
        >>> for batch in DataLoader(rows, batch_size=64, shuffle=True):
        ...     print(batch["fc"].shape)
        torch.Size([64, 3])
        torch.Size([36, 3])

    A DataLoader reads each batch at once. `store.shuffled` is faster than `shuffle=True`.

    Args:
        shards: the shards of the store.
        columns: the columns to read.
        is_single: whether a row is a tensor; else it is a dict of tensors.
    """

    def __init__(self, shards: Shards, columns: Sequence[Column], *, is_single: bool) -> None:
        self._shards, self._columns, self._is_single = shards, tuple(columns), is_single
        self._per_token = any(column.is_ragged for column in columns)

    def __len__(self) -> int:
        stops = self._shards.row_stops if self._per_token else self._shards.item_stops
        return stops[-1] if stops else 0

    def __getitem__(self, index: Any) -> Rows:
        """Read a row; or several at once, by a slice, a list or an array of indices."""
        items = index
        if any(column.is_ragged != self._per_token for column in self._columns):
            rows = positions(index, len(self), "rows")
            items = self._shards.items_of(rows.reshape(-1)).reshape(rows.shape)
        found = {
            column.name: column[index if column.is_ragged == self._per_token else items]
            for column in self._columns
        }
        return next(iter(found.values())) if self._is_single else found

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read the rows of a batch at once, for the DataLoader, which stacks them."""
        found = self[indices]
        if isinstance(found, Tensor):
            return list(found.unbind())
        parts = [column.unbind() for column in found.values()]
        return [dict(zip(found, row, strict=True)) for row in zip(*parts, strict=True)]


class Shuffle(NamedTuple):
    """How rows are shuffled.

    Args:
        batch_size: the rows of a batch; None for single rows.
        seed: equal seeds give equal orders.
        buffer: the rows that are copied at once.
        shards: the shards whose rows are mixed.
        drop_last: whether a last batch that is shorter is left out; then ranks have equally many.
    """

    batch_size: int | None
    seed: int
    buffer: int
    shards: int
    drop_last: bool


class _Piece(NamedTuple):
    """A range of a shard's rows."""

    shard: int
    start: int
    stop: int


@final
class ShuffledRows(IterableDataset[Any]):
    """Batches of a store's rows, in an order that is another one in each epoch.

        >>> from torch.utils.data import DataLoader
        >>> rows = store.shuffled("fc", batch_size=64, seed=0)
        >>> for batch in rows:
        ...     print(batch.shape)
        torch.Size([64, 3])
        torch.Size([36, 3])
        >>> len(list(DataLoader(rows, batch_size=None, num_workers=0)))
        2

    The order of the shards is random. The rows of `shards` of them are mixed, each with the same
    chance, so that a batch has rows of all of them. Reading copies `buffer` rows at a time.

    The workers of a DataLoader and the ranks of a distributed job share the rows: each row comes
    once in all. An order follows from seed, epoch, and the number of ranks and workers. Each
    iteration is a new epoch; `set_epoch` chooses one, on each rank alike.

    Args:
        store_shards: the shards of the store.
        columns: the columns to read.
        how: how rows are shuffled.
        is_single: whether a batch is a tensor; else it is a dict of tensors.
    """

    def __init__(
        self, store_shards: Shards, columns: Sequence[Column], how: Shuffle, *, is_single: bool
    ) -> None:
        for name in ("batch_size", "buffer", "shards"):
            number = getattr(how, name)
            if not (type(number) is int and number > 0) and (name, number) != ("batch_size", None):
                raise InputError(
                    f"{name} must be a positive integer, got {number!r}.\nGive {name}=256."
                )
        self._shards, self._columns, self._how = store_shards, tuple(columns), how
        self._is_single = is_single
        self._per_token = any(column.is_ragged for column in columns)
        self._sizes = store_shards.n_rows if self._per_token else store_shards.n_items
        self._epochs = Epochs()
        self._rank: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; those after it count on.

        Args:
            epoch: the number of the epoch, from 0.
        """
        self._epochs.set(epoch)

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        first, last = self._share(*self._rank_and_world())
        return math.ceil((last - first) / (self._how.batch_size or 1))

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned, not forked, does not know the ranks.
        return {**self.__dict__, "_rank": self._rank_and_world()}

    def __iter__(self) -> Iterator[Rows]:
        # Not a generator: the epoch begins here, and not with the first batch.
        epoch, (rank, world) = self._epochs.begin(), self._rank_and_world()
        worker = get_worker_info()
        number, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first, last = self._share(rank, world)
        # Workers share whole batches, so that only the last batch of a rank is shorter.
        size = self._how.batch_size or 1
        n_batches = -(-(last - first) // size)
        start = first + n_batches * number // n_workers * size
        stop = min(first + n_batches * (number + 1) // n_workers * size, last)
        order = np.random.default_rng([self._how.seed, epoch]).permutation(len(self._sizes))
        pieces = _cut(order, self._sizes, start, stop)
        numbers = np.random.default_rng([self._how.seed, epoch, rank, number])
        return self._batches(pieces, numbers)

    def _rank_and_world(self) -> tuple[int, int]:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._rank or (0, 1)

    def _share(self, rank: int, world: int) -> tuple[int, int]:
        """Return the first row of a rank, and the one after its last, in the order of an epoch."""
        n_rows = sum(self._sizes)
        first, last = n_rows * rank // world, n_rows * (rank + 1) // world
        if self._how.drop_last:
            size = self._how.batch_size or 1
            last = first + n_rows // world // size * size
        return first, last

    def _batches(self, pieces: Sequence[_Piece], numbers: np.random.Generator) -> Iterator[Rows]:
        size = self._how.batch_size or 1
        rest: dict[str, NDArray[Any]] = {}
        for mixed in self._mixed(pieces, numbers, rest):
            n_rows = len(next(iter(mixed.values())))
            whole = n_rows - n_rows % size
            for start in range(0, whole, size):
                yield self._batch(mixed, start, start + size)
            rest.clear()
            if whole < n_rows:
                rest.update({name: array[whole:] for name, array in mixed.items()})
        if rest:
            yield self._batch(rest, 0, size)

    def _batch(self, arrays: Mapping[str, NDArray[Any]], start: int, stop: int) -> Rows:
        found = {
            column.name: column.tensor(arrays[column.name][start:stop].copy())
            for column in self._columns
        }
        if self._how.batch_size is None:
            found = {name: rows[0] for name, rows in found.items()}
        return next(iter(found.values())) if self._is_single else found

    def _mixed(
        self,
        pieces: Sequence[_Piece],
        numbers: np.random.Generator,
        rest: Mapping[str, NDArray[Any]],
    ) -> Iterator[dict[str, NDArray[Any]]]:
        """Yield rows in their new order, a buffer at a time; `rest` are rows that are left over."""
        n_groups = -(-len(pieces) // self._how.shards)
        buffer = max(self._how.buffer, self._how.batch_size or 1)
        for group in np.array_split(np.arange(len(pieces)), max(n_groups, 1)):
            sources = [_Source(self, pieces[number], numbers) for number in group.tolist()]
            left = np.array([source.n_left for source in sources], np.int64)
            while left.sum():
                n_rest = len(next(iter(rest.values()))) if rest else 0
                n_new = min(int(left.sum()), buffer - n_rest)
                # So each of the rows that are left has the same chance to come next.
                counts = numbers.multivariate_hypergeometric(left, n_new)
                places = numbers.permutation(n_rest + n_new)
                mixed = {column.name: column.empty(n_rest + n_new) for column in self._columns}
                for name, array in rest.items():
                    mixed[name][places[:n_rest]] = array
                end = n_rest
                for source, count in zip(sources, counts.tolist(), strict=True):
                    source.copy(count, mixed, places[end : end + count])
                    end += count
                left -= counts
                yield mixed


@final
class _Source:
    """The rows of a piece, each once, in a random order."""

    def __init__(self, rows: ShuffledRows, piece: _Piece, numbers: np.random.Generator) -> None:
        n_rows = piece.stop - piece.start
        kind = np.uint32 if piece.stop < 2**32 else np.uint64
        self._order = numbers.permutation(np.arange(piece.start, piece.stop, dtype=kind))
        self.n_left = n_rows
        # Held here, so that they are read once, though the store forgets what it has mapped.
        self._arrays = {
            column.name: (column.array(piece.shard), column.is_ragged == rows._per_token)
            for column in rows._columns
        }
        is_mixed = not all(is_direct for _, is_direct in self._arrays.values())
        self._stops = rows._shards.stops_of_items(piece.shard) if is_mixed else None

    def copy(self, count: int, into: Mapping[str, NDArray[Any]], places: NDArray[np.int64]) -> None:
        """Copy the next rows to places in arrays."""
        start = len(self._order) - self.n_left
        rows = self._order[start : start + count]
        self.n_left -= count
        items = rows if self._stops is None else np.searchsorted(self._stops, rows, "right")
        for name, (array, is_direct) in self._arrays.items():
            into[name][places] = array[rows if is_direct else items]


def _cut(order: NDArray[np.int64], sizes: Sequence[int], start: int, stop: int) -> list[_Piece]:
    """Return the pieces of shards between two rows of an epoch's order of shards."""
    pieces, before = [], 0
    for shard in order.tolist():
        first, last = max(start - before, 0), min(stop - before, sizes[shard])
        if first < last:
            pieces.append(_Piece(shard, first, last))
        before += sizes[shard]
    return pieces
