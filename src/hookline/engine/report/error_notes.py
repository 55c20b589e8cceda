"""Add notes to errors of torch that the hooks of a line cause."""

from __future__ import annotations

from collections.abc import Iterable
from traceback import walk_tb

from hookline.engine.gradients.compiled_tap import add_compiled_backward_note
from hookline.engine.taps.base import Tap


def add_error_notes(name: str, taps: Iterable[Tap], error: Exception) -> None:
    """Say what a line has to do with an error of torch.

    Args:
        name: the verb.
        taps: the line's taps.
        error: what was raised in the line's block.
    """
    add_compiled_backward_note(taps, error)
    modules = (frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__))
    # The message quotes the source of the hook that cannot be scripted.
    if "torch.jit._recursive" in modules and "hookline" in str(error):
        error.add_note(
            f"hookline: torch.jit.script compiles the hooks on a model, too, and hl.{name} has put"
            " some there. Script the model outside of the block, and attach to the Python model."
        )
