"""How a line's hooks come off, also those of a line that nobody holds."""

from __future__ import annotations

from hookline.engine.line.attachment import Attachment
from hookline.engine.passes.checkpointing import forget_checkpoints
from hookline.engine.passes.passes import Passes
from hookline.engine.taps.base import Tap
from hookline.errors import Place, warn_at


def take_off(attached: list[Attachment], taps: list[Tap], passes: Passes) -> None:
    """Take off all hooks of a line. Idempotent."""
    for attachment in attached:
        attachment.end()
    for tap in taps:
        tap.release()
    forget_checkpoints(passes)


def dropped(
    name: str, made_at: Place, attached: list[Attachment], taps: list[Tap], passes: Passes
) -> None:
    """End a line that nobody holds any more; warn where it was made, if it had hooks."""
    had_hooks = any(attachment.has_hooks for attachment in attached)
    take_off(attached, taps, passes)
    passes.leave()
    if had_hooks:
        warn_at(
            made_at,
            f"an hl.{name} line was dropped while its hooks were on; they are off now."
            f"\nUse it in a block, with hl.{name}(...): ..., or keep it and call its remove().",
        )
