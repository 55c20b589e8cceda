"""Clocks that stand still while hookline works: wall time on a CPU, events on an accelerator.

A clock is read at each border between two modules, twice: when hookline's hook begins and when the
hook ends. The time between the two readings belongs to no module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableSequence
from typing import Any, Protocol, final

import torch

from hookline.util.stopwatch import STOPWATCH

# The number of intervals after which those that a device has finished are read.
_MANY = 4096


class Clock(Protocol):
    """The interface of a clock. A mark is a moment; what it is made of is the clock's affair.

    Attributes:
        overhead: the seconds for which the clock stood still for hookline, in this process.
        garbage: the seconds for which the clock stood still for Python's garbage collection.
    """

    overhead: float
    garbage: float

    def pause(self) -> Any:
        """Stop the clock and return the mark."""

    def resume(self) -> Any:
        """Let the clock go on and return the mark."""

    def add_time(self, costs: MutableSequence[float], slot: int, start: Any, end: Any) -> None:
        """Add the seconds between two marks to a cost, now or in `read_pending`."""

    def pause_for_gc(self) -> None:
        """Stop the clock: Python begins to collect garbage, at any point of any code."""

    def resume_after_gc(self) -> None:
        """Let the clock go on if it was running."""

    def read_pending(self) -> None:
        """Read all intervals that have not been read yet."""

    def seconds_at(self, mark: Any) -> float:
        """Return the seconds from the beginning to a mark; only after `read_pending`."""


@final
class WallClock:
    """Wall time of one thread.

    Processor time of the thread would miss the work of torch's other threads. Where a backward runs
    in another thread than its forward, the clock goes on there.
    """

    def __init__(self) -> None:
        self.overhead: float = 0.0
        self.garbage: float = 0.0
        self._collecting: tuple[float, float] | None = None
        self._thread = threading.get_ident()
        # The stopwatch leaves out another time in each thread; the shift makes up for that.
        self._shift = 0.0
        self._left_out = STOPWATCH.left_out
        self._reading = self._last = self._began = STOPWATCH.read()
        self._really = self._last + self._left_out

    def pause(self) -> float:
        """Stop the clock and return the mark."""
        reading, left_out = STOPWATCH.read(), STOPWATCH.left_out
        if threading.get_ident() != self._thread:
            self._thread = threading.get_ident()
            elapsed = reading + left_out - self._really
            self._shift = self._last + elapsed - reading
        else:
            self.overhead += left_out - self._left_out  # by other lines, since the last border
        self._left_out = left_out
        self._reading = reading
        return reading + self._shift

    def resume(self) -> float:
        """Let the clock go on and return the mark."""
        STOPWATCH.resume_from(self._reading)
        left_out = STOPWATCH.left_out
        self.overhead += left_out - self._left_out
        self._left_out = left_out
        self._really = self._reading + left_out
        self._last = self._reading + self._shift
        return self._last

    def add_time(self, costs: MutableSequence[float], slot: int, start: float, end: float) -> None:
        """Add the seconds between two marks to a cost."""
        costs[slot] += end - start

    def pause_for_gc(self) -> None:
        """Stop the stopwatch of this thread."""
        self._collecting = STOPWATCH.read(), STOPWATCH.left_out

    def resume_after_gc(self) -> None:
        """Let the stopwatch of this thread go on."""
        if self._collecting is not None:
            reading, left_out = self._collecting
            self._collecting = None
            STOPWATCH.resume_from(reading)
            seconds = STOPWATCH.left_out - left_out
            self.garbage += seconds
            if threading.get_ident() == self._thread:
                self._left_out += seconds  # or the next border takes it for work of other lines

    def read_pending(self) -> None:
        """Do nothing: each interval was read at once."""

    def seconds_at(self, mark: float) -> float:
        """Return the seconds from the beginning to a mark."""
        return mark - self._began


@final
class EventClock:
    """Time on a device, by events in its stream; nothing waits for the device before the end.

    Args:
        make: returns an event, with the methods of `torch.Event`.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.overhead: float = 0.0
        self.garbage: float = 0.0
        self._make = make
        # Costs, their place, the events around an interval, and whether it is left out.
        self._waiting: list[tuple[MutableSequence[float], int, Any, Any, bool]] = []
        self._collecting: tuple[Any, float] | None = None
        self._collected: list[tuple[Any, Any]] = []  # since the last border
        self._is_running = False
        self._host = 0.0
        self._reading = 0.0
        self._began = self._record_event()

    def _record_event(self) -> Any:
        event = self._make()
        event.record()
        return event

    def pause(self) -> Any:
        """Stop the clock and return the mark."""
        self._is_running = False
        self._host, self._reading = time.perf_counter(), STOPWATCH.read()
        return self._record_event()

    def resume(self) -> Any:
        """Let the clock go on and return the mark."""
        if len(self._waiting) >= _MANY and self._waiting[-1][3].query():
            self._read_intervals()
        mark = self._record_event()
        STOPWATCH.resume_from(self._reading)
        self.overhead += time.perf_counter() - self._host
        self._collected.clear()
        self._is_running = True
        return mark

    def add_time(self, costs: MutableSequence[float], slot: int, start: Any, end: Any) -> None:
        """Note the interval between two marks for a cost."""
        self._waiting.append((costs, slot, start, end, False))
        self._waiting += [(costs, slot, *events, True) for events in self._collected]
        self._collected.clear()

    def pause_for_gc(self) -> None:
        """Record an event: the device may wait for Python from now on."""
        self._collecting = self._record_event(), time.perf_counter()

    def resume_after_gc(self) -> None:
        """Record an event; the time between the two is no module's, if the clock was running."""
        if self._collecting is not None:
            event, began = self._collecting
            self._collecting = None
            self.garbage += time.perf_counter() - began
            if self._is_running:
                self._collected.append((event, self._record_event()))

    def read_pending(self) -> None:
        """Wait for the device and read all intervals."""
        if self._waiting:
            self._waiting[-1][3].synchronize()
            self._read_intervals()

    def _read_intervals(self) -> None:
        for costs, at, start, end, is_left_out in self._waiting:
            seconds = start.elapsed_time(end) / 1e3
            costs[at] += -seconds if is_left_out else seconds
        self._waiting.clear()

    def seconds_at(self, mark: Any) -> float:
        """Return the seconds from the beginning to a mark."""
        milliseconds: float = self._began.elapsed_time(mark)
        return milliseconds / 1e3


def clock_for(device: torch.device) -> Clock:
    """Return a clock for the work of a device."""
    if device.type in ("cpu", "meta"):
        return WallClock()
    return EventClock(lambda: torch.Event(device=device, enable_timing=True))
