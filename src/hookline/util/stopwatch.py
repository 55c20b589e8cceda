"""A clock that stands still while hookline works: for the times of `hl.watch` and `hl.profile`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, final


@final
class Stopwatch(threading.local):
    """A clock that can be set back, separately in each thread.

        >>> seconds = iter([10.0, 14.0, 15.0])
        >>> stopwatch = Stopwatch(lambda: next(seconds))
        >>> stopped = stopwatch.read()
        >>> stopwatch.resume_from(stopped)  # four seconds later
        >>> stopwatch.read() - stopped
        1.0

    Args:
        clock: a function that returns seconds.

    Attributes:
        left_out: the seconds that were left out so far in this thread.
        readers: the ids of those who time a backward; of all threads.
    """

    readers: ClassVar[set[int]] = set()

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.left_out: float = 0.0

    def read(self) -> float:
        """Return the seconds so far, without the times that were left out."""
        return self._clock() - self.left_out

    def resume_from(self, reading: float) -> None:
        """Leave out the time since a reading."""
        self.left_out = self._clock() - reading

    def call_untimed(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, whose time is left out, and return its result."""
        reading = self.read()
        try:
            return function(*args)
        finally:
            self.resume_from(reading)


# All lines share one stopwatch: the hooks of one line belong to no other line's model times.
STOPWATCH = Stopwatch()


def is_caller(frame_id: int, frame: FrameType) -> bool:
    """Tell whether the frame with this id is among the callers of the given frame."""
    above = frame.f_back
    while above is not None and id(above) != frame_id:
        above = above.f_back
    return above is not None
