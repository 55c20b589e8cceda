"""The plain data of a recording: entries, partial gradients, contents of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.engine import Report, Site
from hookline.engine.model_fingerprint import RecordedModel
from hookline.engine.pytree import outlines
from hookline.engine.run_settings import Settings


class Entry(NamedTuple):
    """One value of one pass.

    During recording, taps append plain tuples of the first fields, which are cheaper.

    Args:
        site: the index of the site.
        value: the value, a `Stored` value in a folder, or `PartialGradients`.
        stamp: the version stamp by which `detect_overwrites.py` sees later changes. A
            lone tensor that is not copied has its bare version. None for one that cannot change.
        call: for a gradient, the call of the value that it belongs to. Other entries of a site
            are numbered in order.
        backward: for a gradient, the autograd run that produced it; None if there was none.
        weight: for a parameter's gradient, the norm of the parameter at that moment.
    """

    site: int
    value: Any
    stamp: Any = None
    call: int | None = None
    backward: int | None = None
    weight: Tensor | float | None = None


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
class Contents:
    """The contents of a recording's folder, as plain data.

    Args:
        report: the line's report.
        sites: the selected sites.
        passes: the passes.
        lost: the parts of values that could not be saved, as "site: description".
        modules: the type name of each module of the model, by its path.
        model: the identity of the model; None if it is not known.
    """

    report: Report
    sites: tuple[Site, ...]
    passes: list[PassContents]
    lost: list[str] = field(default_factory=list)
    modules: Mapping[str, str] = field(default_factory=dict)
    model: RecordedModel | None = None
