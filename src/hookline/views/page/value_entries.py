"""The values of a recording, unread until they are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.display.text import first_line, name_without_torch
from hookline.engine import Site
from hookline.engine.pytree import describe, tree
from hookline.engine.pytree.describe import leaf_text
from hookline.engine.pytree.tree import Leaf
from hookline.errors import FolderError, InputError, OverwrittenError
from hookline.recordings import Recording
from hookline.recordings.figure_values import iterate_source_values
from hookline.recordings.recorded_values import RecordedValue
from hookline.statistics import measure_moments
from hookline.statistics.value_statistics import (
    Statistics,
    histogram_and_statistics,
    main_tensor,
    main_tensor_statistics,
    measured_tensors,
)
from hookline.views.page.what_to_draw import holds_feature_maps

OVERWRITTEN = "overwritten in place after it was recorded; record it with copy=True"
BINS = 48
_MOST_LEAVES = 3
_MOST_PARTS = 32  # whose statistics are shown


class ValueKey(NamedTuple):
    """The key of one value of a recording."""

    at: str  # the site as text
    pass_number: int  # the pass
    call: int  # the call in that pass
    # for a gradient, the index of its backward pass if there are several; else None
    backward: int | None = None


class Part(NamedTuple):
    """One tensor of a value with several, such as a tuple."""

    leaf: str  # where it is in the value, such as `[1]`
    statistics: Statistics
    counts: tuple[int, ...]  # its histogram


@final
@dataclass(frozen=True)
class ValueEntry:
    """One value: a call of a site in a pass."""

    recorded: RecordedValue = field(compare=False)  # the value, unread
    key: ValueKey
    order: int  # the value's position in firing order over the whole recording
    shape: str = ""  # the shape or structure; empty if the value could not be read
    dtype: str = ""  # the dtype of the main tensor; empty if there is none
    numel: int | None = None  # the number of elements of the main tensor; None if there is none
    main: Leaf | None = None  # where the main tensor is; of a gradient, where that of its value is
    n_bytes: int = 0  # the memory of all its tensors, in bytes
    is_image: bool = False  # whether it holds maps: shape (N, C, H, W)
    # the statistics; None if the value holds no tensor, could not be read, or is not measured
    # yet
    statistics: Statistics | None = None
    # a histogram from the smallest to the largest finite element, in `BINS` equal bins
    counts: tuple[int, ...] = ()
    problem: str = ""  # the reason why the value could not be read or measured; otherwise empty
    is_overwritten: bool = False  # whether the reason is an in-place change
    # for some items of a store, the statistics of all items and their bytes; else None
    whole: Statistics | None = None
    stored: int | None = None
    # the leaves with elements that are NaN or infinite, and their numbers; of all tensors of
    # the value. The other numbers are those of its main tensor
    broken: tuple[tuple[str, int], ...] = ()
    # the tensors of a value with several; empty of a value with one
    parts: tuple[Part, ...] = ()

    @property
    def site(self) -> Site:
        """The site."""
        return self.recorded.site

    @property
    def is_measured(self) -> bool:
        """Tell whether nothing is left to measure."""
        is_done = self.statistics is not None or bool(self.parts) or bool(self.problem)
        return is_done or (self.numel is None and not self.n_bytes)

    @property
    def non_finite(self) -> int:
        """The number of NaNs and infinities in all tensors of the value."""
        if self.whole is not None:
            return self.whole.non_finite
        return sum(number for _, number in self.broken)

    @property
    def non_finite_text(self) -> str:
        """The number of NaNs and infinities, with the leaves that hold them."""
        if self.whole is None and self.statistics is None and not self.parts:
            return ""
        leaves = [leaf for leaf, _ in self.broken if leaf] if self.whole is None else []
        where = f" in {', '.join(leaves[:_MOST_LEAVES])}" if leaves else ""
        more = len(leaves) - _MOST_LEAVES
        return f"{self.non_finite:,}{where}" + f" and {more} more" * (more > 0)


EntryAt = Callable[[ValueKey], ValueEntry | None]  # returns the value of a key

_TWINS = {
    "output": "grad_output", "input": "grad_input",
    "grad_output": "output", "grad_input": "input",
}  # fmt: skip


def gradient_of(entry_at: EntryAt, entry: ValueEntry) -> ValueEntry | None:
    """Return the gradient of a value; None if there is none, or for a gradient."""
    return None if entry.site.port.startswith("grad") else gradient_or_value_of(entry_at, entry)


def gradient_or_value_of(entry_at: EntryAt, entry: ValueEntry) -> ValueEntry | None:
    """Return the gradient of a value, or the value of a gradient."""
    port = _TWINS.get(entry.site.port)
    if port is None:
        return None
    at = str(Site(entry.site.path, port, entry.site.leaf, entry.site.call))
    for backward in (entry.key.backward, None, 0):
        twin = entry_at(ValueKey(at, entry.key.pass_number, entry.key.call, backward))
        if twin is not None:
            return twin
    return None


def read_tensor(entry: ValueEntry, part: int | str = 0, within: ValueEntry | None = None) -> Tensor:
    """Read one of the tensors of a value, the main one first.

    Args:
        entry: the value.
        part: the number of the tensor, or its leaf.
        within: the value in which it is counted, as that of a gradient: where nothing flowed, the
            gradient has no tensor. None counts in the value itself.

    Raises:
        OverwrittenError: the value was changed in place.
        FolderError: the folder is gone or damaged.
        InputError: the value holds no such tensor.
    """
    leaf = _find_leaf(within or entry, part)
    tensor = None if leaf is None else _tensor_at(entry.recorded.read(), leaf)
    if tensor is not None:
        return tensor
    if leaf is not None and entry.site.port.startswith("grad"):
        raise InputError("no gradient flowed to this tensor.")
    raise InputError(f"the value holds no {'such ' * bool(part)}tensor.")


def measure_part(entry: ValueEntry, leaf: str, within: ValueEntry) -> ValueEntry:
    """Return a value of which only the tensor at a leaf is described and measured.

    Raises:
        HooklineError: as `read_tensor`.
        RuntimeError, TypeError: torch cannot read its numbers.
    """
    tensor = read_tensor(entry, leaf, within)
    statistics = main_tensor_statistics(tensor)
    return replace(
        _with_main_tensor(entry, tensor),
        shape=describe.shape(tensor),
        n_bytes=describe.n_bytes(tensor),
        statistics=statistics,
        broken=() if statistics is None else (("", statistics.non_finite),),
    )


def _find_leaf(entry: ValueEntry, part: int | str) -> Leaf | None:
    if not part:
        return entry.main
    if isinstance(part, str):
        leaves = (leaf for leaf, _ in tree.tensors(entry.recorded.outline()))
        return next((leaf for leaf in leaves if leaf_text(leaf) == part), None)
    tensors = measured_tensors(entry.recorded.read())
    return tensors[part][0] if part < len(tensors) else None


def _tensor_at(value: Any, leaf: Leaf | None) -> Tensor | None:
    return next((tensor for place, tensor in tree.tensors(value) if place == leaf), None)


# -- values ---------------------------------------------------------------------------------------


def list_values(recording: Recording) -> list[ValueEntry]:
    """List every value of a recording in firing order, without statistics.

    From a folder, only the manifest and the headers of its files are read.
    """
    entries = [
        _unread_entry(recorded, order)
        for order, recorded in enumerate(iterate_source_values(recording))
    ]
    places = {entry.key: entry for entry in entries}
    return [
        _with_main_tensor_of_value(entry, gradient_or_value_of(places.get, entry))
        for entry in entries
    ]


def measure_values(recording: Recording) -> list[ValueEntry]:
    """Read and measure every value of a recording, one at a time, in firing order.

    Raises:
        FolderError: the recording was opened from a folder that is gone or damaged.
    """
    return [measure_entry(entry) for entry in list_values(recording)]


def measure_entry(
    entry: ValueEntry, on_tensor: Callable[[ValueEntry, Tensor], object] | None = None
) -> ValueEntry:
    """Return a value with its statistics and histogram, or with the problem that prevents them.

    Args:
        entry: the value.
        on_tensor: called with the value and its main tensor, which is read only once.

    Raises:
        FolderError: the folder is gone or damaged.
    """
    try:
        value = entry.recorded.read()
    except OverwrittenError:
        return replace(entry, shape="", problem=OVERWRITTEN, is_overwritten=True)
    main = _tensor_at(value, entry.main)
    if main is not None and main.is_meta:
        return replace(entry, problem=f"{entry.shape} on the meta device, which has no numbers")
    counts, statistics = (), None
    try:
        if main is not None:
            bins, _, statistics = histogram_and_statistics(main, BINS)
            counts = tuple(bins.tolist())
        parts = _measure_parts(entry.site, value, main)
        broken = _count_non_finite(entry.site, value, main, statistics)
    except (RuntimeError, TypeError) as error:
        # One dtype or layout that torch cannot convert must not fail the whole page.
        return replace(entry, shape="", problem=f"cannot be measured: {first_line(error)}")
    if on_tensor is not None and main is not None:
        on_tensor(entry, main)
    return replace(entry, statistics=statistics, counts=counts, broken=broken, parts=parts)


def _measure_parts(site: Site, value: Any, main: Tensor | None) -> tuple[Part, ...]:
    """Measure each tensor of a value that has others than the main one."""
    tensors = measured_tensors(value)
    if all(tensor is main for _, tensor in tensors):
        return ()
    parts = []
    for leaf, tensor in tensors[:_MOST_PARTS]:
        counts, _, statistics = histogram_and_statistics(tensor, BINS)
        parts.append(Part(leaf_text((*site.leaf, *leaf)), statistics, tuple(counts.tolist())))
    return tuple(parts)


def _count_non_finite(
    site: Site, value: Any, main: Tensor | None, statistics: Statistics | None
) -> tuple[tuple[str, int], ...]:
    """Return the leaves of a value with elements that are NaN or infinite, and their numbers."""
    numbers = [
        (
            leaf,
            (statistics if statistics and tensor is main else measure_moments(tensor)).non_finite,
        )
        for leaf, tensor in measured_tensors(value)
    ]
    return tuple(
        (f"{site.port}{leaf_text((*site.leaf, *leaf))}" if leaf else "", number)
        for leaf, number in numbers
        if number
    )


def _unread_entry(recorded: RecordedValue, order: int) -> ValueEntry:
    number = recorded.record.number
    key = ValueKey(str(recorded.site), number, recorded.call, recorded.backward)
    try:
        value = recorded.outline()
    except FolderError as error:
        return ValueEntry(recorded, key, order, problem=first_line(error))
    main = main_tensor(value, with_meta=True)
    leaves = (leaf for leaf, tensor in tree.tensors(value) if tensor is main)
    entry = ValueEntry(
        recorded,
        key,
        order,
        shape=describe.shape_or_structure(value),
        main=next(leaves, None),
        n_bytes=_n_bytes(value),
    )
    return _with_main_tensor(entry, main)


def _with_main_tensor(entry: ValueEntry, main: Tensor | None) -> ValueEntry:
    """Return a value with what the outline of its main tensor tells."""
    return replace(
        entry,
        dtype="" if main is None else name_without_torch(main.dtype),
        numel=None if main is None else main.numel(),
        is_image=main is not None and holds_feature_maps(main),
    )


def _with_main_tensor_of_value(entry: ValueEntry, value: ValueEntry | None) -> ValueEntry:
    """Return a gradient whose main tensor is that of its value; other values as they are.

    If no gradient flowed to that tensor, the gradient has no main tensor.
    """
    is_gradient = entry.site.port.startswith("grad")
    if not is_gradient or value is None or value.main in (None, entry.main) or entry.main is None:
        return entry
    main = _tensor_at(entry.recorded.outline(), value.main)
    return _with_main_tensor(replace(entry, main=value.main), main)


def _n_bytes(value: Any) -> int:
    parts = [tensor for _, tensor in tree.tensors(value)]
    if parts and all(tensor.is_meta for tensor in parts):
        return sum(tensor.numel() * tensor.element_size() for tensor in parts)
    return describe.n_bytes(value)
