"""Ending: how a line's hooks come off, also those of a line that nobody holds.

Imports compiled, everywhere, passes, placing, recompute, saved_taps.
"""

from __future__ import annotations

from hookline.engine.compiled import Compiled
from hookline.engine.everywhere import DISPATCHER, Catch
from hookline.engine.passes import Passes
from hookline.engine.placing import Placements
from hookline.engine.recompute import forget_checkpoints
from hookline.engine.saved_taps import SavedTap
from hookline.engine.taps import Tap
from hookline.errors import Place, warn_at


def take_off(placements: Placements, catch: Catch, taps: list[Tap]) -> None:
    """Take off all hooks of a line."""
    placements.take_off()
    if catch.groups:
        DISPATCHER.discard(catch)
    for tap in taps:
        if isinstance(tap, SavedTap):
            tap.release()


def dropped(
    name: str,
    made_at: Place,
    placements: Placements,
    catch: Catch,
    compiled: Compiled,
    taps: list[Tap],
    passes: Passes,
) -> None:
    """End a line that nobody holds any more; warn where it was made, if it had hooks."""
    had_hooks = placements.has_hooks or bool(catch.groups)
    take_off(placements, catch, taps)
    compiled.end()
    forget_checkpoints(passes)
    passes.leave()
    if had_hooks:
        warn_at(
            made_at,
            f"an hl.{name} line was dropped while its hooks were on; they are off now."
            f"\nUse it in a block, with hl.{name}(...): ..., or keep it and call its remove().",
        )
