"""Time the calls of modules, without the hooks of hookline.

The stopwatch stands still between the first and the last hook of hookline before a forward, and
between the first and the last after it. So the time of hooks counts for no module, at any depth.
An exception between two hooks leaves no state to repair.

Two things stay in the times: torch's own loop over the hooks, about 2 us a call, and the time that
the model loses because hooks have used the caches meanwhile. `TimedCall.is_exact` tells whether
these matter.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import HookSpec, Order, Passes, Site, Tap, do_nothing, is_inert
from hookline.util.stopwatch import Stopwatch, is_caller

# The most that hooks add to the time of a call beyond what is left out: torch's loop, and the
# Python code and tables that have left the caches (`benchmarks/watching.py`).
_SECONDS_A_CALL = 30e-6
# A hook also reads the inputs of the next module into the caches, or pushes them out: they are
# then read from memory once less, or once more.
_BYTES_A_SECOND = 8e9
_SHARE = 0.1


@final
@dataclass(slots=True, eq=False)
class TimedCall:
    """A call of a module that is under way."""

    key: int  # the id of the frame of the call; the frame itself is not kept alive
    reading: float  # the stopwatch's reading at which it stands still for the hooks of the call
    began: float | None = None  # the reading at which the forward began; None before
    inputs: str = "?"  # the structure of the inputs, as text
    has_run: bool = False  # whether the forward has returned
    # The duration of the forward; None while it runs, and if compiled code ran in it.
    seconds: float | None = None
    n_calls: int = 1  # the number of calls of watched modules in it, itself included
    n_bytes: int = 0  # the size of its inputs
    # Whether compiled code ran in it, which does more than the model alone.
    has_compiled: bool = False
    launches: bool = False  # whether it, or a module inside it, returned a tensor on an accelerator

    @property
    def is_exact(self) -> bool:
        """Tell whether hooks can have changed the time by at most a tenth."""
        if self.seconds is None:
            return False
        changed = self.n_calls * _SECONDS_A_CALL + self.n_bytes / _BYTES_A_SECOND
        return changed <= _SHARE * self.seconds


@final
class RunningCalls(threading.local):
    """The calls of a line's modules that are under way in a thread, outermost first."""

    def __init__(self) -> None:
        self.calls: list[TimedCall] = []

    def begin_call(self, frame: FrameType, reading: float) -> None:
        """Add a call, and drop those that ended with an exception."""
        calls = self.calls
        while calls and not is_caller(calls[-1].key, frame):
            calls.pop()
        for call in calls:
            call.n_calls += 1
        calls.append(TimedCall(id(frame), reading))

    def find_call(self, frame: FrameType) -> TimedCall | None:
        """Return the call with this frame, and drop the inner calls that ended by an exception."""
        calls, key = self.calls, id(frame)
        # From the end, because Python reuses the id of a frame, and only for later calls.
        for number in range(len(calls) - 1, -1, -1):
            if calls[number].key == key:
                del calls[number + 1 :]
                return calls[number]
        return None


@final
class ClockTap(Tap):
    """Time the calls of a module, with four hooks around the other hooks of hookline.

    All lines share the stopwatch, so that no line counts the hooks of another.
    """

    __slots__ = ("running", "stopwatch")

    hooks: tuple[HookSpec, HookSpec, HookSpec, HookSpec] = (
        HookSpec("forward_pre", "begin", Order.JOIN),
        HookSpec("forward_pre", "fire", Order.END),
        HookSpec("forward", "leave", Order.JOIN),
        HookSpec("forward", "end", Order.END),
    )

    def __init__(self, passes: Passes, running: RunningCalls, stopwatch: Stopwatch) -> None:
        super().__init__(Site(""), passes, do_nothing, Order.RECORD)
        self.takes_blocks = True  # the clock looks at no value
        self.running: RunningCalls = running
        self.stopwatch: Stopwatch = stopwatch

    def begin(self, module: nn.Module, args: Any) -> None:
        """Stop the stopwatch: the first forward-pre hook."""
        if is_dynamo_compiling():
            return
        reading = 0.0 if is_inert(self) else self.stopwatch.read()
        if self._is_in_pass(module):
            self.running.begin_call(sys._getframe(1), reading)

    def fire(self, module: nn.Module, args: Any) -> None:
        """Start the stopwatch: the last forward-pre hook."""
        if is_dynamo_compiling() or not self._is_in_pass(module):
            return
        call = self.running.find_call(sys._getframe(1))
        if call is not None:
            call.began = call.reading
            self.stopwatch.resume_from(call.reading)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop the stopwatch: the first forward hook."""
        if is_dynamo_compiling() or is_inert(self):
            return
        reading = self.stopwatch.read()
        call = self.running.find_call(sys._getframe(1)) if self._is_in_pass(module) else None
        if call is not None:
            call.reading, call.has_run = reading, True
            if call.began is not None and not call.has_compiled:
                call.seconds = reading - call.began

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Start the stopwatch: the last forward hook."""
        if is_dynamo_compiling() or is_inert(self):
            return
        call = self.running.find_call(sys._getframe(1))  # at the root, the pass has ended already
        if call is not None:
            self.running.calls.pop()
            self.stopwatch.resume_from(call.reading)

    def _is_in_pass(self, module: nn.Module) -> bool:
        current = self._pass_of(module)
        if current is None:
            return False
        current.calls.get(self)  # makes compiled code that has run print its values now
        return True
