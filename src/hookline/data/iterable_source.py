"""Ready batches of an iterable, by arrival."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hookline.data.data_source import DataSource, NumberedBatch
from hookline.data.indexed_source import DataSetError, FailedItem, SkipMark, start_iterator
from hookline.data.seeding import seeded
from hookline.data.texts import text_or_skip_mark, unwrap_text_key
from hookline.engine.pytree import describe
from hookline.engine.pytree.tree import tensors
from hookline.errors import InputError


@final
class IterableSource(DataSource):
    """Batches as an iterable gives them.

    An iterator is consumed once, over all calls of `batches`. Any other iterable begins anew when
    an earlier batch is asked for, and the global generators are seeded with the number of each
    batch.

    Args:
        iterable: the iterable; each batch holds a tensor, whose first dimension counts the items.
        tokenize: makes a dict of tensors of a batch that is a list of texts, or has one at the key
            "text", without its blank texts; None refuses texts.
    """

    batch_size = 0

    def __init__(
        self,
        iterable: Iterable[Any],
        tokenize: Callable[[list[str]], dict[str, Tensor]] | None = None,
    ) -> None:
        self._tokenize = tokenize
        self._iterable = iterable
        self._is_once = isinstance(iterable, Iterator)
        self._rest: Iterator[Any] | None = None
        self._next = 0
        self._n_items = 0

    def __getstate__(self) -> dict[str, Any]:
        if self._is_once:
            raise InputError(
                "data must be readable from the start in each process, got an iterator"
                f" ({type(self._iterable).__name__}).\nGive a Dataset, a DataLoader, arrays or"
                " files."
            )
        return {**vars(self), "_rest": None, "_next": 0, "_n_items": 0}

    def identity(self) -> dict[str, Any]:
        """Return the name of its class, and what its batches depend on where that is known."""
        loader: Any = self._iterable
        data = loader.dataset if isinstance(loader, DataLoader) else loader
        identity: dict[str, Any] = {"kind": "batches", "type": type(data).__name__, "length": None}
        if isinstance(loader, DataLoader) and isinstance(data, IterableDataset):
            # Each worker makes batches of its own share.
            identity |= {"workers": loader.num_workers, "batch_size": loader.batch_size}
        return identity

    def batches(self, numbers: Iterable[int]) -> Iterator[NumberedBatch]:
        """Load batches whose numbers increase; those between are loaded and dropped."""
        before = -1
        for number in map(operator.index, numbers):
            if number <= before:
                raise IndexError(f"numbers of batches must increase, got {number} after {before}")
            before = number
            if number < self._next:
                self._restart(number)
            batch = None
            while self._next <= number:
                batch = self._load_next()
                if batch is None:
                    return
            assert batch is not None
            yield batch

    def _restart(self, number: int) -> None:
        if self._is_once:
            raise InputError(
                f"data must give batch {number} again, got an iterator"
                f" ({type(self._iterable).__name__}) that is past it."
                "\nGive a Dataset, a DataLoader, arrays or files; or a new iterator."
            )
        self._rest, self._next, self._n_items = None, 0, 0

    def _load_next(self) -> NumberedBatch | None:
        """Take the next batch; None at the end."""
        number, start = self._next, self._n_items
        # After an error the place in the iterable is unknown: any number is asked for again.
        self._next = sys.maxsize
        try:
            # An iterator began before this call, and goes on with the user's random numbers.
            with nullcontext() if self._is_once else seeded(number):
                data, blank = self._next_data()
        except StopIteration:
            self._next = number
            if number == 0:
                raise InputError(
                    f"data must give at least one batch, got none from this"
                    f" {type(self._iterable).__name__}."
                    "\nGive an iterable that has batches, or an iterator that was not used before."
                ) from None
            return None
        except DataSetError:
            raise
        except Exception as error:
            FailedItem(number, error).raise_as(
                f"batch {number} must load, got {type(error).__name__} from this"
                f" {type(self._iterable).__name__}: {error}."
                "\nGive a Dataset to leave out single items that fail: on_error='skip'."
            )
        size = len(blank) + (0 if blank and data is None else _n_items(data, number))
        if not size and not number:
            raise InputError(
                f"the first batch must hold at least one item, got {describe.in_words(data)}."
                "\nLeave it out: its values show what the store will hold."
            )
        self._next, self._n_items = number + 1, start + size
        skipped = [(start + place, mark.reason) for place, mark in blank.items()]
        items = [start + place for place in range(size) if place not in blank]
        return NumberedBatch(number, items, data, skipped)

    def _next_data(self) -> tuple[Any, dict[int, SkipMark]]:
        """Take the data of the next batch, and the places of blank texts, which it lacks."""
        if self._rest is None:
            self._rest = start_iterator(self._iterable)
        data = next(self._rest)
        if self._tokenize is not None:
            texts = unwrap_text_key(data)
            if isinstance(texts, list | tuple) and _are_texts_or_blank(texts):
                marked = list(enumerate(map(text_or_skip_mark, texts)))
                good = [text for _, text in marked if isinstance(text, str)]
                blank = {place: mark for place, mark in marked if isinstance(mark, SkipMark)}
                return self._tokenize(good) if good else None, blank
        return data, {}


def _are_texts_or_blank(data: Sequence[Any]) -> bool:
    return bool(data) and all(text is None or isinstance(text, str) for text in data)


def _n_items(data: Any, number: int) -> int:
    """Return the first dimension of the first tensor in a batch."""
    first = next((tensor for _, tensor in tensors(data)), None)
    if first is None or not first.dim():
        raise InputError(
            f"batch {number} must hold a tensor whose first dimension counts the items, got"
            f" {describe.in_words(data)}.\nGive batches such as torch.stack(items)."
        )
    return int(first.shape[0])
