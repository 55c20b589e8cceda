"""Every error and warning that hookline raises.

A message names the argument or site, says what was expected, and ends with the fix. Each kind of
mistake has its own class, so a caller can catch one kind alone. Each class also derives from the
built-in error that Python programmers would catch.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple


class HooklineError(Exception):
    """The base class of all hookline errors: `except hl.HooklineError` catches them all."""


class SelectionError(HooklineError, LookupError):
    """A selector is malformed or matches nothing in this model."""


class SiteError(HooklineError, LookupError):
    """A leaf that was asked for does not exist in the value at its site."""


class NotRecordedError(HooklineError, KeyError):
    """A recording has no value for this site: it was not selected, or it never fired."""

    __str__ = Exception.__str__  # KeyError would show the message quoted, on one line


class AmbiguousError(HooklineError, LookupError):
    """A look-up matches several calls or several passes."""


class OverwrittenError(HooklineError, RuntimeError):
    """A recorded tensor was changed in place after it was recorded."""


class StructureError(HooklineError, TypeError):
    """A value does not have the structure, shape, dtype or device that its use requires."""


class AttachError(HooklineError, RuntimeError):
    """A hook cannot be attached to this object or in this way."""


class FolderError(HooklineError, OSError):
    """A folder cannot be written, or does not hold a readable recording."""


class RanksError(HooklineError, RuntimeError):
    """The ranks of a distributed job disagree, or a rank is missing from a collective."""


class ModelError(HooklineError, ValueError):
    """A model cannot be found, built or loaded from its name."""


class InputError(HooklineError, ValueError):
    """An input cannot be read or does not fit the model."""


class NonFiniteError(HooklineError, FloatingPointError):
    """A model has made a NaN or an infinity.

    Attributes:
        finding: who made it: `print(error.finding)` says all that is known (`hl.check`).
    """

    def __init__(self, message: str, finding: Any) -> None:
        super().__init__(message)
        self.finding = finding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.finding)


class HooklineWarning(UserWarning):
    """A probable mistake. The model's outputs and gradients are still its own."""


class Place(NamedTuple):
    """A line of a user's source."""

    filename: str
    lineno: int
    module: str


def caller() -> Place:
    """Return the nearest line up the stack that is outside hookline."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hookline."):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "?"))


def warn(message: str) -> None:
    """Emit a HooklineWarning at the nearest line up the stack that is outside hookline."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hookline."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, HooklineWarning, stacklevel=level)


def warn_at(place: Place, message: str) -> None:
    """Emit a HooklineWarning at a line that has already left the stack."""
    warnings.warn_explicit(message, HooklineWarning, place.filename, place.lineno, place.module)
