"""Attachments: the hooks that a line has put in place, and their removal.

A line that nobody references any more is ended here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hookline.engine.passes.checkpointing import forget_checkpoints
from hookline.engine.passes.passes import Passes
from hookline.engine.taps.base import Tap
from hookline.errors import Place, warn_at


class Attachment:
    """Hooks of one line in one place: on a model, on torch itself, in compiled code."""

    __slots__ = ()

    @property
    def has_hooks(self) -> bool:
        """Tell whether any hook is in place."""
        return False

    def end(self) -> None:
        """Remove all hooks. Idempotent."""

    def drop(self, taps: Iterable[Tap]) -> None:
        """Remove the hooks of some taps. Idempotent."""

    def note(self) -> str | None:
        """Return a note for the report at the end; None without a note."""
        return None

    def why_silent(self) -> str | None:
        """Say why a tap of this attachment may not have fired; None without a reason."""
        return None


def surely(step: Callable[[], Any]) -> None:
    """Run an idempotent step; run it again if it is interrupted, for example by Ctrl-C."""
    try:
        step()
    except BaseException:
        step()
        raise


def remove_all(attached: list[Attachment], taps: list[Tap], passes: Passes) -> None:
    """Remove all hooks of a line. Idempotent."""
    for attachment in attached:
        attachment.end()
    for tap in taps:
        tap.release()
    forget_checkpoints(passes)


def dropped(
    name: str, made_at: Place, attached: list[Attachment], taps: list[Tap], passes: Passes
) -> None:
    """End a line that nobody references; warn at the place that made the line, if it had hooks."""
    had_hooks = any(attachment.has_hooks for attachment in attached)
    remove_all(attached, taps, passes)
    passes.leave()
    if had_hooks:
        warn_at(
            made_at,
            f"an hl.{name} line was dropped while its hooks were on; they are off now."
            f"\nUse it in a block, with hl.{name}(...): ..., or keep it and call its remove().",
        )
