"""Arrange the values of a recording as a tree: one row for each call of a module."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import final

from hookline.engine import Site
from hookline.findings.survey import PLAIN_HOLDERS, repeated_block_indices
from hookline.recordings import Recording
from hookline.views.page.value_entries import ValueEntry

_Call = tuple[str, int]  # the path of a module, and the number of its call


@final
@dataclass
class Row:
    """One call of a module, or a module that holds others with values."""

    path: str
    call: int | None  # the number of the call in its pass; None if the module has one row
    module_type: str  # the class of the module
    aliases: tuple[str, ...] = ()  # the module's other paths
    parent: int | None = None  # the index of the row that holds it; None at the top
    entries: list[ValueEntry] = field(default_factory=list)  # its values, in firing order

    @property
    def name(self) -> str:
        """The module's name within the module that holds it."""
        holder = _parent_path(self.path)
        start = 0 if holder is None else len(holder)
        return str(Site(self.path))[start:].lstrip(".") if self.path else str(Site(""))

    @property
    def label(self) -> str:
        """The path, with the number of the call if the module has several."""
        return str(Site(self.path)) + ("" if self.call is None else f"#{self.call}")


def list_rows(recording: Recording, entries: Sequence[ValueEntry]) -> list[Row]:
    """List the rows depth first, in firing order: modules with a value, and their holders.

    The call of a module lies in the call of its holder during which it fired. The gradient of a
    parameter is a value of the module's row.
    """
    tree = _CallTree(recording, entries)
    rows: list[Row] = []
    for top in tree.children(None):
        _append_subtree(rows, tree, top, None)
    return rows


def repeated_block_rows(rows: Sequence[Row]) -> list[int]:
    """Return the rows of the repeated blocks, such as the layers of a transformer.

    Without any, the rows at the top with a value; in a part of a model, blocks that hold no others.
    """
    holders = {row.parent for row in rows if row.parent is not None}
    outputs = [index for index, row in enumerate(rows) if _has_output(row)]
    blocks = [k for k in outputs if k in holders and rows[k].module_type not in PLAIN_HOLDERS]
    if repeated := _repeated(rows, blocks):
        return repeated
    root = 0 if rows and not rows[0].path else None
    top = [index for index in outputs if rows[index].parent == root]
    return top if root == 0 else max(top, _repeated(rows, outputs), key=len)


def _repeated(rows: Sequence[Row], indices: Sequence[int]) -> list[int]:
    places = repeated_block_indices([rows[index].path for index in indices])
    return [indices[place] for place in places]


def _has_output(row: Row) -> bool:
    return any(entry.site.port == "output" for entry in row.entries)


def _append_subtree(rows: list[Row], tree: _CallTree, call: _Call, parent: int | None) -> None:
    index = len(rows)
    rows.append(tree.make_row(call, parent))
    for child in tree.children(call):
        _append_subtree(rows, tree, child, index)


class _CallTree:
    """The calls of modules, each under the call of its holder."""

    def __init__(self, recording: Recording, entries: Sequence[ValueEntry]) -> None:
        self._types = recording.modules
        self._number_of = {path: number for number, path in enumerate(self._types)}
        self._entries: dict[_Call, list[ValueEntry]] = {}
        for entry in entries:
            self._entries.setdefault(_module_call(entry), []).append(entry)
        self._fired = _firing_positions(entries)
        self._calls: dict[str, list[int]] = {}
        for path, call in self._entries:
            self._calls.setdefault(path, []).append(call)
        for path in list(self._calls):
            for holder in _enclosing_paths(path):
                if holder or "" in self._calls:
                    self._calls.setdefault(holder, [0])
        for numbers in self._calls.values():
            numbers.sort()
        # For each call of a module, when the last of the calls so far ended.
        self._ends = {
            path: list(accumulate((self._fired.get((path, n), math.inf) for n in numbers), max))
            for path, numbers in self._calls.items()
        }
        self._children: dict[_Call | None, list[_Call]] = {}
        calls = [(path, call) for path, numbers in self._calls.items() for call in numbers]
        for path_and_call in calls:
            self._children.setdefault(self._parent_call(path_and_call), []).append(path_and_call)
        for siblings in self._children.values():
            siblings.sort(key=self._sort_key)

    def children(self, call: _Call | None) -> list[_Call]:
        """Return the calls under a call in firing order; None is the top."""
        return self._children.get(call, [])

    def make_row(self, call: _Call, parent: int | None) -> Row:
        """Make the row of a call."""
        path, number = call
        entries = self._entries.get(call, [])
        owned = [entry for entry in entries if entry.site.path == path]
        is_counted = len(self._calls[path]) > 1 or any(e.site.call is not None for e in owned)
        return Row(
            path,
            number if is_counted else None,
            owned[0].site.module_type if owned else self._types.get(path, ""),
            owned[0].site.aliases if owned else (),
            parent,
            sorted(entries, key=lambda entry: entry.order),
        )

    def _parent_call(self, call: _Call) -> _Call | None:
        path, number = call
        holder = next((above for above in _enclosing_paths(path) if above in self._calls), None)
        if holder is None:
            return None
        numbers = self._calls[holder]
        position = self._fired.get(call, math.inf)
        if position == math.inf:
            place = bisect_left(numbers, number)
            return holder, number if numbers[place : place + 1] == [number] else numbers[0]
        place = bisect_left(self._ends[holder], position)
        return holder, numbers[min(place, len(numbers) - 1)]

    def _sort_key(self, call: _Call) -> tuple[float, int, int]:
        """Return the sort key of a call: when it, or the first call in it, fired."""
        below = [self._sort_key(child)[0] for child in self.children(call)]
        number = self._number_of.get(call[0], len(self._number_of))
        return min([*below, self._fired.get(call, math.inf)]), number, call[1]


def _firing_positions(entries: Iterable[ValueEntry]) -> Mapping[_Call, float]:
    """Map each call to the position of its output in its pass; without one, of its input."""
    starts: dict[int, int] = {}
    positions: dict[_Call, float] = {}
    inputs: dict[_Call, float] = {}
    for entry in entries:
        start = starts.setdefault(entry.key.pass_number, entry.order)
        ports = {"output": positions, "input": inputs}
        if entry.site.port in ports:
            ports[entry.site.port].setdefault(_module_call(entry), entry.order - start)
    return inputs | positions


def _module_call(entry: ValueEntry) -> _Call:
    """Return the call that a value belongs to; the gradient of a parameter, to its module."""
    path = entry.site.path
    if entry.site.port == "grad":
        return path.rpartition(".")[0], 0
    call = entry.site.call
    return path, entry.key.call if call is None else call


def _parent_path(path: str) -> str | None:
    """Return the path of the module that holds a module or calls an operation; None of the root."""
    if not path:
        return None
    holder, _, name = path.rpartition(".")
    if "@" in name:  # an operation
        return path.rpartition("@")[0]
    return holder


def _enclosing_paths(path: str) -> Iterator[str]:
    """Yield the paths of the modules around a module, the innermost first."""
    holder = _parent_path(path)
    while holder is not None:
        yield holder
        holder = _parent_path(holder)
