"""Attachments: the hooks that a line has put in place, and their removal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, final

from hookline.engine.taps.base import Tap


class Attachment:
    """Hooks of one line in one place: on a model, on torch itself, in compiled code."""

    __slots__ = ()
    # A note for the report at the end.
    note: str | None = None

    @property
    def has_hooks(self) -> bool:
        """Tell whether any hook is in place."""
        return False

    def end(self) -> None:
        """Remove all hooks. Idempotent."""

    def drop_taps(self, taps: Iterable[Tap]) -> None:
        """Remove the hooks of some taps. Idempotent."""

    def why_silent(self) -> str | None:
        """Say why a tap of this attachment may not have fired; None without a reason."""
        return None


@final
class AtEnd(Attachment):
    """A function to call at the end of a line, perhaps more than once."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def end(self) -> None:
        """Call the function."""
        self._function()


def retry_interrupted(step: Callable[[], Any]) -> None:
    """Run an idempotent step; run it again if it is interrupted, for example by Ctrl-C."""
    try:
        step()
    except BaseException:
        step()
        raise
