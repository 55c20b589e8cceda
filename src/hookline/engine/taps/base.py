"""A tap is the object whose bound method torch calls as a hook.

A tap is all that is ever put on a module. It holds no module and no name that is read while firing;
it pickles and deep-copies as an inert tap, which takes itself off the copy when first called, so
that a copy of a hooked model never writes into the original's recording.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.guards import unmark_copy
from hookline.engine.compile.in_graph import (
    Callback,
    GraphCapture,
    GraphEdit,
    GraphReduce,
    SplitCallback,
)
from hookline.engine.compile.runs import CompiledRun
from hookline.engine.passes.modes import refuse_tracing
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.pytree import leaves
from hookline.engine.selection.site import Site
from hookline.engine.torch_private.dynamo import while_tracing
from hookline.engine.torch_private.hooks import discard_hooks_of


class Order(IntEnum):
    """The order of hooks on a module; foreign hooks count as HOOK.

    Those that only ask for a value's gradient come after the ones that may still change the value;
    in backward they are called as they stand here: edits, hooks, what reads after them, recorders.
    """

    EVERYWHERE = -2
    BEGIN = -1
    EDIT = 0
    HOOK = 1
    JOIN = 2
    GRAD_EDIT = 3
    GRAD_HOOK = 4
    GRAD_READ = 5
    GRAD_RECORD = 6
    RECORD = 7
    CLOSE = 8  # what a call opened is closed before the pass of the root ends
    END = 9


GRADIENT_ORDERS = {
    Order.EDIT: Order.GRAD_EDIT, Order.HOOK: Order.GRAD_HOOK, Order.RECORD: Order.GRAD_RECORD,
}  # fmt: skip


class HookSpec(NamedTuple):
    """The registration of a tap's method on its module.

    Attributes:
        kind: torch's kind of hook: "forward_pre" or "forward".
        method: the name of the method.
        order: its place among the hooks of the module.
        with_kwargs: whether torch also passes the keyword arguments.
        always_call: whether torch calls it also when the module raises.
    """

    kind: str
    method: str
    order: Order
    with_kwargs: bool = False
    always_call: bool = False


# The taps that run just now, in any thread, as hooks that torch calls while it walks over the
# living dictionary: nothing can be taken out of that dictionary meanwhile.
walked_over: list[Tap] = []


class Tap:
    """The base of all taps: it knows its line, whether it may fire now, and how often it fired.

    Args:
        site: where it is.
        passes: the passes of its line.
        callback: called with the pass and the value; a result other than None replaces the value.
        rank: its place among the hooks of its module.
    """

    __slots__ = (
        "__weakref__", "active", "alter", "callback", "fired", "halves", "lane", "passes", "ran",
        "rank", "site", "traced",
    )  # fmt: skip
    is_on_calls: ClassVar[bool] = True  # whether it is the call of a module that makes it fire
    # Of a tap that has several hooks on its module: all of them.
    hooks: ClassVar[tuple[HookSpec, ...]] = ()

    def __init__(self, site: Site, passes: Passes, callback: Callback, rank: Order) -> None:
        self.site = site
        self.passes = passes
        self.lane = passes.lane
        self.rank = rank
        self.fired = 0
        self.ran = 0
        self.alter = self.callback = callback
        if (site.leaf or site.call is not None) and not site.is_gradient:
            self._narrow(callback, site)  # gradients arrive by leaf and by call as it is
        self.halves: SplitCallback | None = None
        self.traced: GraphCapture | None = (
            None  # what compiled code does here, once there may be any
        )
        self.active: GraphCapture | None = None  # the same, while such code is to do it

    def _narrow(self, callback: Callback, site: Site) -> None:
        """See one leaf of the value alone, or one call of the module."""
        if site.leaf:
            self.alter = self.callback = callback = _at_leaf(callback, site)
        if site.call is not None:
            self.callback = _at_call(callback, site.call, self)

    def prepare(self) -> None:
        """Code may be compiled from now on that calls this tap."""
        if self.traced is None:
            self.traced = self._as_traced()
            self.active = self.traced if self.passes.switch.is_on else None

    def _as_traced(self) -> GraphCapture:
        if self.rank in (Order.EDIT, Order.HOOK):
            return GraphEdit(self.site.call, self.alter)
        if self.halves is not None:
            return GraphReduce(self.site.call, self.halves.inside)
        return GraphCapture(self.site.call)

    def _after(self) -> Callback:
        """Return the callback for values that compiled code has kept."""
        if self.halves is None:
            return self.callback
        after, call = self.halves.after, self.site.call
        return after if call is None else _at_call(after, call, self)

    @while_tracing
    def is_traced(self) -> None:
        """Code is being compiled that calls this tap."""
        refuse_tracing()
        if self.passes.compiler is not None:
            self.passes.compiler.is_traced(self)
        if self.passes is not _INERT:
            self.prepare()

    def trace(self, value: Any) -> Any:
        """Do the work of `fire` inside compiled code."""
        self.is_traced()
        return None if self.active is None else self.active.capture(value)

    def before_run(self, current: Pass) -> None:
        """Compiled code is about to run that may call this tap."""
        if self.traced is not None and self.site.call is not None:
            self.traced.n_before = current.calls.get(self, 0)

    def collect(self, current: Pass, run: CompiledRun) -> None:
        """See what compiled code has caught in a run."""
        caught = () if self.traced is None else self.traced.taken()
        if isinstance(self.traced, GraphEdit):
            n_calls = current.calls.get(self, 0) + len(caught)
            current.calls[self] = n_calls
            self.ran = max(self.ran, n_calls)
            self.fired += 0 if run.is_again else sum(caught)
        elif not run.is_again:
            after = self._after()
            for value in caught:
                self.fired += 1
                after(current, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, (type(self),)

    def __deepcopy__(self, memo: Any) -> Tap:
        return _inert(type(self))

    def _pass_of(self, module: nn.Module) -> Pass | None:
        """Return the pass that a call of this module belongs to; None if the line sees none."""
        return self.lane.current or self._slow_path(module)

    def _slow_path(self, module: nn.Module) -> Pass | None:
        """The slow path: no pass runs here. Ours all the same, another's, or an inert copy?"""
        if self.passes is _INERT:
            _discard(module, self)
            return None
        current = self.passes.outside()
        if current is not None and self.passes.compiler is not None:
            self.passes.compiler.refuse_stale(module)
        return current if current is None or current.recomputation is None else self._again(current)

    def _again(self, current: Pass) -> Pass | None:
        """A checkpointed region is computed again: only what changes values has a part in it."""
        if self.rank not in (Order.EDIT, Order.HOOK):
            return None
        self.fired -= 1  # it counted the first time
        return current

    @property
    def is_removed(self) -> bool:
        """Tell whether a handle has removed this tap while its line went on."""
        return self.passes is _REMOVED

    def retire(self) -> None:
        """Fire no more, as when the line has ended; the line goes on without this tap."""
        self.passes, self.lane = _REMOVED, _REMOVED.lane
        self.traced = self.active = None

    def leave_walk(self) -> None:
        """Be no more among the taps of which torch walks over the dictionary."""
        if self in walked_over:  # not if it was interrupted before
            walked_over.remove(self)

    def _note(self, error: Exception) -> None:
        error.add_note(f"hookline: raised by the hook at {self.site} ({self.site.module_type})")

    @property
    def is_excused(self) -> bool:
        """Tell whether this tap need not fire: nothing was due."""
        return False

    def release(self) -> None:
        """Undo, when the line ends, what a call that was cut off has left."""

    def closer(self) -> str | None:
        """Name the hook that has to stay until a call under way ends; None if none has to."""
        return None

    def when_closed(self, then: Callable[[], None]) -> None:
        """Call a function when the calls under way have ended."""
        then()

    def why_silent(self) -> str | None:
        """Say why this tap has not fired, as far as it can tell itself."""
        if self.site.call is not None and self.ran:
            runs = "once" if self.ran == 1 else f"{self.ran} times"
            return f"the module ran {runs} in a pass, so call #{self.site.call} never came"
        return None


def no_callback(*values: Any) -> None:
    """Do nothing: the callback of taps without a single value, and of removed taps."""


def _at_leaf(callback: Callback, site: Site) -> Callback:
    leaf, where = site.leaf, str(site)

    def at_leaf(current: Pass, value: Any) -> Any:
        new = callback(current, leaves.get(value, leaf, where))
        return None if new is None else leaves.put(value, leaf, new)

    return at_leaf


def _at_call(callback: Callback, call: int, tap: Tap) -> Callback:
    def at_call(current: Pass, value: Any) -> Any:
        count = current.calls.get(tap, 0)
        current.calls[tap] = count + 1
        tap.ran = max(tap.ran, count + 1)
        if count == call:
            return callback(current, value)
        tap.fired -= current.recomputation is None
        return None

    return at_call


def _inert(kind: type[Tap]) -> Tap:
    tap = kind.__new__(kind)
    tap.site, tap.passes, tap.lane = Site(""), _INERT, _INERT.lane
    tap.fired, tap.ran, tap.rank = 0, 0, Order.HOOK
    tap.traced = tap.active = None
    return tap


_INERT = Passes()
_INERT.closed = True
# The passes of taps that a handle has taken off: none ever begins.
_REMOVED = Passes()
_REMOVED.closed = True


class RootTap:
    """Tells a line's passes when its root begins and ends. Inert in copies, as every tap is."""

    __slots__ = ("passes", "rank")

    def __init__(self, passes: Passes, rank: Order) -> None:
        self.passes = passes
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_root, (int(self.rank),)

    def begin(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        if is_dynamo_compiling():
            self.is_traced()
            return
        if self.passes is _INERT:
            _discard(module, self)
            return
        self.passes.begin(module)

    @while_tracing
    def is_traced(self) -> None:
        """Code is being compiled that calls the root."""
        refuse_tracing()
        if self.passes.compiler is not None:
            self.passes.compiler.is_traced(None)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook, always called."""
        if is_dynamo_compiling():
            return
        if self.passes is _INERT:
            _discard(module, self)
            return
        self.passes.end()


def _inert_root(rank: int) -> RootTap:
    return RootTap(_INERT, Order(rank))


def _discard(module: nn.Module, owner: object) -> None:
    """Take off a copy of a hooked module what came along with it."""
    discard_hooks_of(module, owner, is_inert)
    unmark_copy(module)


def is_inert(owner: object) -> bool:
    """Tell whether this is a tap that came along with a copy of a hooked model."""
    return isinstance(owner, Tap | RootTap) and owner.passes is _INERT
