"""Data sets of torch over a store: rows by index, and rows in a shuffled order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hookline.errors import InputError
from hookline.stores.column import Column, index_to_positions
from hookline.stores.mapped_shards import Shards

Rows = Tensor | dict[str, Tensor]

_MOST_ROWS = 65_536  # of a piece: a shard of very small rows is mixed part by part


@final
class StoreDataset(Dataset[Any]):
    """A `torch.utils.data.Dataset` of the rows of a store; `store.dataset` makes it.

        >>> from torch.utils.data import DataLoader
        >>> rows = store.dataset("fc", "@item")
        >>> rows[3]["@item"], rows[10:12]["fc"].shape
        (tensor(3), torch.Size([2, 3]))
        >>> for batch in DataLoader(rows, batch_size=64, shuffle=True):
        ...     print(batch["fc"].shape)
        torch.Size([64, 3])
        torch.Size([36, 3])

    A DataLoader reads all rows of a batch in one call. `store.shuffled` is faster than
    `shuffle=True`. An index is a number, a slice, or a list or array of numbers.

    Args:
        shards: the shards (files) of the store.
        columns: the columns to read.
        is_single: whether a row is a tensor; else it is a dict of tensors.

    Raises:
        IndexError: by `rows[index]`: a row is out of range.
    """

    def __init__(self, shards: Shards, columns: Sequence[Column], *, is_single: bool) -> None:
        self._shards, self._columns, self._is_single = shards, tuple(columns), is_single
        self._per_token = any(column.is_ragged for column in columns)

    def __len__(self) -> int:
        return self._shards.bounds_of(per_token=self._per_token).length

    def __getitem__(self, index: Any) -> Rows:
        """Read a row; or several at once, by a slice, a list or an array of indices."""
        items = index
        if any(column.is_ragged != self._per_token for column in self._columns):
            rows = index_to_positions(index, len(self), "rows")
            items = self._shards.items_of_rows(rows.reshape(-1)).reshape(rows.shape)
        values = {
            column.name: column[index if column.is_ragged == self._per_token else items]
            for column in self._columns
        }
        return next(iter(values.values())) if self._is_single else values

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Read the rows of a batch at once, for the DataLoader, which stacks them."""
        batch = self[indices]
        if isinstance(batch, Tensor):
            return list(batch.unbind())
        parts = [column.unbind() for column in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*parts, strict=True)]


class ShuffleOptions(NamedTuple):
    """Set how rows are shuffled."""

    batch_size: int | None  # the rows of a batch; None for single rows
    seed: int  # equal seeds give equal orders
    shards: int  # the shards whose rows are mixed
    # Whether a last batch that is shorter is left out; then ranks have equally many.
    drop_last: bool


class _RowRange(NamedTuple):
    """A range of the store's rows, which lie in one shard."""

    shard: int
    start: int
    stop: int


@final
class ShuffledRows(IterableDataset[Any]):
    """Batches of a store's rows, in a new random order in each epoch; `store.shuffled` makes it.

        >>> from torch.utils.data import DataLoader
        >>> rows = store.shuffled("fc", batch_size=64, seed=0)
        >>> for batch in rows:
        ...     print(batch.shape)
        torch.Size([64, 3])
        torch.Size([36, 3])
        >>> len(list(DataLoader(rows, batch_size=None, num_workers=0)))
        2

    The shards (files of the store) come in a random order. The rows of several shards at a time are
    mixed, as many as the argument `shards=` of `store.shuffled` says. The next row is drawn at
    random from all rows that are left in these shards.

    The workers of a DataLoader and the ranks of a distributed job share the rows: in an epoch, each
    row comes once, in one worker of one rank. `drop_last=True` leaves out a few rows. The order
    depends only on the seed, the number of the epoch, and the numbers of ranks and workers. Each
    iteration is a new epoch. `set_epoch` chooses the epoch; call it on each rank with the same
    number.

    Args:
        store_shards: the shards of the store.
        columns: the columns to read.
        how: how rows are shuffled.
        is_single: whether a batch is a tensor; else it is a dict of tensors.
    """

    def __init__(
        self,
        store_shards: Shards,
        columns: Sequence[Column],
        how: ShuffleOptions,
        *,
        is_single: bool,
    ) -> None:
        for name in ("batch_size", "shards"):
            number = getattr(how, name)
            if not (type(number) is int and number > 0) and (name, number) != ("batch_size", None):
                expected = "a positive integer" + " or None" * (name == "batch_size")
                example = 256 if name == "batch_size" else 16
                raise InputError(
                    f"{name} must be {expected}, got {number!r}.\nGive {name}={example}."
                )
        if not isinstance(how.seed, int | np.integer) or how.seed < 0:
            raise InputError(f"seed must be an integer from 0, got {how.seed!r}.\nGive seed=0.")
        self._columns, self._how = tuple(columns), how
        self._batch_rows = how.batch_size or 1
        self._dataset = StoreDataset(store_shards, columns, is_single=is_single)
        per_token = any(column.is_ragged for column in columns)
        self._starts = store_shards.bounds_of(per_token=per_token).starts
        self._epochs = EpochCounter()
        self._rank: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; the iterations after it have the next numbers.

            >>> rows = store.shuffled("@item")
            >>> first = torch.cat(list(rows))
            >>> rows.set_epoch(0)
            >>> torch.equal(torch.cat(list(rows)), first)
            True

        Args:
            epoch: the number of the epoch, from 0.
        """
        self._epochs.set_next(epoch)

    def __len__(self) -> int:
        """Return the number of batches of this rank."""
        first, last = self._rank_row_range(*self._rank_and_world())
        return math.ceil((last - first) / self._batch_rows)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned, not forked, does not know the ranks.
        return {**self.__dict__, "_rank": self._rank_and_world()}

    def __iter__(self) -> Iterator[Rows]:
        # Not a generator: the epoch begins here, and not with the first batch.
        epoch, (rank, world) = self._epochs.begin_epoch(), self._rank_and_world()
        worker = get_worker_info()
        number, n_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        first, last = self._rank_row_range(rank, world)
        # Workers share whole batches, so that only the last batch of a rank is shorter.
        size = self._batch_rows
        n_batches = -(-(last - first) // size)
        start = first + n_batches * number // n_workers * size
        stop = min(first + n_batches * (number + 1) // n_workers * size, last)
        order = np.random.default_rng([self._how.seed, epoch]).permutation(len(self._starts) - 1)
        pieces = _row_ranges_between(order, self._starts, start, stop)
        numbers = np.random.default_rng([self._how.seed, epoch, rank, number])
        return self._batches(pieces, numbers)

    def _rank_and_world(self) -> tuple[int, int]:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return self._rank or (0, 1)

    def _rank_row_range(self, rank: int, world: int) -> tuple[int, int]:
        """Return the first row of a rank, and the one after its last, in the order of an epoch."""
        n_rows = self._starts[-1]
        first, last = n_rows * rank // world, n_rows * (rank + 1) // world
        if self._how.drop_last:
            last = first + n_rows // world // self._batch_rows * self._batch_rows
        return first, last

    def _batches(
        self, pieces: Sequence[_RowRange], generator: np.random.Generator
    ) -> Iterator[Rows]:
        size = self._batch_rows
        rest = np.empty(0, np.int64)
        for group in _group_evenly(pieces, self._how.shards):
            # Held while rows of them are read, so that nothing is downloaded twice.
            arrays = [
                column.shard_array(piece.shard) for piece in group for column in self._columns
            ]
            rows = np.concatenate([np.arange(piece.start, piece.stop) for piece in group])
            generator.shuffle(rows)
            rows = np.concatenate([rest, rows])
            whole = len(rows) - len(rows) % size
            for start in range(0, whole, size):
                yield self._batch(rows[start : start + size])
            rest = rows[whole:]
            del arrays
        if len(rest):
            yield self._batch(rest)

    def _batch(self, rows: NDArray[np.int64]) -> Rows:
        return self._dataset[rows if self._how.batch_size else int(rows[0])]


def _row_ranges_between(
    order: NDArray[np.int64], starts: Sequence[int], start: int, stop: int
) -> list[_RowRange]:
    """Return the pieces of shards between two rows of an epoch's order of shards."""
    pieces, before = [], 0
    for shard in order.tolist():
        start_of_shard, stop_of_shard = starts[shard : shard + 2]
        first = start_of_shard + max(start - before, 0)
        last = min(start_of_shard + stop - before, stop_of_shard)
        pieces += [
            _RowRange(shard, begin, min(begin + _MOST_ROWS, last))
            for begin in range(first, last, _MOST_ROWS)
        ]
        before += stop_of_shard - start_of_shard
    return pieces


def _group_evenly(pieces: Sequence[_RowRange], most: int) -> Iterator[Sequence[_RowRange]]:
    """Yield pieces in groups of about equal sizes, of at most so many."""
    n_groups = math.ceil(len(pieces) / most)
    for number in range(n_groups):
        yield pieces[len(pieces) * number // n_groups : len(pieces) * (number + 1) // n_groups]


_N_WORKERS = 4096
_N_KEPT = 4  # epochs; an older one has no worker that is still to begin it
_LOW = 2**32 - 1


@final
class EpochCounter:
    """Counts the iterations over a data set, in this process or by all workers of a loader.

    The workers of one epoch must agree on its number, also where some are ended early. They cannot
    ask the process that started them. So each notes in memory that all share, in a row of its own,
    each epoch that it begins, with a number that the loader draws for the epoch. A worker that
    finds the loader's number in another row takes the epoch beside it. If it has begun that epoch
    itself, the loader has drawn its number again, as after `torch.manual_seed(0)`: the next begins.
    """

    def __init__(self) -> None:
        # In the lower half of an entry the count of begun epochs, in the upper the loader's number.
        self._begun = torch.zeros(1 + _N_WORKERS, _N_KEPT, dtype=torch.int64, device="cpu")
        self._begun.share_memory_()  # type: ignore[no-untyped-call]
        self._n_begun_here = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begun.share_memory_()  # type: ignore[no-untyped-call]

    def set_next(self, epoch: int) -> None:
        """Choose the epoch that begins next."""
        self._begun.fill_(epoch)

    def begin_epoch(self) -> int:
        """Return the number of the epoch that begins with this iteration."""
        worker = get_worker_info()
        begun = self._begun.numpy().copy()  # other workers write meanwhile
        epoch = int((begun & _LOW).max())
        row, mark = 0, 0
        if worker is not None:
            # Workers that persist keep their seed, so their own count tells epochs apart.
            seed = worker.seed - worker.id + self._n_begun_here * 0x9E3779B97F4A7C15
            self._n_begun_here += 1
            row, mark = 1 + worker.id, (seed ^ seed >> 32) & 0x7FFFFFFF | 1
            entry = int(begun[begun >> 32 == mark].max(initial=0))
            if entry and entry & _LOW > epoch - _N_KEPT and entry not in begun[row]:
                return self._record_begun_epoch(row, mark, (entry & _LOW) - 1)
        return self._record_begun_epoch(row, mark, epoch)

    def _record_begun_epoch(self, row: int, mark: int, epoch: int) -> int:
        self._begun[row, epoch % _N_KEPT] = mark << 32 | epoch + 1
        return epoch
