"""Take the rows of the items that two stores have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.display.text import listed, plural
from hookline.errors import InputError
from hookline.findings import Finding
from hookline.stores import Column, Store
from hookline.stores.job_manifest import LOOP
from hookline.verbs.compare.read_sides import Side

_MOST_SHOWN = 3


@final
class RowsOfItems:
    """The rows of some items of a column, read as they are asked for.

    Args:
        column: the column.
        items: the positions of the items in the store.

    Attributes:
        dtype: the dtype of torch.
        shape: the number of rows, and the shape of a row.
    """

    def __init__(self, column: Column, items: NDArray[np.int64]) -> None:
        self._column = column
        self._rows = items
        if column.is_ragged:
            lengths = column.lengths.numpy()
            starts, counts = (lengths.cumsum() - lengths)[items], lengths[items]
            before = counts.cumsum() - counts
            self._rows = np.repeat(starts - before, counts) + np.arange(counts.sum())
        self.dtype: torch.dtype = column.dtype
        self.shape: tuple[int, ...] = (len(self._rows), *column.shape[1:])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: slice) -> Tensor:
        return self._column[self._rows[index]]


def take_common_items(a: Side, b: Side) -> tuple[tuple[Side, Side], list[Finding]]:
    """Pair the rows of two stores by their items, and say which items one of them has alone.

    Raises:
        InputError: the items differ, and cannot be paired.
    """
    if a.store is None or b.store is None:
        return (a, b), []
    items = a.store.items.numpy(), b.store.items.numpy()
    if np.array_equal(*items):
        return (a, b), []
    common, ours, theirs = np.intersect1d(*items, return_indices=True)
    if len(common) and _have_one_numbering(a.store, b.store, items):
        return (_take_items(a, ours), _take_items(b, theirs)), [_find_unshared(items, common)]
    counts = [plural(len(numbers), "item") for numbers in items]
    if counts[0] != counts[1]:  # shapes differ, too
        return (a, b), [Finding("inputs", f"{counts[0]} in a and {counts[1]} in b")]
    raise InputError(
        f"a and b must hold the same items, got {_item_text(items[0])} and {_item_text(items[1])}."
        "\nExtract from the same data; of stores that were joined, compare the parts one by one."
    )


def _have_one_numbering(a: Store, b: Store, items: tuple[NDArray[np.int64], ...]) -> bool:
    """Tell whether equal numbers of items mean equal items, as far as known."""
    if a.parts or b.parts or a.job["n_items"] != b.job["n_items"]:
        return False
    is_loop = any(store.job["data"].get("kind") == LOOP for store in (a, b))
    return not is_loop and all(len(np.unique(numbers)) == len(numbers) for numbers in items)


def _take_items(side: Side, items: NDArray[np.int64]) -> Side:
    def of_items(read: Callable[[], Column]) -> RowsOfItems:
        return RowsOfItems(read(), items)

    entries = [replace(entry, read=partial(of_items, entry.read)) for entry in side.entries]
    return replace(side, entries=entries)


def _find_unshared(items: tuple[NDArray[np.int64], ...], common: NDArray[np.int64]) -> Finding:
    alone = [np.setdiff1d(numbers, common) for numbers in items]
    texts = [
        f"{plural(len(numbers), 'item')} only in {label} ({_item_text(numbers)})"
        for label, numbers in zip("ab", alone, strict=True)
        if len(numbers)
    ]
    what = f"other items: {', '.join(texts)}" if texts else "their items in another order"
    are = f"rows are those of the {plural(len(common), 'common item')}, in order of their numbers"
    return Finding("inputs", f"the stores have {what}; {are}")


def _item_text(items: NDArray[np.int64]) -> str:
    return listed([str(item) for item in items[: _MOST_SHOWN + 1]], _MOST_SHOWN)


def find_data_differences(a: Side, b: Side) -> list[Finding]:
    """Say that the data of two stores may differ."""
    if a.store is None or b.store is None or a.store.parts or b.store.parts:
        return []
    jobs = a.store.job, b.store.job
    ours, theirs = (job["data"] for job in jobs)
    # The first batch has other values if it has other rows.
    is_same_batch = jobs[0]["batch_size"] == jobs[1]["batch_size"]
    is_same_batch &= np.array_equal(a.store.items.numpy(), b.store.items.numpy())
    odd = [
        key
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key) and (is_same_batch or key != "first_batch")
    ]
    return [Finding("inputs", f"the data may differ: {' and '.join(odd)} of it do")] if odd else []
