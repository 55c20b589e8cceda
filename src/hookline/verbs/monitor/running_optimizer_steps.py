"""The steps of optimizers that run, of which some run inside others."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import final

from hookline.engine import RunningCalls


@final
class RunningSteps(threading.local):
    """The steps of optimizers that run in a thread, outermost first.

    An optimizer may step another one inside its own step: SAM and Lookahead do, and a class whose
    step calls that of its base class. Only the outermost step of a parameter counts, since it is
    the whole change.
    """

    def __init__(self) -> None:
        self._calls = RunningCalls()
        # The ids of the parameters of each, and whether it counts.
        self._entries: list[tuple[frozenset[int], bool]] = []

    def begins_counted_step(
        self, frame: FrameType, held: frozenset[int], *, is_skipped: bool
    ) -> bool:
        """Note a step that begins, and tell whether it counts.

        Args:
            frame: the frame that calls the hooks of the step.
            held: the ids of the optimizer's parameters.
            is_skipped: whether the optimizer will change nothing.
        """
        self._calls.drop_ended(frame.f_back)  # torch calls no hook after a step that raises
        del self._entries[len(self._calls) :]
        counts = not is_skipped and not any(held <= outer for outer, _ in self._entries)
        self._calls.begin(frame)
        self._entries.append((held, counts))
        return counts

    def ends_counted_step(self, frame: FrameType) -> bool:
        """Note a step that has ended, and tell whether it counts."""
        self._calls.end(frame)
        ended = self._entries[len(self._calls) :]
        del self._entries[len(self._calls) :]
        return not ended or ended[0][1]


def frame_outside_hookline() -> FrameType:
    """Return the frame of the caller that is next outside hookline: torch's, in a hook."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("hookline."):
        frame = frame.f_back
    return frame
