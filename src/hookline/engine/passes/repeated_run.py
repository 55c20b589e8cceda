"""Run a model a second time, so that the lines on it take the run for a recomputation.

Lines that read values see nothing of it. Lines that change values make the same changes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from hookline.engine.passes.passes import Pass, Passes, passes_of_context, substitute_passes


@final
class RepeatedRun:
    """The recomputation that stands for a repeated run of one line's model.

    It has the interface of `checkpointing.Recomputation` that passes and taps use.

    Args:
        number: the number of the pass that is repeated.

    Attributes:
        current: the pass that hooks of the repeated run belong to.
    """

    __slots__ = ("current",)
    has_gradients = False
    is_repetition = True

    def __init__(self, number: int) -> None:
        self.current: Pass = Pass(number)
        self.current.recomputation = self

    def pass_of_root(self) -> Pass:
        """Return the pass of the repeated run of the root."""
        return self.current

    def gradient_pass(self) -> Pass:
        """Return the pass that gradients of the repeated run belong to."""
        return self.current

    def first_run_hooks(self, tap: Any, call: int) -> None:
        """Return the tensors of a call that got hooks in a region's first run: none."""


@contextmanager
def treat_runs_as_recomputation(repeating: Passes) -> Iterator[None]:
    """Let the lines of this context take the runs in the block for recomputations.

    Another line that sees every thread takes them for new passes.

    Args:
        repeating: the passes of the line that repeats the run; it may see every thread.
    """
    passes_now = {}
    for local in (passes.in_thread for passes in (repeating, *passes_of_context())):
        number = -1 if local.running is None else local.running.number
        passes_now[local] = RepeatedRun(number).current
    with substitute_passes(passes_now):
        yield
