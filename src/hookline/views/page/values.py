"""List the values of a recording without reading them, and measure them one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.display.text import first_line
from hookline.engine import Site
from hookline.engine.pytree import describe, tree
from hookline.engine.pytree.describe import leaf_text
from hookline.errors import FolderError, OverwrittenError
from hookline.recordings import PassRecord, Recording
from hookline.statistics import measure
from hookline.views.page.thumbnails import (
    Strip,
    StripForm,
    feature_strip,
    is_image_like,
    strip_form,
)
from hookline.views.plots.differences import Difference
from hookline.views.plots.reducing import histogram
from hookline.views.statistics import Statistics, main_tensor, measured_tensors

OVERWRITTEN = "overwritten in place after it was recorded; record it with copy=True"
BINS = 48
_MOST_LEAVES = 3


class Place(NamedTuple):
    """The key of one value of a recording.

    Args:
        at: the site as text.
        pass_number: the pass.
        call: the call in that pass.
        backward: for a gradient, the index of its backward pass if there are several; else None.
    """

    at: str
    pass_number: int
    call: int
    backward: int | None = None


@final
@dataclass(frozen=True)
class ValueEntry:
    """One value: a call of a site in a pass.

    Args:
        site: the site.
        pass_number: the pass.
        call: the call in that pass.
        order: the value's position in firing order over the whole recording.
        shape: the shape or structure; empty if the value could not be read.
        dtype: the dtype of the main tensor; empty if there is none.
        numel: the number of elements of the main tensor; None if there is none.
        n_bytes: the memory of all its tensors, in bytes.
        form: the layout of the strip of feature maps; None if there are none.
        statistics: the statistics; None if the value holds no tensor, could not be read, or is not
            measured yet.
        counts: a histogram from the smallest to the largest finite element, in `BINS` equal bins.
        strip: the feature maps; None if the value is not image-like or they are not drawn.
        difference: the difference from the other recording's value; None if it is not compared.
        problem: the reason why the value could not be read or measured; otherwise empty.
        is_overwritten: whether the reason is an in-place change.
        backward: for a gradient, the index of its backward pass if there are several; else None.
        whole: for some items of a store, the statistics of all items; else None.
        broken: the leaves with elements that are NaN or infinite, and their numbers; of all tensors
            of the value. The other numbers are those of its main tensor.
    """

    site: Site
    pass_number: int
    call: int
    order: int
    shape: str = ""
    dtype: str = ""
    numel: int | None = None
    n_bytes: int = 0
    form: StripForm | None = None
    statistics: Statistics | None = None
    counts: tuple[int, ...] = ()
    strip: Strip | None = None
    difference: Difference | None = None
    problem: str = ""
    is_overwritten: bool = False
    backward: int | None = None
    whole: Statistics | None = None
    broken: tuple[tuple[str, int], ...] = ()

    @property
    def place(self) -> Place:
        """The key of the value."""
        return Place(str(self.site), self.pass_number, self.call, self.backward)

    @property
    def non_finite(self) -> int:
        """Return the number of NaNs and infinities in all tensors of the value."""
        if self.whole is not None:
            return self.whole.non_finite
        return sum(number for _, number in self.broken)

    @property
    def non_finite_text(self) -> str:
        """Return the number of NaNs and infinities, with the leaves that hold them."""
        if self.whole is None and self.statistics is None:
            return ""
        leaves = [leaf for leaf, _ in self.broken if leaf] if self.whole is None else []
        where = f" in {', '.join(leaves[:_MOST_LEAVES])}" if leaves else ""
        more = len(leaves) - _MOST_LEAVES
        return f"{self.non_finite:,}{where}" + f" and {more} more" * (more > 0)


def list_values(recording: Recording) -> list[ValueEntry]:
    """List every value of a recording in firing order, without statistics.

    From a folder, only the manifest and the headers of its files are read.
    """
    found: list[ValueEntry] = []
    for one in recording.passes:
        runs = one.backwards if len(one.backwards) > 1 else []
        for site, call in one.fired():
            if not (runs and site.is_gradient):
                found.append(_outlined(one, ValueEntry(site, one.number, call, len(found))))
        for number, run in enumerate(runs):
            for site, call in run.fired():
                seen = ValueEntry(site, one.number, call, len(found), backward=number)
                found.append(_outlined(run, seen))
    return found


def read_values(recording: Recording) -> list[ValueEntry]:
    """Read, measure and draw every value of a recording, one at a time, in firing order.

    Raises:
        FolderError: the recording was opened from a folder that is gone or damaged.
        HooklineError: pillow is not installed.
    """
    return [measured(recording, seen, with_strip=True) for seen in list_values(recording)]


def read_value(recording: Recording, seen: ValueEntry) -> Any:
    """Read a value.

    Raises:
        OverwrittenError: the value was changed in place after it was recorded.
        FolderError: the folder is gone or damaged.
    """
    record = next(one for one in recording.passes if one.number == seen.pass_number)
    if seen.backward is not None:
        record = record.backwards[seen.backward]
    return record[_with_call(seen)]


def measured(recording: Recording, seen: ValueEntry, *, with_strip: bool = False) -> ValueEntry:
    """Return a value with its statistics and histogram, or with the problem that prevents them.

    Raises:
        FolderError: the folder is gone or damaged.
    """
    try:
        value = read_value(recording, seen)
    except OverwrittenError:
        return replace(seen, shape="", problem=OVERWRITTEN, is_overwritten=True)
    tensor = main_tensor(value)
    if tensor is None:
        return seen
    try:
        counts, _, statistics = histogram(tensor, BINS)
        broken = _broken(seen.site, value, tensor, statistics)
        strip = feature_strip(tensor) if with_strip else None
    except (RuntimeError, TypeError) as error:
        # One dtype or layout that torch cannot convert must not fail the whole page.
        return replace(seen, shape="", problem=f"cannot be measured: {first_line(error)}")
    return replace(seen, statistics=statistics, counts=tuple(counts.tolist()), strip=strip,
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


def _outlined(record: PassRecord, seen: ValueEntry) -> ValueEntry:
    try:
        value = record.outline(_with_call(seen))
    except FolderError as error:
        return replace(seen, problem=str(error).splitlines()[0])
    tensor = _main_outline(value)
    seen = replace(seen, shape=describe.shape_or_structure(value), n_bytes=_n_bytes(value))
    if tensor is None:
        return seen
    return replace(
        seen,
        dtype=str(tensor.dtype).removeprefix("torch."),
        numel=tensor.numel(),
        form=strip_form(tensor.shape) if is_image_like(tensor) else None,
    )


def _n_bytes(value: Any) -> int:
    parts = [tensor for _, tensor in tree.tensors(value)]
    if parts and all(tensor.is_meta for tensor in parts):
        return sum(tensor.numel() * tensor.element_size() for tensor in parts)
    return describe.n_bytes(value)


def _main_outline(value: Any) -> Tensor | None:
    """Return the tensor that `main_tensor` would choose, meta tensors included."""
    first: Tensor | None = None
    for _, tensor in tree.tensors(value):
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
        first = tensor if first is None else first
    return first


def _with_call(seen: ValueEntry) -> Site:
    return seen.site if seen.site.call is not None else replace(seen.site, call=seen.call)
