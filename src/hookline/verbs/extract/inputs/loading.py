"""Load batches of indexed items: in this process or in others, failures included."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hookline.engine.pytree import describe
from hookline.engine.pytree.tree import map_tensors, tensors
from hookline.errors import InputError
from hookline.verbs.extract.inputs.batches import Batch, Loading
from hookline.verbs.extract.seeding import seeded

_N_TEXT = 200  # characters of an error's first line


class Refusal(InputError):
    """An error of the whole data set, which skipping an item would not mend."""


class Skip(NamedTuple):
    """Stands for an item that cannot be run, such as an empty text: it is left out and listed.

    Args:
        reason: why, for the list of skipped items.
    """

    reason: str


# The machine or the data set has failed, not the item: it is never skipped.
_FATAL = (MemoryError, torch.OutOfMemoryError, Refusal)


@final
class Failure:
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
        self.text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        self.trace = "".join(traceback.format_exception(error))

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
class Loaded:
    """A batch as it is loaded, before it is checked.

    Args:
        number: the number of the batch.
        items: the index of each item that was loaded.
        data: the items as one value.
        failures: the items that failed.
        skipped: the items that are left out, each with the reason.
        problem: the error of making one value of items that are well alone.
        refusal: the message of an error of the whole data set, from a worker process.
    """

    number: int
    items: list[int]
    data: Any = None
    failures: list[Failure] = field(default_factory=list)
    skipped: list[tuple[int, str]] = field(default_factory=list)
    problem: Failure | None = None
    refusal: str | None = None

    def pin_memory(self) -> Loaded:
        """Put the tensors in page-locked memory. DataLoader calls this in a thread."""
        # torch's own pinning would turn a tuple, which is the model's arguments, into a list.
        self.data = map_tensors(Tensor.pin_memory, self.data)
        return self


class Items(Protocol):
    """A data set whose items are found by their index."""

    @property
    def names(self) -> list[str] | None:
        """The file name of each item, or None."""

    @property
    def fix(self) -> str:
        """Say in one sentence what to do where the items of a batch do not fit together."""

    @property
    def may_draw(self) -> bool:
        """Tell whether code that is not hookline's loads items, and may draw random numbers."""

    def __len__(self) -> int: ...

    def identity(self) -> dict[str, Any]:
        """Return what tells this data set from another one."""

    def load(self, number: int, wanted: range) -> Loaded:
        """Load a batch; errors are in the result."""


def load_each(
    number: int,
    wanted: range,
    get: Callable[[Sequence[int]], list[Any]],
    collate: Callable[[list[Any]], Any],
    root: str = "",
) -> Loaded:
    """Load the items of a batch and make one value of them. Those that fail are found one by one.

    Args:
        number: the number of the batch.
        wanted: the indices of its items.
        get: loads items by their indices.
        collate: makes one value of items.
        root: the folder of the data, cut out of the texts of errors.
    """
    done = Loaded(number, [])
    found: list[Any] = []
    try:
        loaded = get(wanted)
        if len(loaded) != len(wanted):
            raise ValueError(f"{len(loaded)} items for {len(wanted)} indices")
        pairs = list(zip(wanted, loaded, strict=True))
    except _FATAL:
        raise
    except Exception:
        pairs = _one_by_one(wanted, get, done.failures, root)
    for index, item in pairs:
        if isinstance(item, Skip):
            done.skipped.append((index, item.reason))
        else:
            done.items.append(index)
            found.append(item)
    if found:
        _collate(done, found, collate, root)
    return done


def _one_by_one(
    wanted: range,
    get: Callable[[Sequence[int]], list[Any]],
    failures: list[Failure],
    root: str,
) -> list[tuple[int, Any]]:
    pairs = []
    for index in wanted:
        try:
            (item,) = get([index])
        except _FATAL:
            raise
        except Exception as error:
            failures.append(Failure(index, error, root))
        else:
            pairs.append((index, item))
    return pairs


def _collate(
    done: Loaded, found: list[Any], collate: Callable[[list[Any]], Any], root: str
) -> None:
    """Make one value of items; those that fail alone are left out, and the rest is tried again."""
    try:
        done.data = collate(found)
    except _FATAL:
        raise
    except Exception as error:
        done.problem = Failure(done.items[0], error, root)
        good = []
        for index, item in zip(done.items, found, strict=True):
            try:
                collate([item])
            except _FATAL:
                raise
            except Exception as alone:
                done.failures.append(Failure(index, alone, root))
            else:
                good.append((index, item))
        done.items = [index for index, _ in good]
        if not good:
            done.problem = None
        elif len(good) < len(found):
            done.problem = None
            _collate(done, [item for _, item in good], collate, root)


class LoaderOptions(NamedTuple):
    """Options of DataLoader beyond `Loading`, as a user's own loader has them."""

    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None


@final
class _Batches(Dataset[Loaded]):
    """The data set whose items are batches.

    Args:
        items: the items.
        n_items: how many there are, for the whole job: the length of a data set may change.
        batch_size: the items of a batch.
    """

    def __init__(self, items: Items, n_items: int, batch_size: int) -> None:
        self.items = items
        self.n_items = n_items
        self.batch_size = batch_size

    def __getitem__(self, number: int) -> Loaded:
        start = number * self.batch_size
        stop = min(start + self.batch_size, self.n_items)
        try:
            with seeded(number) if self.items.may_draw else nullcontext():
                return self.items.load(number, range(start, stop))
        except InputError as error:
            if get_worker_info() is None:
                raise
            # DataLoader would put the worker's traceback into the message.
            return Loaded(number, [], refusal=str(error))


@final
class _StartWorker:
    """Start a worker process as a user's own DataLoader would.

    Args:
        dataset: the user's own data set.
        then: the user's `worker_init_fn`.
    """

    def __init__(self, dataset: Any, then: Callable[[int], None] | None) -> None:
        self.dataset = dataset
        self.then = then

    def __call__(self, worker: int) -> None:
        if self.dataset is not None:
            # The user's code looks for its data set there. The object refuses plain assignment.
            object.__setattr__(get_worker_info(), "dataset", self.dataset)
        if self.then is not None:
            self.then(worker)


@final
class IndexedSource:
    """Batches of items that are found by their index.

    Args:
        items: the data set.
        loading: how it is loaded; `batch_size` is set.
        options: what else DataLoader is given.
    """

    def __init__(
        self, items: Items, loading: Loading, options: LoaderOptions | None = None
    ) -> None:
        assert loading.batch_size is not None
        self._items = items
        self._loading = loading
        self._options = options or LoaderOptions()
        self.batch_size = loading.batch_size
        self.n_items = len(items)

    @property
    def names(self) -> list[str] | None:
        """The file name of each item; None where items are not files."""
        return self._items.names

    def identity(self) -> dict[str, Any]:
        """Return what tells this data set from another one, for JSON."""
        return {**self._items.identity(), "length": self.n_items}

    def batches(self, numbers: Iterable[int]) -> Iterator[Batch]:
        """Load batches, in the order in which they are asked for."""
        workers, options = self._loading.workers, self._options
        if isinstance(numbers, Sized):  # a process that has nothing to load is not started
            workers = min(workers, max(len(numbers), 1))
        loader: DataLoader[Loaded] = DataLoader(
            _Batches(self._items, self.n_items, self.batch_size),
            batch_size=None,  # each item of the data set is a batch
            sampler=self._in_range(numbers),
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=self._loading.pin_memory and torch.accelerator.is_available(),
            worker_init_fn=_StartWorker(
                getattr(self._items, "dataset", None), options.worker_init_fn
            ),
            timeout=options.timeout if workers else 0,
            multiprocessing_context=options.multiprocessing_context if workers else None,
            prefetch_factor=options.prefetch_factor if workers else None,
            # Its own generator: the default one would draw from the user's.
            generator=torch.Generator(),
        )
        for loaded in loader:
            yield self._checked(loaded)

    def _in_range(self, numbers: Iterable[int]) -> Iterator[int]:
        n_batches = -(-self.n_items // self.batch_size)
        for given in numbers:
            number = operator.index(given)
            if not 0 <= number < n_batches:
                raise IndexError(f"a batch's number must be from 0 to {n_batches - 1}, got {given}")
            yield number

    def _checked(self, loaded: Loaded) -> Batch:
        if loaded.refusal is not None:
            raise InputError(loaded.refusal)
        if loaded.failures and self._loading.on_error == "raise":
            first = min(loaded.failures, key=lambda failure: failure.item)
            names = self.names
            name = f" ({names[first.item]})" if names else ""
            first.raise_as(
                f"item {first.item}{name} must load, got {first.text}."
                "\nLeave out items that fail, and list them: on_error='skip'."
            )
        skipped = [*loaded.skipped, *((one.item, one.text) for one in loaded.failures)]
        if loaded.problem is not None:
            loaded.problem.raise_as(
                f"{_span(loaded.items)} must fit together in one batch, got {loaded.problem.text}."
                f"\n{self._items.fix}"
            )
        if loaded.items:
            _check_first_dimension(loaded, self._items.fix)
        return Batch(loaded.number, loaded.items, loaded.data, sorted(skipped))


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _span(items: Sequence[int]) -> str:
    return f"item {items[0]}" if len(items) == 1 else f"items {items[0]} to {items[-1]}"


def _check_first_dimension(loaded: Loaded, fix: str) -> None:
    """Check that a batch has a row for each item; a collate function may have dropped some.

    Raises:
        InputError: no tensor has as many rows as there are items.
    """
    found = [tensor for _, tensor in tensors(loaded.data)]
    if not any(one.dim() and one.shape[0] == len(loaded.items) for one in found):
        raise InputError(
            f"{_span(loaded.items)} must become a batch with a first dimension of"
            f" {len(loaded.items)}, got {describe.in_words(loaded.data)}.\n{fix}"
        )
