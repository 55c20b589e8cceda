"""The batches that a model is run on, and the sources that give them by number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from hookline.models.loaded_model import Preprocess

OnError = Literal["raise", "skip"]


class NumberedBatch(NamedTuple):
    """The items of a data set that a model is run on at once."""

    number: int  # the number of the batch, from 0
    items: list[int]  # the index of each item in the data set
    # The items as one value: a tensor, a tuple, a dict, ... None if there are no items.
    data: Any
    skipped: list[tuple[int, str]]  # the items that are left out, each with the reason


class DataSource(ABC):
    """A data set as batches by number.

    Batch k has the items from `k * batch_size` up to `(k + 1) * batch_size`, whichever batches
    were asked for before. Batches of an iterable are those that it gives.
    """

    batch_size: int  # the items of a batch; 0 for an iterable, whose batches have their own sizes
    n_items: int | None = None  # the number of items; None for an iterable
    names: list[str] | None = None  # the file name of each item; None where items are not files

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what tells this data set from another one, for JSON.

        The same content has the same identity in another folder, process or machine.
        """

    @abstractmethod
    def batches(self, numbers: Iterable[int]) -> Iterator[NumberedBatch]:
        """Load batches, in the order in which they are asked for.

        Args:
            numbers: the numbers of the batches. For an iterable they must increase. It ends where
                the iterable ends, whatever else is asked for.

        Raises:
            InputError: an item cannot be loaded, or the items of a batch do not fit together.
        """


class LoadOptions(NamedTuple):
    """Set how items are loaded."""

    batch_size: int | None = None  # items a batch; None for the loader's own, or 32
    workers: int = 0  # processes that load ahead of the model; 0 loads in this process
    # "raise", or "skip" to leave out an item that fails to load and list the error.
    on_error: OnError = "raise"
    preprocess: Preprocess | None = None  # converts a picture to a tensor; for pictures only
    # For texts only: converts a list of texts to a dict of tensors, padded to one length. Or a
    # tokenizer of transformers: it pads to the longest text of the batch, and cuts at
    # `tokenizer.model_max_length`.
    tokenize: Callable[[list[str]], Any] | None = None
    pin_memory: bool = False  # put batches in page-locked memory, from which a GPU copies faster
    # Says how to leave out items that fail.
    skip_fix: str = "Leave out items that fail, and list them: on_error='skip', or --skip-errors."
