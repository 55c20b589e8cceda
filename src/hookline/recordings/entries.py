"""The values of a recording, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.engine import Report, Site
from hookline.engine.pytree import outlines


class Entry(NamedTuple):
    """One value of one pass. While recording, plain tuples of the first fields are noted instead.

    Args:
        site: its number among the sites.
        value: the value, or where it is stored, or what has been gathered of it.
        stamp: what tells whether it has changed since (`stamps.py`); the bare version of a lone
            tensor that is kept as it is; None where that cannot change.
        call: of a gradient, the call that its value flowed in. Others follow one another.
        backward: of a gradient, which run of autograd brought it; None if none was to come.
        weight: of a parameter's gradient, the norm of the parameter at that moment.
    """

    site: int
    value: Any
    stamp: Any = None
    call: int | None = None
    backward: int | None = None
    weight: Tensor | float | None = None


@final
class PartialGradients:
    """The gradient of a value that holds several tensors, which arrive one after the other.

    Args:
        form: the value's structure, with numbered slots where gradients may arrive.
    """

    __slots__ = ("__weakref__", "_form", "parts")

    def __init__(self, form: Any) -> None:
        self._form = form
        self.parts: dict[int, tuple[Any, Any]] = {}  # each with its stamp

    def load(self) -> Any:
        """The structure with what has arrived; None where nothing has."""
        return outlines.fill(self._form, {slot: part for slot, (part, _) in self.parts.items()})

    outline = load


@final
@dataclass(frozen=True)
class Contents:
    """What a folder holds, as plain data.

    Args:
        report: what the line did.
        sites: the sites that were selected.
        passes: for each pass its number, whether it failed, and its entries in firing order.
        lost: the parts of values that could not be saved, as "site: what".
        modules: every module of the model: path and type.
    """

    report: Report
    sites: tuple[Site, ...]
    passes: list[tuple[int, bool | None, list[Entry]]]
    lost: list[str] = field(default_factory=list)
    modules: tuple[tuple[str, str], ...] = ()
