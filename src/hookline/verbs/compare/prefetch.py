"""Read pairs of values in turn, the next one while a large one is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from hookline.engine.pytree import describe, tree
from hookline.errors import OverwrittenError
from hookline.verbs.compare.read_sides import Entry, Side

Pair = tuple[Entry, Entry]
Values = tuple[Any, Any]

_RELEASE_BYTES = 2**28  # files of folders are closed after so many bytes were read
_AHEAD_BYTES = 2**20  # handing a smaller value to the thread takes longer than reading it


def prefetch_pairs(pairs: Sequence[Pair], a: Side, b: Side) -> Iterator[tuple[Pair, Values | None]]:
    """Yield each pair of entries with its values; None for values that were overwritten.

    While a large pair from two folders is used, a thread reads the next one. From time to time,
    files are closed.
    """
    may_read_ahead = a.is_read_from_folder and b.is_read_from_folder
    reading: Future[Values | None] | None = None
    n_read = 0
    with ThreadPoolExecutor(1, "hookline-reader") as readers:
        for number, pair in enumerate(pairs):
            values = _read_pair(*pair) if reading is None else reading.result()
            n_bytes = sum(describe.n_bytes(tensor) for _, tensor in tree.tensors(values))
            n_read += n_bytes
            reading, following = None, pairs[number + 1 : number + 2]
            is_full = n_read > _RELEASE_BYTES
            if may_read_ahead and following and n_bytes >= _AHEAD_BYTES and not is_full:
                reading = readers.submit(copy_context().run, partial(_read_pair, *following[0]))
            yield pair, values
            del values
            if is_full:
                n_read = 0
                a.release()
                b.release()
        a.release()
        b.release()


def _read_pair(ours: Entry, theirs: Entry) -> Values | None:
    try:
        return ours.read(), theirs.read()
    except OverwrittenError:
        return None
