"""Assign each value to a run of the root model: a pass.

A pass begins when the root model is called and ends when it returns. Every hook that fires in
between, in the same thread, belongs to the pass. A submodule that is called outside a run of the
root belongs to a separate pass, which lasts until the root runs next.

A gradient belongs to the pass in which its value flowed forward, whichever thread autograd uses:
the hook on the value carries its pass. A parameter's gradient comes from all the passes of a graph
and belongs to the latest pass.

The recomputation of a checkpointed region begins no pass. It belongs to the pass of the first run
(`checkpointing.py`).

A line belongs to the context that made it: its thread, its async task, and code that takes a copy
of that context along. From its first hook on, the line sees no other context. With `every_thread`,
the line sees all contexts and keeps each thread's passes apart.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol, final

from hookline.engine.distributed.rendezvous import publish_failure
from hookline.engine.passes.modes import Mode, is_in_transform, running_mode
from hookline.engine.passes.running_calls import RunningCalls
from hookline.engine.torch_private.autograd import backward_number
from hookline.util.fork_safe_lock import fork_safe_lock

# The passes of the lines made in this context, and of some that have ended. A tuple, since contexts
# share it. The end of a line does not set it: that may be in a finalizer, and Python 3.11 frees
# memory in use where a finalizer sets the variable that is just being set.
_made_here: ContextVar[tuple[Passes, ...]] = ContextVar("hookline_made_here", default=())


@final
class Pass:
    """One run of the root model.

    Args:
        number: the index of the pass, from 0 for each line.
        is_transformed: whether the pass runs inside a transform of torch.func.

    Attributes:
        log: the entries that the line's hooks added, in the order in which the hooks fired.
        log_entry: adds an entry to the log.
        calls: how often each of the line's taps that counts calls has run.
        at_end: functions to call when the pass ends.
        opened: state that taps keep between the beginning and the end of a call.
        backward: the run of autograd that began the pass, if no run of the root did.
        failed: whether the run ended by an exception; None while it runs.
        roots: the running calls of the root: several where the root calls itself.
        exception_at_start: the id of the exception that was being handled when the pass began.
        region: the innermost checkpointed region that runs, if one does.
        recomputation: the recomputation that this pass stands for; None for true passes.
        settings: the settings of torch under which the pass runs; None where no verb reads them.
        unversioned: the memory that changes without a version counter
            (`memory/unversioned_memory.py`); None until first asked for.
    """

    __slots__ = (
        "__weakref__", "at_end", "backward", "calls", "exception_at_start", "failed",
        "is_transformed", "log", "log_entry", "number", "opened", "recomputation", "region",
        "roots", "settings", "unversioned",
    )  # fmt: skip

    def __init__(self, number: int, *, is_transformed: bool = False) -> None:
        self.number: int = number
        self.is_transformed: bool = is_transformed
        self.backward: int | None = None
        self.log: list[Any] = []
        self.log_entry: Callable[..., None] = self.log.append
        self.calls: dict[Any, int] = {}
        self.failed: bool | None = None
        self.at_end: list[Callable[[], None]] = []
        self.opened: dict[Any, list[Any]] = {}
        self.roots: RunningCalls = RunningCalls()
        self.exception_at_start: int = id(sys.exception())
        self.region: Any = None
        self.recomputation: Any = None
        self.settings: Any = None
        self.unversioned: Any = None

    def call_end_functions(self) -> None:
        """Call the functions that wait for the end of the pass, or of a call outside the root."""
        while self.at_end:
            try:
                then = self.at_end.pop()
            except IndexError:  # another thread, which ends the line, has taken it meanwhile
                return
            then()


@final
class Switch:
    """The state of a line that its taps read in compiled code.

    Attributes:
        is_on: whether compiled code runs in a pass of the line; otherwise its taps do nothing.
        number: the number of the compiled code's run, as a tensor. Gradients carry the number,
            since they come back later.
    """

    __slots__ = ("is_on", "number")

    def __init__(self) -> None:
        self.is_on: bool = False
        self.number: Any = None


class Compiler(Protocol):
    """The interface of a line to torch.compile."""

    def begin_pass(self, current: Pass) -> None:
        """Prepare for a pass, in which compiled code may run."""

    def module_id_of(self, tap: Any) -> int:
        """Return the id of the module that a tap is on; 0 if the tap is on no module."""

    def refuse_stale_forward(self, module: Any) -> None:
        """Refuse a call outside the root that would run a forward which the class no longer has."""

    def add_error_note(self, error: BaseException) -> None:
        """Add a note to the error of a failed pass, if the error comes from compilation."""

    def prepare_tracing(self, tap: Any) -> None:
        """Prepare for code being compiled that calls the line's tap, or with None its root."""


class Sink(Protocol):
    """The destination of a line's values: taps that fire in a pass fill its `Pass.log`."""

    def begin_pass(self, current: Pass) -> None:
        """Prepare for a pass that begins."""


class _ThreadPasses(threading.local):
    """The running pass of each thread, and the thread's pass for calls outside the root."""

    current: Pass | None = None
    outside: Pass | None = None

    @property
    def running(self) -> Pass | None:
        """Return the pass that runs in this thread, inside a run of the root or outside."""
        return self.current or self.outside


class _ThreadCheckpoints(threading.local):
    checkpoints: tuple[Any, ...] = ()
    draws: Iterator[Any] | None = None


# The checkpointed regions whose first run is under way in each thread, and the random draws of the
# region that the thread recomputes. `checkpointing.py` maintains both.
THREAD = _ThreadCheckpoints()


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Passes:
    """The passes of one line; a tap on the root calls `begin` and `end`.

    Args:
        every_thread: whether the line sees every thread and task, or only its own.

    Attributes:
        sink: an object to tell when passes begin.
        at_root: called with each pass that a run of the root begins, and the frame of the root's
            call; None for verbs that need neither.
        at_border: called before the first value of each pass; None for lines without a model.
        lock: held while a pass begins.
    """

    every_thread: bool = False
    in_thread: _ThreadPasses = field(default_factory=_ThreadPasses)
    sink: Sink | None = None
    at_root: Callable[[Pass, FrameType], None] | None = None
    at_border: Callable[[], None] | None = None
    switch: Switch = field(default_factory=Switch)
    compiler: Compiler | None = None
    closed: bool = False
    transformed: bool = False  # whether a pass ran inside torch.func
    started: int = 0
    outside_root: int = 0  # the part of `started` for modules that ran outside a run of the root
    other_contexts: int = 0
    failed: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _open: dict[int, Pass] = field(default_factory=dict)
    _latest: Pass | None = None
    lock: threading.RLock = field(default_factory=fork_safe_lock)

    def bind_to_context(self) -> None:
        """Bind the line to the present context, unless it sees every thread.

        Called before the first hook is registered.
        """
        if not self.every_thread:
            _made_here.set((*passes_of_context(), self))

    def end_all(self) -> None:
        """End all passes: from now on no hook of the line sees anything."""
        with self.lock:  # a pass that another thread begins is open by now or never opens
            self.closed = True
        current = self.in_thread.current
        if current is not None:
            # A line that ends inside the forward has not failed. A root call that is no longer on
            # the stack was interrupted.
            current.roots.drop_ended(sys._getframe(1))
            self._finish_pass(current, failed=not current.roots)
        for current in list(self._open.values()):  # other threads' passes too
            self._finish_pass(current, failed=False)
        self.in_thread, self.sink, self._latest = _ThreadPasses(), None, None
        self.compiler = self.at_root = self.at_border = None
        self.switch.is_on = False

    def sees_this_context(self) -> bool:
        """Tell whether the line sees this thread and context."""
        return not self.closed and (self.every_thread or self in _made_here.get())

    def sees_backward(self) -> bool:
        """Tell whether a backward hook belongs to the line.

        autograd may call the hook in one of its own threads. Such a thread has no context, so every
        backward in it counts as the line's.
        """
        if self.sees_context_or_backward():
            return True
        self.other_contexts += not self.closed
        return False

    def sees_context_or_backward(self) -> bool:
        """Tell whether the line sees what runs here.

        On a GPU, autograd runs a backward, and the forwards inside it, in threads of its own.
        """
        if self.sees_this_context():
            return True
        return not (self.closed or backward_number() == -1 or _thread_kind.is_of_python)

    def begin(self, frame: FrameType, root: object = None) -> None:
        """Begin a pass before the root runs.

        Only two callers may use this method: the tap on the root, and the border of a compiled
        root.

        Args:
            frame: the frame of the root's call.
            root: the `self` of the frame, if the frame has one.
        """
        local = self.in_thread
        if local.outside is not None and local.outside.recomputation is not None:
            self._resume_pass(local.outside.recomputation, frame, root)
            return
        current = local.current
        if current is not None:  # an interrupted pass is over, whoever runs the root now
            current.roots.drop_ended(frame.f_back)
            if not current.roots:
                local.current = None
                self._finish_pass(current, failed=True)
                current = None
        if not self.sees_context_or_backward():
            self.other_contexts += not self.closed
            return
        mode = running_mode() if current is None else None
        if mode is not None and mode is Mode.RECOMPUTED:
            return  # the forward ran before the line was attached
        if local.outside is not None:
            outside, local.outside = local.outside, None
            self._finish_pass(outside, failed=False)
        if current is None:
            with self.lock:
                if self.closed:  # another thread has closed the line since sees_this_context()
                    return
                current = local.current = self._start_pass(is_transformed=mode is not None)
            # First, so that `end` ends the pass if the lines below raise.
            current.roots.begin(frame, root)
            if self.at_border is not None:
                self.at_border()
            if self.at_root is not None:
                self.at_root(current, frame)
            for checkpoint in THREAD.checkpoints:
                checkpoint.add_pass(self, current, by_root=True)
            if self.compiler is not None:
                self.compiler.begin_pass(current)
        else:
            current.roots.begin(frame, root)

    def _resume_pass(self, recomputation: Any, frame: FrameType, root: object) -> None:
        """Go on with the pass that a recomputed run of the root had in the first run."""
        local = self.in_thread
        again = recomputation.pass_of_root()
        again.roots.begin(frame, root)
        if again is not local.outside:
            for checkpoint in THREAD.checkpoints:  # regions inside the recomputed one
                checkpoint.add_pass(self, again, by_root=True)
            local.outside = again

    def end(self, frame: FrameType) -> None:
        """End the pass after the root's call with this frame has returned or raised.

        Only the callers of `begin` may use this method.
        """
        local = self.in_thread
        current = local.current
        if current is None:
            again = local.outside
            if again is not None and again.recomputation is not None:
                again.roots.end(frame)
            return
        if current.roots.end(frame) and not current.roots:
            local.current = None
            error = sys.exception()
            has_failed = error is not None and id(error) != current.exception_at_start
            if error is not None and has_failed and self.compiler is not None:
                self.compiler.add_error_note(error)
            self._finish_pass(current, failed=has_failed)

    def end_early(self) -> None:
        """End the pass of this thread after a deliberate early exit; the pass has not failed."""
        current = self.in_thread.current
        if current is not None:
            current.roots.drop_ended(sys._getframe(1))
            if not current.roots:
                self.in_thread.current = None
                self._finish_pass(current, failed=False)

    def pass_outside_root(self) -> Pass | None:
        """Return the pass for a hook that fires while the root does not run.

        Returns:
            The pass; None if the line does not see this hook.
        """
        outside = self.in_thread.outside
        if outside is not None and outside.recomputation is not None:
            return outside
        if not self.sees_context_or_backward():
            if not self.closed:
                self.other_contexts = max(self.other_contexts, 1)
            return None
        mode = running_mode()
        if mode is Mode.RECOMPUTED:
            return None  # the forward ran before the line was attached
        local = self.in_thread
        if local.outside is None:
            with self.lock:
                if not self.closed:
                    local.outside = self._start_pass(is_transformed=mode is not None)
                    self.outside_root += 1
            if self.at_border is not None:
                self.at_border()
            for checkpoint in THREAD.checkpoints if local.outside is not None else ():
                checkpoint.add_pass(self, local.outside, by_root=False)
        return local.outside

    def pass_of_parameter_gradient(self, backward: int) -> Pass | None:
        """Return the pass for a parameter's gradient in a run of autograd.

        Returns:
            The latest pass. Where the root has not run since the line began, a pass for each run of
            autograd. None if the line does not see this run.
        """
        if not self.sees_backward():
            return None
        latest = self._latest
        if latest is None or latest.backward not in (None, backward):
            if latest is not None:
                self._finish_pass(latest, failed=False)
            latest = self._start_pass(is_transformed=is_in_transform())
            latest.backward = backward
            if self.at_border is not None:
                self.at_border()
        return latest

    def _start_pass(self, *, is_transformed: bool) -> Pass:
        current = self._latest = Pass(next(self._numbers), is_transformed=is_transformed)
        self.transformed = self.transformed or is_transformed
        self._open[id(current)] = current
        self.started += 1
        if self.sink is not None:
            self.sink.begin_pass(current)
        return current

    def _finish_pass(self, current: Pass, *, failed: bool) -> None:
        self._open.pop(id(current), None)
        if current.at_end:
            current.call_end_functions()
        current.failed = failed
        self.failed += failed
        if failed:
            publish_failure("its model raised")
        current.roots.clear()


@contextmanager
def substitute_passes(passes_now: Mapping[Any, Pass]) -> Iterator[None]:
    """Let lines see the code in the block in other passes, outside of any run of the root.

    Args:
        passes_now: the passes, by the `in_thread` of the line.
    """
    before = [(local, local.current, local.outside) for local in passes_now]
    try:
        for local, current in passes_now.items():
            local.current, local.outside = None, current
        yield
    finally:
        for local, inside, outside in before:
            local.current, local.outside = inside, outside


# The reason why a line has seen nothing of a run.
ELSEWHERE = (
    "in another thread or async task, and a line sees the one that made it; do it in this one, or"
    " attach with every_thread=True"
)


class _ThreadKind(threading.local):
    """Tell whether Python, and not torch, started the present thread."""

    def __init__(self) -> None:
        me = threading.get_ident()
        self.is_of_python: bool = any(
            thread.ident == me and not isinstance(thread, threading._DummyThread)
            for thread in threading.enumerate()
        )


_thread_kind = _ThreadKind()


def passes_of_context() -> tuple[Passes, ...]:
    """Return the passes of the lines that were made in this context and are still on."""
    return tuple(passes for passes in _made_here.get() if not passes.closed)
