"""Every error and warning that hookline raises.

A message names the argument or site, says what was expected, and ends with the fix. Each kind of
mistake has its own class, so a caller can catch one kind alone. Each class also derives from the
built-in error that Python programmers would catch.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, NamedTuple

from hookline.display.text import escape_invisible
from hookline.util.arguments_elsewhere import advice_for_argument


class HooklineError(Exception):
    """The base class of all hookline errors: `except hl.HooklineError` catches them all."""

    def __str__(self) -> str:
        """Return the message, with names that move no cursor; KeyError would show it quoted."""
        return escape_invisible(Exception.__str__(self))


class SelectionError(HooklineError, LookupError):
    """A selector is malformed or matches nothing in this model."""


class SiteError(HooklineError, LookupError):
    """A value lacks the part that a selector names, or holds a tensor that cannot be copied.

    A part is one item of a nested value, such as `[0]` in `lstm:output[0]`.
    """


class NotRecordedError(HooklineError, KeyError):
    """A value was not recorded: it was not selected, or its hook was never called."""


class AmbiguousError(HooklineError, LookupError):
    """A name matches several calls, runs of the model or backwards, where one is needed."""


class OverwrittenError(HooklineError, RuntimeError):
    """A recorded tensor was changed in place after it was recorded."""


class StructureError(HooklineError, ValueError):
    """A value does not have the structure, shape, dtype or device that its use requires."""

    # No TypeError: Python takes one in `x + y` for an unsupported operand, and hides it.


class AttachError(HooklineError, RuntimeError):
    """A hook cannot be attached to this object or in this way, or an argument is invalid."""


class FolderError(HooklineError, OSError):
    """A folder or file cannot be written, or holds no readable recording, store or curves."""


class RanksError(HooklineError, RuntimeError):
    """Ranks of a distributed job disagree, a rank is missing, or there is no process group."""


class ModelError(HooklineError, ValueError):
    """A model cannot be found, built or loaded from its name."""


class InputError(HooklineError, ValueError):
    """An input or argument cannot be read, or does not fit the model or the values."""


class NonFiniteError(HooklineError, FloatingPointError):
    """A NaN or an infinity was found in a model by `hl.check`.

    Attributes:
        finding: the `hl.CheckFinding` that says where the value was made. `print(error.finding)`
            prints the operation, the line of code, the module and the likely cause, if known.
    """

    def __init__(self, message: str, finding: Any) -> None:
        super().__init__(message)
        self.finding = finding

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.finding)


def check_one_of(
    name: str, got: Any, allowed: Collection[Any], fix: str, error: type[Exception] = InputError
) -> None:
    """Refuse an argument that is not one of a few values.

    >>> check_one_of("order", "size", ("difference", "index"), "Write order='index'.")
    Traceback (most recent call last):
    hookline.errors.InputError: order must be 'difference' or 'index', got 'size'.
    Write order='index'.
    """
    if got not in allowed:
        texts = list(map(repr, allowed))
        wanted = " or ".join(texts) if len(texts) < 3 else f"one of {', '.join(texts)}"
        raise error(f"{name} must be {wanted}, got {got!r}.\n{fix}")


def check_positive_int(name: str, got: Any, fix: str, error: type[Exception] = InputError) -> None:
    """Refuse an argument that is not a positive integer."""
    if isinstance(got, bool) or not isinstance(got, int) or got < 1:
        raise error(f"{name} must be a positive integer, got {got!r}.\n{fix}")


def check_int_from_zero(name: str, got: Any, fix: str) -> None:
    """Refuse an argument that is not an integer from 0 on."""
    if isinstance(got, bool) or not isinstance(got, int) or got < 0:
        raise InputError(f"{name} must be an integer from 0 on, got {got!r}.\n{fix}")


def check_option_names(
    verb: Callable[..., Any], options: Collection[str], allowed: Collection[str] = ()
) -> None:
    """Refuse keyword arguments that are no options of a verb.

    >>> def sweep(model, *, each=None, **options):
    ...     check_option_names(sweep, options, ("rows", "to"))
    >>> sweep(None, row=4)
    Traceback (most recent call last):
    TypeError: hl.sweep() got an unexpected keyword argument 'row'. Did you mean rows=?
    Give some of each=, rows=, to=.
    """
    for name in options:
        if name not in allowed:
            parameters = inspect.signature(verb).parameters
            own = [value.name for value in parameters.values() if value.kind is value.KEYWORD_ONLY]
            names = [*own, *allowed]
            close = difflib.get_close_matches(name, names, 1)
            advice = advice_for_argument(name, {*parameters, *allowed})
            if not advice and close:
                advice = f"Did you mean {close[0]}=?"
            sentences = [f"hl.{verb.__name__}() got an unexpected keyword argument {name!r}."]
            sentences += [advice] * bool(advice)
            ending = f"\nGive some of {', '.join(f'{option}=' for option in names)}."
            raise TypeError(" ".join(sentences) + ending * bool(names))


class HooklineWarning(UserWarning):
    """A probable mistake, or something that hookline left out, which raises no error."""


def _is_internal(frame: FrameType) -> bool:
    """Tell whether a frame is of hookline, or of torch, which calls hookline's hooks."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(("hookline.", "torch."))


class UserLine(NamedTuple):
    """A line of a user's source."""

    filename: str
    lineno: int
    module: str


def user_line() -> UserLine:
    """Return the nearest line up the stack that is outside hookline and torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_internal(frame):
        frame = frame.f_back
    return UserLine(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "?"))


def warn(message: str) -> None:
    """Emit a HooklineWarning at the nearest line up the stack outside hookline and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _is_internal(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(escape_invisible(message), HooklineWarning, stacklevel=level)


def warn_at(line: UserLine, message: str) -> None:
    """Emit a HooklineWarning at a line that has already left the stack."""
    text = escape_invisible(message)
    warnings.warn_explicit(text, HooklineWarning, line.filename, line.lineno, line.module)
