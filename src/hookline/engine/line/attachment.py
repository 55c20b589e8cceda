"""Attachment: what a line has put somewhere, and has to take off when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hookline.engine.taps.base import Tap


class Attachment:
    """Hooks of one line in one place: on a model, on torch itself, in compiled code."""

    __slots__ = ()

    @property
    def has_hooks(self) -> bool:
        """Whether any is in place."""
        return False

    def end(self) -> None:
        """Take off all of them. Idempotent."""

    def drop(self, taps: Iterable[Tap]) -> None:
        """Take off those of some taps. Idempotent."""

    def note(self) -> str | None:
        """What a person should know of them at the end."""
        return None

    def why_silent(self) -> str | None:
        """Why a tap may not have fired that is in this place; None where that is told elsewhere."""
        return None


def surely(step: Callable[[], Any]) -> None:
    """Take an idempotent step; once more if it is interrupted, by Ctrl-C for one."""
    try:
        step()
    except BaseException:
        step()
        raise
