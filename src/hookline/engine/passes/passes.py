"""Which run of the root model a value belongs to.

A pass begins when the root model is called and ends when it returns; everything hooked in between,
in the same thread, belongs to it. What runs outside a run of the root (a submodule called by hand)
is gathered in a pass of its own, which lasts until the root runs next.

What flows back through a value belongs to the pass in which the value flowed forward, whichever
thread autograd uses: the hook on the value carries its pass. A parameter's gradient comes from all
the passes of a graph, and belongs to the latest.

What torch computes a second time, for a checkpoint, is no pass: it belongs to the one in which it
ran first (`checkpointing.py`).

A line belongs to the context that made it: its thread, its async task, and what takes a copy of
that context along. It sees no other, from its first hook on; if `every_thread` was asked for, it
sees all, each thread's passes apart.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol, final

from hookline.engine.passes.calls import Calls, call_frame
from hookline.engine.passes.modes import Mode, is_transformed, mode_now
from hookline.util.locks import fork_safe_lock

# The passes of the lines made in this context. A tuple, since contexts share it.
_made_here: ContextVar[tuple[Passes, ...]] = ContextVar("hookline_made_here", default=())


@final
class Pass:
    """One run of the root model.

    Args:
        number: counts from 0 for each line.
        is_transformed: whether it runs inside a transform of torch.func.

    Attributes:
        log: what the line's hooks chose to note, in the order in which they fired.
        note: adds to the log.
        calls: how often each of the line's taps that counts calls has run.
        at_end: what is to be done when it ends.
        opened: what taps keep between the beginning and the end of a call.
        backward: the run of autograd that began the pass, if no run of the root did.
        failed: whether the run ended by an exception; None while it runs.
        roots: the root's calls that are under way: several where it calls itself.
        exception_at_start: the id of the exception that was being handled when it began.
        region: the innermost checkpointed region that runs, if one does.
        recomputation: the recomputation of a region that this is; None for true passes.
        unversioned: the memory that changes without a word (`memory.py`); None until somebody asks.
    """

    __slots__ = (
        "__weakref__", "at_end", "backward", "calls", "exception_at_start", "failed",
        "is_transformed", "log", "note", "number", "opened", "recomputation", "region", "roots",
        "unversioned",
    )  # fmt: skip

    def __init__(self, number: int, *, is_transformed: bool = False) -> None:
        self.number = number
        self.is_transformed = is_transformed
        self.backward: int | None = None
        self.log: list[Any] = []
        self.note = self.log.append
        self.calls: dict[Any, int] = {}
        self.failed: bool | None = None
        self.at_end: list[Callable[[], None]] = []
        self.opened: dict[Any, list[Any]] = {}
        self.roots = Calls()
        self.exception_at_start = id(sys.exception())
        self.region: Any = None
        self.recomputation: Any = None
        self.unversioned: Any = None

    def close(self) -> None:
        """Do what is to be done at the end: of the pass, or of what is called outside of one."""
        while self.at_end:
            self.at_end.pop()()


@final
class Switch:
    """The state of a line that its taps read in compiled code.

    Attributes:
        is_on: whether compiled code runs in a pass of the line; outside, it does nothing.
        number: the run's of that code, as a tensor: for gradients, which come back later.
    """

    __slots__ = ("is_on", "number")

    def __init__(self) -> None:
        self.is_on = False
        self.number: Any = None


class Compiler(Protocol):
    """The interface of a line to torch.compile."""

    def begin_pass(self, current: Pass) -> None:
        """A pass begins, in which compiled code may run."""

    def end_pass(self, current: Pass) -> None:
        """A pass has ended: see what compiled code has left."""

    def owner_of(self, tap: Any) -> int:
        """The module that a tap is on, as a number; 0 if it is on none."""

    def refuse_stale(self, module: Any) -> None:
        """Refuse a call by hand that would run a forward which the module's class has no longer."""

    def explain(self, error: BaseException) -> None:
        """A pass has failed: say more about it, if it was where code was compiled."""

    def is_traced(self, tap: Any) -> None:
        """Code is being compiled that calls the line's tap, or with None its root."""


class Sink(Protocol):
    """The destination of a line's values: taps that fire in a pass fill its `Pass.log`."""

    def begin_pass(self, current: Pass) -> None:
        """A pass begins."""


class _Lane(threading.local):
    """The pass that runs in each thread, and the one for calls outside the root."""

    current: Pass | None = None
    outside: Pass | None = None

    @property
    def running(self) -> Pass | None:
        """Return the pass that runs in this thread, in a run of the root or outside of one."""
        return self.current or self.outside


class _Thread(threading.local):
    checkpoints: tuple[Any, ...] = ()
    draws: Iterator[Any] | None = None


# The checkpointed regions that each thread runs for the first time, and what was drawn in the one
# that it runs again; of both, `recompute` takes care.
THREAD = _Thread()


@final
class Passes:
    """The passes of one line; a tap on the root calls `begin` and `end`.

    Args:
        sink: told when passes begin.
        every_thread: whether the line sees every thread and task, and not only its own.
    """

    __slots__ = (
        "_latest", "_lock", "_numbers", "_open", "closed", "compiler", "every_thread", "failed",
        "lane", "other_contexts", "outside_root", "sink", "started", "switch", "transformed",
    )  # fmt: skip

    def __init__(self, sink: Sink | None = None, *, every_thread: bool = False) -> None:
        self.lane = _Lane()
        self.sink = sink
        self.switch = Switch()
        self.compiler: Compiler | None = None
        self.every_thread = every_thread
        self.closed = False
        self.transformed = False  # whether a pass ran inside torch.func
        self.started = 0
        self.outside_root = 0  # of these, those of modules that were run outside a run of the root
        self.other_contexts = 0
        self.failed = 0
        self._numbers = itertools.count()
        self._open: dict[int, Pass] = {}
        self._latest: Pass | None = None
        self._lock = fork_safe_lock()

    def belong_here(self) -> None:
        """Belong to the present context, and to no other, unless to all; before the first hook."""
        if not self.every_thread:
            _made_here.set((*_still_open(), self))

    def leave(self) -> None:
        """The line has ended: nothing that fires from now on is seen."""
        with self._lock:  # a pass that another thread begins is either open by now, or never is
            self.closed = True
        # Not ContextVar.reset: a line may be closed in another context than it was made in.
        _made_here.set(_still_open())
        mine = self.lane.current
        if mine is not None:
            # Ended inside the forward: no failure. Not on the stack any more: it was interrupted.
            mine.roots.drop_dead(sys._getframe(1))
            self._finish(mine, failed=not mine.roots)
        for current in list(self._open.values()):  # those of other threads too
            self._finish(current, failed=False)
        self.lane, self.sink, self._latest = _Lane(), None, None
        self.compiler = None
        self.switch.is_on = False

    def is_here(self) -> bool:
        """Tell whether the line sees this thread and context."""
        return not self.closed and (self.every_thread or self in _made_here.get())

    def is_ours(self) -> bool:
        """`is_here`, from a hook that autograd may call in a thread of its own.

        Those threads have no context; a backward that runs there is taken for the line's.
        """
        if self.is_here():
            return True
        if self.closed or _is_of_python():
            self.other_contexts += not self.closed
            return False
        return True

    def begin(self, root: object = None, frame: FrameType | None = None) -> None:
        """The root is about to run. Only to be called by the tap on the root, or with the frame of
        its call by what stands around a compiled one."""
        lane = self.lane
        # Above this frame: the tap's, then torch's function that calls the hooks, then the call.
        frame = call_frame(sys._getframe(2)) if frame is None else frame
        if lane.outside is not None and lane.outside.recomputation is not None:
            again = lane.outside.recomputation.root_begins()
            again.roots.begin(frame, root)
            lane.outside = again
            return
        current = lane.current
        if current is not None:  # whoever runs it: one that was interrupted is over
            current.roots.drop_dead(frame.f_back)
            if not current.roots:
                lane.current = None
                self._finish(current, failed=True)
                current = None
        if not self.is_here():
            self.other_contexts += not self.closed
            return
        mode = mode_now() if current is None else None
        if mode is not None and mode is Mode.RECOMPUTED:
            return  # of a forward that ran before the line was there
        if lane.outside is not None:
            outside, lane.outside = lane.outside, None
            self._finish(outside, failed=False)
        if current is None:
            with self._lock:
                if self.closed:  # by another thread, since we asked
                    return
                current = lane.current = self._start(is_transformed=mode is not None)
            current.roots.begin(frame, root)  # first: `end` ends the pass if what follows raises
            for one in THREAD.checkpoints:
                one.pass_begins(self, current, by_root=True)
            if self.compiler is not None:
                self.compiler.begin_pass(current)
        else:
            current.roots.begin(frame, root)

    def end(self, frame: FrameType | None = None) -> None:
        """The root has run, or failed. Only to be called by those who call `begin`."""
        lane = self.lane
        current = lane.current
        frame = call_frame(sys._getframe(2)) if frame is None else frame
        if current is None:
            again = lane.outside
            if again is not None and again.recomputation is not None:
                again.roots.end(frame)
            return
        if current.roots.end(frame) and not current.roots:
            lane.current = None
            error = sys.exception()
            has_failed = error is not None and id(error) != current.exception_at_start
            if error is not None and has_failed and self.compiler is not None:
                self.compiler.explain(error)
            self._finish(current, failed=has_failed)

    def stop(self) -> None:
        """The forward in this thread was left half-way, on purpose: passes that ended by it did."""
        current = self.lane.current
        if current is not None:
            current.roots.drop_dead(sys._getframe(1))
            if not current.roots:
                self.lane.current = None
                self._finish(current, failed=False)

    def outside(self) -> Pass | None:
        """The pass for a hook that fires while the root does not run; None if not ours to see."""
        known = self.lane.outside
        if known is not None and known.recomputation is not None:
            return known
        if not self.is_here():
            if not self.closed:
                self.other_contexts = max(self.other_contexts, 1)
            return None
        mode = mode_now()
        if mode is Mode.RECOMPUTED:
            return None  # of a forward that ran before the line was there
        lane = self.lane
        if lane.outside is None:
            with self._lock:
                if not self.closed:
                    lane.outside = self._start(is_transformed=mode is not None)
                    self.outside_root += 1
            for one in THREAD.checkpoints if lane.outside is not None else ():
                one.pass_begins(self, lane.outside, by_root=False)
        return lane.outside

    def at_parameter(self, backward: int) -> Pass | None:
        """The pass for a parameter's gradient, in a run of autograd; None if not ours to see.

        It is the latest one, or where the root has not run since the line began, one of its own for
        each run of autograd.
        """
        if not self.is_ours():
            return None
        latest = self._latest
        if latest is None or latest.backward not in (None, backward):
            if latest is not None:
                self._finish(latest, failed=False)
            latest = self._start(is_transformed=is_transformed())
            latest.backward = backward
        return latest

    def _start(self, *, is_transformed: bool) -> Pass:
        current = self._latest = Pass(next(self._numbers), is_transformed=is_transformed)
        self.transformed = self.transformed or is_transformed
        self._open[id(current)] = current
        self.started += 1
        if self.sink is not None:
            self.sink.begin_pass(current)
        return current

    def _finish(self, current: Pass, *, failed: bool) -> None:
        self._open.pop(id(current), None)
        if current.at_end:
            current.close()
        if self.compiler is not None:
            self.compiler.end_pass(current)
        current.failed = failed
        self.failed += failed
        current.roots.clear()


# Why nothing was seen of what did happen.
ELSEWHERE = (
    "in another thread or async task, and a line sees the one that made it; do it in this one, or"
    " attach with every_thread=True"
)


def _is_of_python() -> bool:
    """Tell whether Python, and not torch, started the present thread."""
    me = threading.get_ident()
    return any(
        thread.ident == me and not isinstance(thread, threading._DummyThread)
        for thread in threading.enumerate()
    )


def _still_open() -> tuple[Passes, ...]:
    return tuple(passes for passes in _made_here.get() if not passes.closed)
