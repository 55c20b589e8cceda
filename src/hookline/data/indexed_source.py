"""Load batches of indexed items: in this process or in others, failures included."""

from __future__ import annotations

import operator
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hookline.data.data_source import DataSource, LoadOptions, NumberedBatch
from hookline.data.seeding import seeded
from hookline.engine.pytree import describe
from hookline.engine.pytree.tree import map_tensors, tensors
from hookline.errors import InputError

_N_TEXT = 200  # characters of an error's first line


class DataSetError(InputError):
    """An error of the whole data set, which skipping an item would not mend."""


class SkipMark(NamedTuple):
    """Stands for an item that cannot be run, such as an empty text: it is left out and listed."""

    reason: str  # why, for the list of skipped items


# The machine or the data set has failed, not the item: it is never skipped.
_FATAL = (MemoryError, torch.OutOfMemoryError, DataSetError)


@final
class FailedItem:
    """An item that failed to load, and its error. It travels from a worker without the error.

    Args:
        item: its index in the data set.
        error: the error.
        root: the folder of the data. It is cut out of the text, which is the same elsewhere.
    """

    def __init__(self, item: int, error: BaseException, root: str = "") -> None:
        self.item = item
        self.error: BaseException | None = error
        lines = (str(error).replace(root, "") if root else str(error)).strip().splitlines()
        message = lines[0].rstrip(".")[:_N_TEXT] if lines else ""
        self.text: str = f"{type(error).__name__}: {message}" if message else type(error).__name__
        self.fix = "Save it as UTF-8." if isinstance(error, UnicodeDecodeError) else ""
        if isinstance(error, InputError) and len(lines) > 1:
            self.fix = lines[1]
        self.trace: str = "".join(traceback.format_exception(error))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "error": None}  # an error may hold what cannot be pickled

    def raise_as(self, message: str) -> None:
        """Raise an InputError that has the original error as its cause.

        Raises:
            InputError: always.
        """
        refusal = InputError(message)
        if self.error is None:
            refusal.add_note(f"hookline: in a worker process:\n{self.trace}")
        raise refusal from self.error


@final
@dataclass
class RawBatch:
    """A batch as it is loaded, before it is checked."""

    number: int  # the number of the batch
    items: list[int]  # the index of each item that was loaded
    data: Any = None  # the items as one value
    failures: list[FailedItem] = field(default_factory=list)  # the items that failed
    # The items that are left out, each with the reason.
    skipped: list[tuple[int, str]] = field(default_factory=list)
    problem: FailedItem | None = None  # the error of making one value of items that are well alone
    # The message of an error of the whole data set, from a worker process.
    refusal: str | None = None

    def pin_memory(self) -> RawBatch:
        """Put the tensors in page-locked memory. DataLoader calls this in a thread."""
        # torch's own pinning would turn a tuple, which is the model's arguments, into a list.
        self.data = map_tensors(_pin_if_dense, self.data)
        return self


def _pin_if_dense(tensor: Tensor) -> Tensor:
    """Return a dense CPU tensor in page-locked memory; torch can pin no other one."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return tensor.pin_memory() if is_dense and tensor.device.type == "cpu" else tensor


class Items(ABC):
    """A data set whose items are found by their index."""

    names: list[str] | None = None  # the file name of each item, or None
    fix: str  # what to do where the items of a batch do not fit together
    # Whether code that is not hookline's loads items, and may draw random numbers.
    may_draw_random: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what tells this data set from another one."""

    @abstractmethod
    def load_batch(self, number: int, indices: range, *, pinned: bool = False) -> RawBatch:
        """Load a batch; errors are in the result.

        `pinned` tells that the tensors will be put in page-locked memory: what is copied anyway may
        be copied there at once.
        """


class SingleItems(Items):
    """Items that are loaded one by one, so that those that fail are known.

    Attributes:
        root: the folder of the data, cut out of the texts of errors.
    """

    root = ""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> list[Any]:
        """Load items by their indices."""

    @abstractmethod
    def collate(self, values: list[Any], indices: list[int]) -> Any:
        """Make one value of items."""

    def load_batch(self, number: int, indices: range, *, pinned: bool = False) -> RawBatch:
        """Load a batch; errors are in the result. None of it is pinned here."""
        batch = RawBatch(number, [])
        values = []
        try:
            items = self.read(indices)
            if len(items) != len(indices):
                raise ValueError(f"{len(items)} items for {len(indices)} indices")
            pairs = list(zip(indices, items, strict=True))
        except _FATAL:
            raise
        except Exception:
            pairs = self._try_each_alone(batch, indices, self._read_alone)
        for index, item in pairs:
            if isinstance(item, SkipMark):
                batch.skipped.append((index, item.reason))
            else:
                batch.items.append(index)
                values.append(item)
        if values:
            self._collate_without_failures(batch, values)
        return batch

    def _read_alone(self, index: int) -> Any:
        (item,) = self.read([index])
        return item

    def _collate_without_failures(self, batch: RawBatch, values: list[Any]) -> None:
        """Make one value of items; leave out those that fail alone, and try the rest again."""
        try:
            batch.data = self.collate(values, batch.items)
        except _FATAL:
            raise
        except Exception as error:
            problem = FailedItem(batch.items[0], error, self.root)
            by_index = dict(zip(batch.items, values, strict=True))
            good = self._try_each_alone(
                batch, batch.items, lambda index: self.collate([by_index[index]], [index])
            )
            batch.items = [index for index, _ in good]
            if len(good) == len(values):
                batch.problem = problem
            elif good:
                self._collate_without_failures(batch, [by_index[index] for index in batch.items])
            else:  # it may be how they are made one value, and not the items
                for failure in batch.failures[-len(values) :]:
                    failure.fix = failure.fix or self.fix

    def _try_each_alone(
        self, batch: RawBatch, indices: Iterable[int], work: Callable[[int], Any]
    ) -> list[tuple[int, Any]]:
        """Return what the work makes of each item, without the items for which it fails."""
        pairs = []
        for index in indices:
            try:
                pairs.append((index, work(index)))
            except _FATAL:
                raise
            except Exception as error:
                batch.failures.append(FailedItem(index, error, self.root))
        return pairs


@final
@dataclass(eq=False)
class _BatchDataset(Dataset[RawBatch]):
    """The data set whose items are batches."""

    items: Items
    n_items: int  # how many there are, for the whole job: the length of a data set may change
    batch_size: int  # the items of a batch
    pinned: bool  # whether the tensors will be put in page-locked memory by this process

    def __getitem__(self, number: int) -> RawBatch:
        start = number * self.batch_size
        stop = min(start + self.batch_size, self.n_items)
        try:
            with seeded(number) if self.items.may_draw_random else nullcontext():
                return self.items.load_batch(number, range(start, stop), pinned=self.pinned)
        except InputError as error:
            if get_worker_info() is None:
                raise
            # DataLoader would put the worker's traceback into the message.
            return RawBatch(number, [], refusal=str(error))


@final
@dataclass(eq=False)
class _StartWorker:
    """Start a worker process as a user's own DataLoader would."""

    dataset: Any
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if self.dataset is not None:
            # The user's code looks for its data set there. The object refuses plain assignment.
            object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self.then is not None:
            self.then(worker)


@final
class IndexedSource(DataSource):
    """Batches of items that are found by their index.

    Args:
        items: the data set.
        loading: how it is loaded; `batch_size` is set.
        options: what else DataLoader is given for worker processes.
    """

    def __init__(
        self, items: Items, loading: LoadOptions, options: Mapping[str, Any] | None = None
    ) -> None:
        assert loading.batch_size is not None
        self._items = items
        self._loading = loading
        self._options = options or {}
        self.batch_size: int = loading.batch_size
        self.n_items: int = len(items)
        self.names = items.names

    @property
    def dataset(self) -> Any:
        """Return the user's own data set, or the items that were made of other data."""
        return getattr(self._items, "dataset", self._items)

    def identity(self) -> dict[str, Any]:
        """Return what tells this data set from another one, for JSON."""
        return {**self._items.identity(), "length": self.n_items}

    def batches(self, numbers: Iterable[int]) -> Iterator[NumberedBatch]:
        """Load batches, in the order in which they are asked for."""
        workers = self._loading.workers
        if isinstance(numbers, Sized):  # a process that has nothing to load is not started
            workers = min(workers, max(len(numbers), 1))
        options = dict(self._options) if workers else {}
        dataset = getattr(self._items, "dataset", None)
        pins = self._loading.pin_memory and torch.accelerator.is_available()
        loader: DataLoader[RawBatch] = DataLoader(
            _BatchDataset(self._items, self.n_items, self.batch_size, pins and not workers),
            batch_size=None,  # each item of the data set is a batch
            sampler=self._check_numbers(numbers),
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=pins,
            worker_init_fn=_StartWorker(dataset, options.pop("worker_init_fn", None)),
            # Its own generator: the default one would draw from the user's.
            generator=torch.Generator(),
            **options,
        )
        for loaded in start_iterator(loader):  # no local: a kept traceback would keep the workers
            yield self._to_numbered_batch(loaded)

    def _check_numbers(self, numbers: Iterable[int]) -> Iterator[int]:
        n_batches = -(-self.n_items // self.batch_size)
        for number in map(operator.index, numbers):
            if not 0 <= number < n_batches:
                raise IndexError(
                    f"a batch's number must be from 0 to {n_batches - 1}, got {number}"
                )
            yield number

    def _to_numbered_batch(self, loaded: RawBatch) -> NumberedBatch:
        if loaded.refusal is not None:
            raise InputError(loaded.refusal)
        if loaded.failures and self._loading.on_error == "raise":
            first = min(loaded.failures, key=lambda failure: failure.item)
            names = self.names
            name = f" ({names[first.item]})" if names else ""
            fixes = [fix for fix in (first.fix, self._loading.skip_fix) if fix]
            first.raise_as(
                "\n".join([f"item {first.item}{name} must load, got {first.text}.", *fixes])
            )
        skipped = [*loaded.skipped, *((failure.item, failure.text) for failure in loaded.failures)]
        if loaded.problem is not None:
            loaded.problem.raise_as(
                f"{_item_range_text(loaded.items)} must fit together in one batch, got"
                f" {loaded.problem.text}.\n{loaded.problem.fix or self._items.fix}"
            )
        if loaded.items:
            _check_first_dimension(loaded, self._items.fix)
        return NumberedBatch(loaded.number, loaded.items, loaded.data, sorted(skipped))


def start_iterator(data: Iterable[Any]) -> Iterator[Any]:
    """Begin to iterate. A loader draws on the device of its generator, whatever the default one."""
    generator = getattr(data, "generator", None)
    with generator.device if isinstance(generator, torch.Generator) else nullcontext():
        return iter(data)


def _are_texts(data: Any) -> bool:
    """Tell whether a batch is texts that nothing has tokenized."""
    is_sequence = isinstance(data, list | tuple)
    return is_sequence and bool(data) and all(isinstance(text, str) for text in data)


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _item_range_text(items: Sequence[int]) -> str:
    return f"item {items[0]}" if len(items) == 1 else f"items {items[0]} to {items[-1]}"


def _check_first_dimension(loaded: RawBatch, fix: str) -> None:
    """Check that a batch has a row for each item; a collate function may have dropped some."""
    n_items = len(loaded.items)
    if _are_texts(loaded.data):
        fix = "Give tokenize=, such as the tokenizer of the model, which makes tensors of texts."
    if not any(tensor.dim() and tensor.shape[0] == n_items for _, tensor in tensors(loaded.data)):
        raise InputError(
            f"{_item_range_text(loaded.items)} must become a batch with a first dimension of"
            f" {n_items}, got {describe.in_words(loaded.data)}.\n{fix}"
        )
