"""The plain data of a recording: entries, the stamps that show later writes, folder contents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine import Report, Site, every_tensor, local_part, unwrap_all_transforms
from hookline.engine.model_fingerprint import RecordedModel
from hookline.engine.pytree import outlines
from hookline.engine.run_settings import Settings


class Entry(NamedTuple):
    """One value of one pass.

    During recording, taps append plain tuples of the first fields, which are cheaper.
    """

    site: int  # the index of the site
    value: Any  # the value, a `StoredValue` value in a folder, or `PartialGradients`
    # The version stamp by which `is_unchanged` sees later changes. A lone tensor that is not copied
    # has its bare version. None for one that cannot change.
    stamp: Any = None
    # For a gradient, the call of the value that it belongs to. Other entries of a site are numbered
    # in order.
    call: int | None = None
    # For a gradient, the autograd run that produced it; None if there was none.
    backward: int | None = None
    # For a parameter's gradient, the norm of the parameter at that moment.
    weight: Tensor | float | None = None


def version_stamp(value: Any) -> tuple[int | None, ...]:
    """Return the version counters of a value's tensors; equal stamps mean that torch saw no write.

    An inference tensor has no version counter; its stamp is None.
    """
    return _versions(map(unwrap_all_transforms, every_tensor(value)))


@final
@dataclass(slots=True, eq=False)
class StampWithCopies:
    """The stamp of a value that is kept with its graph, whose versions do not show all writes."""

    versions: Any  # the usual stamp
    # Each tensor whose version does not show all writes, with a copy of it.
    copies: list[tuple[Tensor, Tensor]]


@final
@dataclass(slots=True, eq=False)
class UndetectableStamp:
    """The stamp of a value that cannot be copied and whose changes cannot be detected."""

    kind: str  # the type of the object that holds its tensors


def is_unchanged(tensors: Sequence[Tensor], old_stamp: Any) -> bool:
    """Return whether a value is unchanged since it was stamped.

    Args:
        tensors: the innermost tensor of each tensor in the value.
        old_stamp: the stamp.
    """
    if old_stamp is None:
        return True
    if type(old_stamp) is int:  # a fast tap notes the bare version of a lone tensor
        return tensors[0]._version == old_stamp
    if isinstance(old_stamp, StampWithCopies):
        if not all(_are_equal(tensor.detach(), copy) for tensor, copy in old_stamp.copies):
            return False
        old_stamp = old_stamp.versions
    return bool(_versions(tensors) == old_stamp)


def _versions(tensors: Iterable[Tensor]) -> tuple[int | None, ...]:
    return tuple([None if tensor.is_inference() else tensor._version for tensor in tensors])


def _are_equal(tensor: Tensor, copy: Tensor) -> bool:
    tensor, copy = local_part(tensor), local_part(copy)
    if tensor.shape != copy.shape or tensor.dtype is not copy.dtype:
        return False
    if torch.equal(tensor, copy):
        return True
    return bool(torch.isclose(tensor, copy, rtol=0, atol=0, equal_nan=True).all())


@final
class PartialGradients:
    """The gradients of a value with several tensors, which arrive one by one.

    Args:
        form: the value's structure, with a numbered slot for each gradient.
    """

    __slots__ = ("__weakref__", "_form", "parts")

    def __init__(self, form: Any) -> None:
        self._form = form
        self.parts: dict[int, tuple[Any, Any]] = {}  # slot -> gradient, stamp

    def load(self) -> Any:
        """Return the structure with the gradients that have arrived, and None for the others."""
        return outlines.fill(self._form, {slot: part for slot, (part, _) in self.parts.items()})

    outline = load


class PassContents(NamedTuple):
    """The contents of a pass: its number, whether it failed, its entries in firing order."""

    number: int
    failed: bool | None
    entries: list[Entry]
    settings: Settings | None = None


@final
@dataclass(frozen=True)
class FolderContents:
    """The contents of a recording's folder, as plain data."""

    report: Report  # the line's report
    sites: tuple[Site, ...]  # the selected sites
    passes: list[PassContents]
    # The parts of values that could not be saved, as "site: description".
    lost: list[str] = field(default_factory=list)
    # The type name of each module of the model, by its path.
    modules: Mapping[str, str] = field(default_factory=dict)
    model: RecordedModel | None = None  # the identity of the model; None if it is not known
