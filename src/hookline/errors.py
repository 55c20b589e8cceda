"""Every error and warning that hookline raises.

A message names the thing, says what was expected, and ends with what to do. One class for each kind
of mistake, so that a caller can catch one without catching the others; each also is the built-in
error that Python programmers would reach for.
"""

from __future__ import annotations

import sys
import warnings
from typing import NamedTuple


class HooklineError(Exception):
    """The base of all hookline errors: `except hl.HooklineError` catches them all."""


class SelectionError(HooklineError, LookupError):
    """A selector is malformed, or matches nothing in this model."""


class SiteError(HooklineError, LookupError):
    """A site exists, but the leaf that was asked for does not, in the value that flowed there."""


class NotRecordedError(HooklineError, KeyError):
    """A recording has no value for this site: it was never selected, or it never fired."""

    __str__ = Exception.__str__  # KeyError would show the message quoted, on one line


class AmbiguousError(HooklineError, LookupError):
    """A look-up has several answers: several calls, or several passes."""


class OverwrittenError(HooklineError, RuntimeError):
    """A recorded tensor was changed in place after it was recorded."""


class StructureError(HooklineError, TypeError):
    """A value has another structure, or another shape, than is needed where it is used."""


class AttachError(HooklineError, RuntimeError):
    """Hooks cannot be attached here, or in this way."""


class FolderError(HooklineError, OSError):
    """A recording's folder cannot be written, or what is there is not a recording."""


class RanksError(HooklineError, RuntimeError):
    """The processes of a distributed job do not agree, or one of them did not come."""


class ModelError(HooklineError, ValueError):
    """A model cannot be found, built or loaded from the name that was given."""


class InputError(HooklineError, ValueError):
    """An input cannot be read, or does not fit the model."""


class HooklineWarning(UserWarning):
    """Something is probably not what you meant; the numbers are still the model's own."""


class Place(NamedTuple):
    """A line of a user's source."""

    filename: str
    lineno: int
    module: str


def caller() -> Place:
    """The first line up the stack that is not hookline's own."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hookline."):
        frame = frame.f_back
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "?"))


def warn(message: str) -> None:
    """Warn, at the first line up the stack that is not hookline's own."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("hookline."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, HooklineWarning, stacklevel=level)


def warn_at(place: Place, message: str) -> None:
    """Warn, at a line that is not on the stack any more."""
    warnings.warn_explicit(message, HooklineWarning, place.filename, place.lineno, place.module)
