"""Find what flows into what: which recorded values an input was made of.

An input that equals an earlier value came from it. An input, or the output of a container, that
equals the sum of two earlier values was joined from them, as in a residual block. If no input was
recorded, only the parts of each `nn.Sequential` are known to follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from hookline.errors import HooklineError
from hookline.statistics.flat_numbers import to_float64
from hookline.statistics.value_statistics import main_tensor
from hookline.views.page.module_rows import Row
from hookline.views.page.value_entries import ValueEntry

_ROOM = 256 * 1024**2  # of the values that are read to confirm sums, in bytes
_CLOSE = 1e-5  # of means and spreads, beside the spread
_MOST_BACK = 24  # values of one shape before a sum in which its parts are looked for


class Edge(NamedTuple):
    """A value that flows from one row into another; a join has two of one target."""

    source: int
    target: int
    is_join: bool = False


def find_edges(rows: Sequence[Row], entries: Sequence[ValueEntry], pass_number: int) -> list[Edge]:
    """Return the edges of one pass, as far as its values tell them.

    Args:
        rows: the rows.
        entries: the measured values in firing order.
        pass_number: the pass.
    """
    of_pass = [
        entry
        for entry in entries
        if entry.key.pass_number == pass_number and entry.site.port in ("input", "output")
    ]
    if not any(entry.site.port == "input" for entry in of_pass):
        return list(_sequential_edges(rows))
    row_of = {entry.order: index for index, row in enumerate(rows) for entry in row.entries}
    holders = {row.parent for row in rows if not row.name.startswith("@")}
    earlier = _EarlierValues()
    edges: dict[Edge, None] = {}
    for entry in of_pass:
        target = row_of[entry.order]
        for source, is_join in _find_sources(entry, target in holders, earlier):
            edges[Edge(row_of[source.order], target, is_join)] = None
        earlier.add(entry)
    return [edge for edge in edges if edge.source != edge.target]


def _find_sources(
    entry: ValueEntry, is_container: bool, earlier: _EarlierValues
) -> list[tuple[ValueEntry, bool]]:
    """Return what a value was made of, and whether by adding: of inputs, and holders' outputs."""
    if is_container != (entry.site.port == "output"):
        return []
    source = earlier.find_equal(entry)
    if source is None:
        return [(part, True) for part in earlier.find_addends(entry)]
    return [] if is_container else [(source, False)]


def _sequential_edges(rows: Sequence[Row]) -> Iterator[Edge]:
    """Iterate over the edges between the parts of each `nn.Sequential`."""
    last: dict[int, int] = {}
    for index, row in enumerate(rows):
        if row.parent is None or rows[row.parent].module_type != "Sequential":
            continue
        if row.parent in last:
            yield Edge(last[row.parent], index)
        last[row.parent] = index


class _EarlierValues:
    """The values so far, by what identifies them."""

    def __init__(self) -> None:
        self._by_key: dict[object, ValueEntry] = {}
        self._by_shape: dict[str, list[ValueEntry]] = {}
        self._room = _ROOM

    def add(self, entry: ValueEntry) -> None:
        """Take a value; of equal ones the first output stands for all."""
        key = _statistics_key(entry)
        if key is not None and key not in self._by_key:
            self._by_key[key] = entry
            self._by_shape.setdefault(entry.shape, []).append(entry)

    def find_equal(self, entry: ValueEntry) -> ValueEntry | None:
        """Return the first value that equals one, by its statistics; or None."""
        key = _statistics_key(entry)
        return None if key is None else self._by_key.get(key)

    def find_addends(self, entry: ValueEntry) -> tuple[ValueEntry, ...]:
        """Return the two values of which a value is the sum; none if there are none."""
        statistics = entry.statistics
        if statistics is None or statistics.mean is None or not statistics.std:
            return ()
        earlier = self._by_shape.get(entry.shape, [])[-_MOST_BACK:]
        close = _CLOSE * (statistics.std + abs(statistics.mean))
        for late, second in reversed(list(enumerate(earlier))):
            for first in reversed(earlier[:late]):
                gap = _mean(first) + _mean(second) - statistics.mean
                if abs(gap) < close and self._is_sum(entry, first, second):
                    return first, second
        return ()

    def _is_sum(self, entry: ValueEntry, first: ValueEntry, second: ValueEntry) -> bool:
        self._room -= 3 * entry.n_bytes
        if self._room < 0:
            return False
        try:
            total, *addends = (_read_main_tensor(value) for value in (entry, first, second))
            gap = addends[0] + addends[1] - total
        except (HooklineError, RuntimeError, TypeError):
            return False
        return bool((gap.abs() <= _CLOSE * (total.abs() + total.std())).all())


def _mean(entry: ValueEntry) -> float:
    mean = None if entry.statistics is None else entry.statistics.mean
    return math.nan if mean is None else mean


def _statistics_key(entry: ValueEntry) -> object:
    statistics = entry.statistics
    if statistics is None or not statistics.std:
        return None
    numbers = statistics.mean, statistics.std, statistics.min, statistics.max
    return entry.shape, numbers, entry.counts


def _read_main_tensor(entry: ValueEntry) -> Tensor:
    tensor = main_tensor(entry.recorded.read())
    if tensor is None:
        raise TypeError("the value holds no tensor.")
    return to_float64(tensor.detach())
