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
        roots: the frames of the root's calls that are under way: several where it calls itself.
    """

    __slots__ = ("calls", "failed", "handled", "log", "note", "number", "roots")

    def __init__(self, number: int) -> None:
        self.number = number
        self.log: list[Any] = []
        self.note = self.log.append
        self.calls: dict[Any, int] = {}
        self.failed: bool | None = None
        self.roots: list[FrameType] = []
        self.handled = sys.exception()

    def drop_dead_roots(self) -> None:
        """Forget calls of the root that are no longer on this thread's stack.

        After a BaseException, such as Ctrl-C, torch tells no hook that the root has ended.
        """
        alive = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            alive.add(id(frame))
            frame = frame.f_back
        while self.roots and id(self.roots[-1]) not in alive:
            self.roots.pop()


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

    __slots__ = (
        "_numbers", "_open", "bound", "closed", "elsewhere", "failed", "lane", "sink", "started",
    )  # fmt: skip

    def __init__(self, sink: Sink | None = None) -> None:
        self.lane = _Lane()
        self.sink = sink
        self.bound = False
        self.closed = False
        self.started = 0
        self.elsewhere = 0
        self.failed = 0
        self._numbers = itertools.count()
        self._open: dict[int, Pass] = {}

    def enter(self) -> None:
        """Belong to the present context from now on, and to no other."""
        self.bound = True
        _entered.set((*_still_open(), self))

    def leave(self) -> None:
        """The line has ended: nothing that fires from now on is seen."""
        self.closed = True
        # Not ContextVar.reset: a line may be closed in another context than it was entered in.
        _entered.set(_still_open())
        mine = self.lane.current
        if mine is not None:
            # Ended inside the forward: no failure. Not on the stack any more: it was interrupted.
            mine.drop_dead_roots()
            self._finish(mine, failed=not mine.roots)
        for current in list(self._open.values()):  # those of other threads too
            self._finish(current, failed=False)
        self.lane, self.sink = _Lane(), None

    def is_here(self) -> bool:
        """Whether what runs now, in this thread and context, is the line's to see."""
        return not self.closed and (not self.bound or self in _entered.get())

    def begin(self) -> None:
        """The root is about to run. Only to be called by the tap on the root."""
        if not self.is_here():
            self.elsewhere += not self.closed
            return
        lane = self.lane
        current = lane.current
        if current is not None:
            current.drop_dead_roots()
            if not current.roots:
                self._finish(current, failed=True)
                current = None
        if lane.outside is not None:
            outside, lane.outside = lane.outside, None
            self._finish(outside, failed=False)
        if current is None:
            current = lane.current = self._start()
        # Above this frame: the tap's, then torch's function that calls the hooks, then the call.
        current.roots.append(_call_frame(sys._getframe(2)))

    def end(self) -> None:
        """The root has run, or failed. Only to be called by the tap on the root."""
        current = self.lane.current
        if current is None or not self.is_here():
            return
        frame = _call_frame(sys._getframe(2))
        while current.roots and current.roots.pop() is not frame:
            pass
        if not current.roots:
            self.lane.current = None
            error = sys.exception()
            self._finish(current, failed=error is not None and error is not current.handled)

    def stop(self) -> None:
        """The forward in this thread was left half-way, on purpose: passes that ended by it did."""
        current = self.lane.current
        if current is not None:
            current.drop_dead_roots()
            if not current.roots:
                self.lane.current = None
                self._finish(current, failed=False)

    def outside(self) -> Pass | None:
        """The pass for a hook that fires while the root does not run; None if not ours to see."""
        if not self.is_here():
            if not self.closed:
                self.elsewhere = max(self.elsewhere, 1)
            return None
        lane = self.lane
        if lane.outside is None:
            lane.outside = self._start()
        return lane.outside

    def _start(self) -> Pass:
        current = Pass(next(self._numbers))
        self._open[id(current)] = current
        self.started += 1
        if self.sink is not None:
            self.sink.begin_pass(current)
        return current

    def _finish(self, current: Pass, *, failed: bool) -> None:
        self._open.pop(id(current), None)
        current.failed = failed
        self.failed += failed
        current.handled = None
        current.roots.clear()
        if self.sink is not None:
            self.sink.end_pass(current)


def stop_all() -> None:
    """`Passes.stop` for every line that was entered in this context."""
    for passes in _entered.get():
        passes.stop()


def _still_open() -> tuple[Passes, ...]:
    return tuple(passes for passes in _entered.get() if not passes.closed)


def _call_frame(frame: FrameType) -> FrameType:
    """The frame of the call of a module, seen from the frame that calls its hooks.

    torch calls hooks from an inner function, and the always-called ones, after an exception, from
    the outer.
    """
    outer = frame.f_back
    return outer if outer is not None and frame.f_code.co_name == "inner" else frame
