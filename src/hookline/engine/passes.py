"""Passes: which run of the root model a value belongs to. Imports only the standard library.

A pass begins when the root model is called and ends when it returns; everything hooked in between,
in the same thread, belongs to it. What runs outside a run of the root (a submodule called by hand)
is gathered in a pass of its own, which lasts until the root runs next.

A line that was entered with `with` sees only its own context: its thread, its async task. A line
that was not entered sees every thread, each thread's passes apart.
"""

from __future__ import annotations

import itertools
import sys
import threading
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol, final

# The passes of the lines entered in this context. A tuple, since contexts share it.
_entered: ContextVar[tuple[Passes, ...]] = ContextVar("hookline_entered", default=())


@final
class Pass:
    """One run of the root model.

    Args:
        number: counts from 0 for each line.

    Attributes:
        log: what the line's hooks chose to note, in the order in which they fired.
        note: adds to the log.
        calls: how often each of the line's taps that counts calls has run.
        failed: whether the run ended by an exception; None while it runs.
    """

    __slots__ = ("calls", "depth", "failed", "frame", "handled", "log", "note", "number")

    def __init__(self, number: int, frame: FrameType | None = None) -> None:
        self.number = number
        self.log: list[Any] = []
        self.note = self.log.append
        self.calls: dict[Any, int] = {}
        self.failed: bool | None = None
        self.depth = 0
        self.frame = frame
        self.handled = sys.exception()

    def is_running(self) -> bool:
        """Whether the call that began this pass is still on the stack.

        After a KeyboardInterrupt torch tells no hook that the root has ended: ask the stack.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is self.frame:
                return True
            frame = frame.f_back
        return False


class Sink(Protocol):
    """Where values go as they are seen: `Pass.log` fills between these two calls."""

    def begin_pass(self, current: Pass) -> None:
        """A pass begins."""

    def end_pass(self, current: Pass) -> None:
        """A pass has ended, normally or (`failed`) not."""


class _Lane(threading.local):
    """What each thread knows: the pass that runs in it, and the one for calls outside the root."""

    current: Pass | None = None
    outside: Pass | None = None


@final
class Passes:
    """The passes of one line; a tap on the root calls `begin` and `end`."""

    __slots__ = ("_numbers", "bound", "closed", "elsewhere", "failed", "lane", "sink", "started")

    def __init__(self, sink: Sink | None = None) -> None:
        self.lane = _Lane()
        self.sink = sink
        self.bound = False
        self.closed = False
        self.started = 0
        self.elsewhere = 0
        self.failed = 0
        self._numbers = itertools.count()

    def enter(self) -> None:
        """Belong to the present context from now on, and to no other."""
        self.bound = True
        _entered.set((*_entered.get(), self))

    def leave(self) -> None:
        """The line has ended: nothing that fires from now on is seen."""
        # Not ContextVar.reset: a line may be closed in another context than it was entered in.
        _entered.set(tuple(passes for passes in _entered.get() if passes is not self))
        self.closed = True
        self._close_outside()
        self.lane = _Lane()

    def is_here(self) -> bool:
        """Whether what runs now, in this thread and context, is the line's to see."""
        return not self.closed and (not self.bound or self in _entered.get())

    def begin(self, module: Any, args: Any) -> None:
        """The root is about to run. Only to be called by the tap on the root."""
        if not self.is_here():
            self.elsewhere += not self.closed
            return
        lane = self.lane
        current = lane.current
        if current is not None:
            if current.is_running():
                current.depth += 1
                return
            self._finish(current, failed=True)
        self._close_outside()
        # The frame that calls the hooks: above it are the root's own tap and this function.
        lane.current = self._start(sys._getframe(2))

    def end(self, module: Any, args: Any, output: Any) -> None:
        """The root has run, or failed."""
        current = self.lane.current
        if current is None or not self.is_here():
            return
        if current.depth:
            current.depth -= 1
            return
        self.lane.current = None
        error = sys.exception()
        self._finish(current, failed=error is not None and error is not current.handled)

    def stop(self) -> None:
        """The pass in this thread was ended on purpose, half-way."""
        current = self.lane.current
        if current is not None:
            self.lane.current = None
            self._finish(current, failed=False)

    def outside(self) -> Pass | None:
        """The pass for a hook that fires while the root does not run; None if not ours to see."""
        if not self.is_here():
            self.elsewhere += not self.closed
            return None
        lane = self.lane
        if lane.outside is None:
            lane.outside = self._start(None)
        return lane.outside

    def _start(self, frame: FrameType | None) -> Pass:
        current = Pass(next(self._numbers), frame)
        self.started += 1
        if self.sink is not None:
            self.sink.begin_pass(current)
        return current

    def _finish(self, current: Pass, *, failed: bool) -> None:
        current.failed = failed
        self.failed += failed
        current.frame = current.handled = None
        if self.sink is not None:
            self.sink.end_pass(current)

    def _close_outside(self) -> None:
        lane = self.lane
        if lane.current is not None and self.closed:
            # Ended inside the forward: no failure. Not on the stack any more: it was interrupted.
            self._finish(lane.current, failed=not lane.current.is_running())
        if lane.outside is not None:
            outside, lane.outside = lane.outside, None
            self._finish(outside, failed=False)
