"""The table of a recording: its values, unread until they are measured, its rows and columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.display.text import first_line
from hookline.display.units import measure as number_text
from hookline.display.units import share
from hookline.engine import Site
from hookline.engine.pytree import describe, tree
from hookline.engine.pytree.describe import leaf_text
from hookline.errors import FolderError, OverwrittenError
from hookline.recordings import Recording
from hookline.recordings.walk import RecordedValue, walk
from hookline.statistics import measure
from hookline.statistics.of_values import Statistics, histogram, main_tensor, measured_tensors
from hookline.views.page.pictures import Strip, StripForm, feature_strip, is_image_like, strip_form

OVERWRITTEN = "overwritten in place after it was recorded; record it with copy=True"
BINS = 48
_MOST_LEAVES = 3

SortKey = str | float | None


class Place(NamedTuple):
    """The key of one value of a recording."""

    at: str  # the site as text
    pass_number: int  # the pass
    call: int  # the call in that pass
    # for a gradient, the index of its backward pass if there are several; else None
    backward: int | None = None


@final
@dataclass(frozen=True)
class ValueEntry:
    """One value: a call of a site in a pass."""

    recorded: RecordedValue = field(compare=False)  # the value, unread
    place: Place
    order: int  # the value's position in firing order over the whole recording
    shape: str = ""  # the shape or structure; empty if the value could not be read
    dtype: str = ""  # the dtype of the main tensor; empty if there is none
    numel: int | None = None  # the number of elements of the main tensor; None if there is none
    n_bytes: int = 0  # the memory of all its tensors, in bytes
    form: StripForm | None = None  # the layout of the strip of feature maps; None if there are none
    # the statistics; None if the value holds no tensor, could not be read, or is not measured
    # yet
    statistics: Statistics | None = None
    # a histogram from the smallest to the largest finite element, in `BINS` equal bins
    counts: tuple[int, ...] = ()
    # the feature maps; None if the value is not image-like or they are not drawn
    strip: Strip | None = None
    problem: str = ""  # the reason why the value could not be read or measured; otherwise empty
    is_overwritten: bool = False  # whether the reason is an in-place change
    # for some items of a store, the statistics of all items; else None
    whole: Statistics | None = None
    # the leaves with elements that are NaN or infinite, and their numbers; of all tensors of
    # the value. The other numbers are those of its main tensor
    broken: tuple[tuple[str, int], ...] = ()

    @property
    def site(self) -> Site:
        """The site."""
        return self.recorded.site

    @property
    def non_finite(self) -> int:
        """The number of NaNs and infinities in all tensors of the value."""
        if self.whole is not None:
            return self.whole.non_finite
        return sum(number for _, number in self.broken)

    @property
    def non_finite_text(self) -> str:
        """The number of NaNs and infinities, with the leaves that hold them."""
        if self.whole is None and self.statistics is None:
            return ""
        leaves = [leaf for leaf, _ in self.broken if leaf] if self.whole is None else []
        where = f" in {', '.join(leaves[:_MOST_LEAVES])}" if leaves else ""
        more = len(leaves) - _MOST_LEAVES
        return f"{self.non_finite:,}{where}" + f" and {more} more" * (more > 0)


# -- values ---------------------------------------------------------------------------------------


def list_values(recording: Recording) -> list[ValueEntry]:
    """List every value of a recording in firing order, without statistics.

    From a folder, only the manifest and the headers of its files are read.
    """
    return [_outlined(recorded, order) for order, recorded in enumerate(walk(recording))]


def read_values(recording: Recording) -> list[ValueEntry]:
    """Read, measure and draw every value of a recording, one at a time, in firing order.

    Raises:
        FolderError: the recording was opened from a folder that is gone or damaged.
    """
    return [measured(entry, with_strip=True) for entry in list_values(recording)]


def measured(entry: ValueEntry, *, with_strip: bool = False) -> ValueEntry:
    """Return a value with its statistics and histogram, or with the problem that prevents them.

    Raises:
        FolderError: the folder is gone or damaged.
    """
    try:
        value = entry.recorded.read()
    except OverwrittenError:
        return replace(entry, shape="", problem=OVERWRITTEN, is_overwritten=True)
    tensor = main_tensor(value)
    if tensor is None:
        return entry
    try:
        counts, _, statistics = histogram(tensor, BINS)
        broken = _broken(entry.site, value, tensor, statistics)
        strip = feature_strip(tensor) if with_strip else None
    except (RuntimeError, TypeError) as error:
        # One dtype or layout that torch cannot convert must not fail the whole page.
        return replace(entry, shape="", problem=f"cannot be measured: {first_line(error)}")
    return replace(entry, statistics=statistics, counts=tuple(counts.tolist()), strip=strip,
                   broken=broken)  # fmt: skip


def _broken(
    site: Site, value: Any, main: Tensor, statistics: Statistics
) -> tuple[tuple[str, int], ...]:
    """Return the leaves of a value with elements that are NaN or infinite, and their numbers."""
    numbers = [
        (leaf, statistics.non_finite if tensor is main else measure(tensor).non_finite)
        for leaf, tensor in measured_tensors(value)
    ]
    return tuple(
        (f"{site.port}{leaf_text((*site.leaf, *leaf))}" if leaf else "", number)
        for leaf, number in numbers
        if number
    )


def _outlined(recorded: RecordedValue, order: int) -> ValueEntry:
    number = recorded.record.number
    place = Place(str(recorded.site), number, recorded.call, recorded.backward)
    try:
        value = recorded.outline()
    except FolderError as error:
        return ValueEntry(recorded, place, order, problem=str(error).splitlines()[0])
    tensor = main_tensor(value, with_meta=True)
    return ValueEntry(
        recorded,
        place,
        order,
        shape=describe.shape_or_structure(value),
        dtype="" if tensor is None else str(tensor.dtype).removeprefix("torch."),
        numel=None if tensor is None else tensor.numel(),
        n_bytes=_n_bytes(value),
        form=strip_form(tensor.shape) if tensor is not None and is_image_like(tensor) else None,
    )


def _n_bytes(value: Any) -> int:
    parts = [tensor for _, tensor in tree.tensors(value)]
    if parts and all(tensor.is_meta for tensor in parts):
        return sum(tensor.numel() * tensor.element_size() for tensor in parts)
    return describe.n_bytes(value)


# -- rows -----------------------------------------------------------------------------------------


@final
@dataclass
class Row:
    """A row of the table."""

    name: str  # the row's name within the tree
    label: str  # the row's full name: the site, as in a look-up
    module_type: str  # the class of the module
    aliases: tuple[str, ...] = ()  # the module's other paths
    depth: int = 0  # the level of indentation
    parent: int | None = None  # the index of the parent row; None at the top
    call: int | None = None  # the call that the row shows, if a pass has several
    is_module: bool = True  # False for a row that shows one of a module's several values
    has_children: bool = False  # whether other rows lie under it
    entry: ValueEntry | None = None  # the value; None for a row that only groups others


def tree_rows(recording: Recording, entries: list[ValueEntry]) -> list[Row]:
    """List the table's rows in tree order: modules with a value, and their ancestors.

    A module with one value shows it in its own row. Several values have one row each under it.
    """
    by_path: dict[str, list[ValueEntry]] = {}
    for entry in entries:
        by_path.setdefault(entry.site.path, []).append(entry)
    types = dict(recording.modules)
    rows: list[Row] = []
    number_of: dict[str, int] = {}
    for path in _tree_order(recording, by_path):
        of_module = sorted(by_path.get(path, ()), key=lambda entry: entry.order)
        label = str(Site(path))
        row = Row(label.rpartition(".")[2], label, types.get(path, ""))
        row.parent = number_of.get(path.rpartition(".")[0]) if path else None
        if row.parent is not None:
            rows[row.parent].has_children = True
            row.depth = rows[row.parent].depth + 1
        if of_module:
            row.aliases, row.module_type = of_module[0].site.aliases, of_module[0].site.module_type
        number_of[path] = len(rows)
        rows.append(row)
        if len(of_module) == 1:
            row.entry = of_module[0]
            row.name += _suffix(row.entry.site)
            row.label += _suffix(row.entry.site)
        elif of_module:
            row.has_children = True
            rows += _rows_under(row, number_of[path], of_module)
    return rows


def _tree_order(recording: Recording, by_path: Mapping[str, list[ValueEntry]]) -> list[str]:
    """List the paths with a value and their ancestors, each directly before its descendants."""
    number_of = {path: number for number, (path, _) in enumerate(recording.modules)}
    paths = {part for path in by_path for part in _with_holders(path)}
    for path in by_path:  # a recording need not list its modules
        for part in _with_holders(path):
            number_of.setdefault(part, len(number_of))
    return sorted(
        paths, key=lambda path: [number_of[part] for part in _with_holders(path)] if path else []
    )


def _with_holders(path: str) -> list[str]:
    """Split `a.b.c` into `a`, `a.b` and `a.b.c`, without the root."""
    names = path.split(".")
    return [".".join(names[: n + 1]) for n in range(len(names))]


def _rows_under(module: Row, number: int, entries: list[ValueEntry]) -> list[Row]:
    n_calls = Counter(map(_turn, entries))
    several_passes = len({entry.place.pass_number for entry in entries}) > 1
    several_sites = len({entry.site for entry in entries}) > 1
    rows = []
    for entry in entries:
        several_calls = n_calls[_turn(entry)] > 1
        words = [
            entry.site.port + leaf_text(entry.site.leaf) if several_sites else "",
            f"pass {entry.place.pass_number}" if several_passes else "",
            "" if entry.place.backward is None else f"backward {entry.place.backward}",
            f"call {entry.place.call}" if several_calls else "",
        ]
        row = replace(module, name=", ".join(filter(None, words)), entry=entry, has_children=False)
        row.label += _suffix(entry.site) + f"#{entry.place.call}" * several_calls
        row.depth, row.parent, row.is_module = module.depth + 1, number, False
        row.call = entry.place.call if several_calls else None
        rows.append(row)
    return rows


def _turn(entry: ValueEntry) -> tuple[Site, int, int | None]:
    """Return what the calls of a module in one pass share."""
    return entry.site, entry.place.pass_number, entry.place.backward


def _suffix(site: Site) -> str:
    is_whole_output = site.port == "output" and not site.leaf
    call = "" if site.call is None else f"#{site.call}"
    return ("" if is_whole_output else f":{site.port}{leaf_text(site.leaf)}") + call


# -- columns --------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of the table."""

    key: str  # the column's name in the page's CSS and script
    title: str
    is_number: bool  # True aligns the column right and sorts the largest number first
    text: Callable[[Row], str]  # returns a cell's text
    sort_key: Callable[[Row], SortKey]  # returns a cell's sort key; None sorts last


def columns(rows: list[Row]) -> list[TableColumn]:
    """Choose the columns that rows need: calls, passes and maps only if some row has them."""
    entries = [row.entry for row in rows if row.entry is not None]
    chosen = [
        TableColumn("path", "Module", False, lambda row: row.label, lambda row: row.label),
        TableColumn("type", "Type", False, lambda row: row.module_type,
                    lambda row: row.module_type),
        _of_value("shape", "Shape", _shape, lambda entry: entry.numel if entry.shape else None),
        _of_value("dtype", "Dtype", _dtype, _dtype, is_number=False),
        _of_statistics("mean", "Mean"),
        _of_statistics("std", "Std"),
        _of_statistics("min", "Min"),
        _of_statistics("max", "Max"),
        _of_statistics("zeros", "Zeros", share),
        _of_value("non-finite", "NaN, inf", lambda entry: entry.non_finite_text,
                  lambda entry: entry.non_finite if entry.non_finite_text else None),
        _of_value("order", "Order", lambda entry: str(entry.order), lambda entry: entry.order),
    ]  # fmt: skip
    if any(row.call is not None for row in rows):
        chosen.append(TableColumn("call", "Call", True, _call_text, lambda row: row.call))
    if len({entry.place.pass_number for entry in entries}) > 1:
        chosen.append(_of_value("pass", "Pass", lambda entry: str(entry.place.pass_number),
                                lambda entry: entry.place.pass_number))  # fmt: skip
    if any(entry.form for entry in entries):
        chosen.append(_of_value("maps", "Feature maps", lambda _: "", _n_channels))
    return chosen


def _of_value(
    key: str,
    title: str,
    text: Callable[[ValueEntry], str],
    sort_key: Callable[[ValueEntry], SortKey],
    *,
    is_number: bool = True,
) -> TableColumn:
    """Create a column that is empty in rows without a value."""
    return TableColumn(
        key,
        title,
        is_number,
        lambda row: text(row.entry) if row.entry else "",
        lambda row: sort_key(row.entry) if row.entry else None,
    )


def _of_statistics(
    key: str, title: str, text: Callable[[float | None], str] = number_text
) -> TableColumn:
    """Create a column of a statistic that is empty in rows without statistics."""

    def number(entry: ValueEntry) -> float | None:
        return getattr(entry.whole or entry.statistics, key, None)

    return _of_value(key, title, lambda entry: text(number(entry)), number)


def _shape(entry: ValueEntry) -> str:
    return entry.whole.shape if entry.whole else entry.shape


def _dtype(entry: ValueEntry) -> str:
    return entry.dtype if entry.shape else ""


def _n_channels(entry: ValueEntry) -> int | None:
    return entry.form.channels if entry.form and not entry.problem else None


def _call_text(row: Row) -> str:
    return "" if row.call is None else f"{row.call:,}"
