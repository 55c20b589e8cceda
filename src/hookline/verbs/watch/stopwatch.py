"""Time the calls of modules, without the hooks of hookline.

The stopwatch stands still between the first and the last hook of hookline before a forward, and
between the first and the last after it. So nothing that hooks do is in the time of any module that
is under way, however deep, and an exception between two hooks leaves nothing to be put right.

What stays in the times: torch's own loop over the hooks, about 2 us a call, and what the model
takes longer because hooks have used the caches meanwhile. `Call.is_exact` says where that counts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, final

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import Order, Passes, Site
from hookline.engine.line.registration import Registrations
from hookline.engine.taps.base import HookSpec, Tap, is_inert, no_callback

# How much longer a call takes with hooks around it, at most, that is not left out: torch's loop,
# and the instructions and tables of Python that have left the caches (`benchmarks/watching.py`).
_SECONDS_A_CALL = 30e-6
_SHARE = 0.1


@final
class Stopwatch(threading.local):
    """A clock that can be set back, in each thread its own.

        >>> seconds = iter([10.0, 14.0, 15.0])
        >>> stopwatch = Stopwatch(lambda: next(seconds))
        >>> stopped = stopwatch.read()
        >>> stopwatch.go_on(stopped)  # four seconds later
        >>> stopwatch.read() - stopped
        1.0

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_out = 0.0

    def read(self) -> float:
        """Return the seconds so far, without those that were left out."""
        return self._clock() - self._left_out

    def go_on(self, reading: float) -> None:
        """Leave out the time since a reading."""
        self._left_out = self._clock() - reading


@final
class Call:
    """One call of a module that is under way.

    Args:
        key: the identity of the frame of the call; the frame is not kept alive.
        reading: the stopwatch's, where it stands still for the hooks of the call.

    Attributes:
        began: the reading when the forward began; None before.
        got: the structure of the inputs, as text.
        has_run: whether the forward has returned.
        seconds: how long the forward took; None while it runs, and where nobody can say.
        n_calls: how many calls of watched modules it has made, itself included.
        has_compiled: whether compiled code ran in it, which does more than the model alone.
        launches: whether a tensor of an accelerator came out of it, or out of a part of it.
    """

    __slots__ = (
        "began", "got", "has_compiled", "has_run", "key", "launches", "n_calls", "reading",
        "seconds",
    )  # fmt: skip

    def __init__(self, key: int, reading: float) -> None:
        self.key = key
        self.reading = reading
        self.began: float | None = None
        self.got = "?"
        self.has_run = False
        self.seconds: float | None = None
        self.n_calls = 1
        self.has_compiled = False
        self.launches = False

    @property
    def is_exact(self) -> bool:
        """Tell whether the time is within a tenth of a run without hooks; else it is a bound."""
        return self.seconds is not None and self.n_calls * _SECONDS_A_CALL <= _SHARE * self.seconds


@final
class Running(threading.local):
    """The calls of a line's modules that are under way in a thread, the outermost first."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def begin(self, frame: FrameType, reading: float) -> None:
        """Add a call, and drop those that ended with an exception."""
        calls = self.calls
        while calls and not _is_above(calls[-1].key, frame):
            calls.pop()
        for call in calls:
            call.n_calls += 1
        calls.append(Call(id(frame), reading))

    def find(self, frame: FrameType) -> Call | None:
        """Return the call with this frame, and drop those in it that ended with an exception."""
        calls, key = self.calls, id(frame)
        # From the end: a frame's identity is given again, and only to calls that come later.
        for number in range(len(calls) - 1, -1, -1):
            if calls[number].key == key:
                del calls[number + 1 :]
                return calls[number]
        return None


@final
class ClockTap(Tap):
    """Times the calls of a module: four hooks, around the other hooks of hookline.

    Args:
        passes: the passes of the line.
        running: the calls of the line's modules.
        stopwatch: shared by all lines, so that none counts the hooks of another.
    """

    __slots__ = ("running", "stopwatch")

    hooks: ClassVar = (
        HookSpec("forward_pre", "begin", Order.JOIN),
        HookSpec("forward_pre", "fire", Order.END),
        HookSpec("forward", "leave", Order.JOIN),
        HookSpec("forward", "end", Order.END),
    )

    def __init__(self, passes: Passes, running: Running, stopwatch: Stopwatch) -> None:
        super().__init__(Site(""), passes, no_callback, Order.RECORD)
        self.running = running
        self.stopwatch = stopwatch

    def begin(self, module: nn.Module, args: Any) -> None:
        """Stop the stopwatch: the first forward-pre hook."""
        if is_dynamo_compiling():
            return
        reading = 0.0 if is_inert(self) else self.stopwatch.read()
        if self._is_seen(module):
            self.running.begin(sys._getframe(1), reading)

    def fire(self, module: nn.Module, args: Any) -> None:
        """Start the stopwatch: the last forward-pre hook."""
        if is_dynamo_compiling() or not self._is_seen(module):
            return
        call = self.running.find(sys._getframe(1))
        if call is not None:
            call.began = call.reading
            self.stopwatch.go_on(call.reading)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop the stopwatch: the first forward hook."""
        if is_dynamo_compiling() or is_inert(self):
            return
        reading = self.stopwatch.read()
        call = self.running.find(sys._getframe(1)) if self._is_seen(module) else None
        if call is not None:
            call.reading, call.has_run = reading, True
            if call.began is not None and not call.has_compiled:
                call.seconds = reading - call.began

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Start the stopwatch: the last forward hook."""
        if is_dynamo_compiling() or is_inert(self):
            return
        call = self.running.find(sys._getframe(1))  # of the root the pass has ended by now
        if call is not None:
            self.running.calls.pop()
            self.stopwatch.go_on(call.reading)

    def _is_seen(self, module: nn.Module) -> bool:
        current = self._pass_of(module)
        if current is None:
            return False
        current.calls.get(self)  # compiled code that has run is to print now what it did
        return True


# One for all lines: the hooks of one are no part of the model for another either.
_STOPWATCH = Stopwatch()


def time_calls(
    module: nn.Module, placements: Registrations, passes: Passes, running: Running
) -> None:
    """Put the four hooks of a clock tap on a module."""
    placements.register_all(module, ClockTap(passes, running, _STOPWATCH))


def _is_above(key: int, frame: FrameType) -> bool:
    """Tell whether the frame with this id is a caller of the given one, at any distance."""
    above = frame.f_back
    while above is not None and id(above) != key:
        above = above.f_back
    return above is not None
