"""The values of a recording: listed without reading them, then measured one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.engine import Site
from hookline.engine.pytree import describe, tree
from hookline.errors import FolderError, OverwrittenError
from hookline.recordings import PassRecord, Recording
from hookline.views.page.thumbnails import (
    Strip,
    StripForm,
    feature_strip,
    is_image_like,
    strip_form,
)
from hookline.views.plots.differences import Difference
from hookline.views.plots.reducing import histogram
from hookline.views.statistics import Statistics, main_tensor

OVERWRITTEN = "overwritten in place after it was recorded; record it with copy=True"
BINS = 48


class Place(NamedTuple):
    """Which value of a recording is meant.

    Args:
        at: the site, as it is written.
        pass_number: the pass.
        call: the call in that pass.
        backward: of a gradient, which of several backward passes brought it; else None.
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
        site: where it flowed.
        pass_number: in which pass.
        call: in which call of that pass.
        order: its place among all values of the recording, as they fired.
        shape: its structure; empty if it could not be read.
        dtype: of the tensor that stands for it; empty if it holds none.
        numel: how many elements that tensor has; None if there is none.
        n_bytes: the memory of all its tensors.
        form: of the strip of its feature maps; None if it has none.
        statistics: None if it holds no tensor, could not be read, or has not been measured yet.
        counts: a histogram from the least to the greatest finite element, in `BINS` equal parts.
        strip: its feature maps; None if it is not image-like.
        difference: how far it lies from the other recording's value; None if there is none.
        problem: why it could not be read or measured; empty if it could.
        is_overwritten: whether that is because it was changed in place.
        backward: which of several backward passes brought it, if it is a gradient.
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

    @property
    def place(self) -> Place:
        """Where it is found again."""
        return Place(str(self.site), self.pass_number, self.call, self.backward)

    @property
    def non_finite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.statistics.non_finite if self.statistics else 0


def list_values(recording: Recording) -> list[ValueEntry]:
    """Every value of a recording in the order they fired: what it is, without its numbers.

    Of a folder, nothing but the manifest and the heads of its files is read.
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
    """Read, measure and draw every value of a recording, one at a time, in the order they fired.

    Raises:
        FolderError: the recording was opened from a folder that is gone or damaged.
        HooklineError: pillow is not installed.
    """
    return [measured(recording, seen, with_strip=True) for seen in list_values(recording)]


def read_value(recording: Recording, seen: ValueEntry) -> Any:
    """The value itself.

    Raises:
        OverwrittenError: it was changed in place since. FolderError: its folder is gone or damaged.
    """
    record = next(one for one in recording.passes if one.number == seen.pass_number)
    if seen.backward is not None:
        record = record.backwards[seen.backward]
    return record[_with_call(seen)]


def measured(recording: Recording, seen: ValueEntry, *, with_strip: bool = False) -> ValueEntry:
    """A value with its statistics and its histogram; or with what keeps them from being made.

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
        strip = feature_strip(tensor) if with_strip else None
    except (RuntimeError, TypeError) as error:
        # A dtype or layout that torch itself cannot convert must not cost the whole page.
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return replace(seen, shape="", problem=f"cannot be measured: {text}")
    return replace(seen, statistics=statistics, counts=tuple(counts.tolist()), strip=strip)


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
    """As `main_tensor` chooses, of tensors that need not have data."""
    first: Tensor | None = None
    for _, tensor in tree.tensors(value):
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor
        first = tensor if first is None else first
    return first


def _with_call(seen: ValueEntry) -> Site:
    return seen.site if seen.site.call is not None else replace(seen.site, call=seen.call)
