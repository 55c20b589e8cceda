"""A tap is the object whose bound method torch calls as a hook.

hookline registers only taps as hooks on a module. A tap holds no module, and reads no
name while it fires. A tap pickles and deep-copies as an inert tap. The inert tap removes itself
from the copied module when torch first calls it. So a copy of a hooked model never writes into the
original's recording.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from types import FrameType, FunctionType
from typing import Any, ClassVar, NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.compiled_runs import CompiledRun
from hookline.engine.compile.graph_capture import (
    Callback,
    GraphCapture,
    GraphEdit,
    GraphReduce,
    SplitCallback,
)
from hookline.engine.compile.guards import unmark_copied_module
from hookline.engine.operations.attention_parts import is_computing_for_readers
from hookline.engine.operations.operation_mode import NOTE_OF_HOOK, drop_leftover_modes
from hookline.engine.passes.modes import refuse_tracing
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.pytree import describe, leaves, tree
from hookline.engine.selection.site import Site
from hookline.engine.torch_private.dynamo import run_at_trace_time
from hookline.engine.torch_private.hooks import discard_hooks_of, hook_dict
from hookline.errors import HooklineError


def _structure_note(site: Site, error: Exception, value: Any) -> str:
    """Say that a function was given a structure of tensors, where it may have expected a tensor."""
    leaf = next((leaf for leaf, _ in tree.tensors(value)), ())
    if not leaf or isinstance(error, HooklineError):
        return ""
    return (
        f", which was given {describe.in_words(value)}."
        f"\nSelect one tensor of it, such as {str(replace(site, leaf=leaf))!r}."
    )


class Order(IntEnum):
    """The order of hooks on a module; foreign hooks count as HOOK.

    Hooks that only register a tensor hook for a value's gradient come after the hooks that may
    still change the value. In backward, torch calls these tensor hooks in the order given here:
    edits, hooks, readers, recorders.
    """

    OPERATIONS_END = -3  # before the forward hooks, whose own calls are not the module's
    EVERYWHERE = -2
    BEGIN = -1
    EDIT = 0
    HOOK = 1
    BORDER = 2  # aliases the root's inputs, before a hook takes the aliases of a call
    JOIN = 3
    GRAD_EDIT = 4
    GRAD_HOOK = 5
    GRAD_READ = 6
    GRAD_RECORD = 7
    ACCUMULATED_EDIT = 8  # before other hooks on `.grad`, such as an optimizer's step in backward
    RECORD = 9
    CLOSE = 10  # closes what a call opened, before the root's pass ends
    END = 11
    OPERATIONS_BEGIN = 12  # after the pre-hooks


GRADIENT_ORDERS = {
    Order.EDIT: Order.GRAD_EDIT, Order.HOOK: Order.GRAD_HOOK, Order.RECORD: Order.GRAD_RECORD,
}  # fmt: skip


class HookSpec(NamedTuple):
    """The registration of a tap's method on the tap's node."""

    kind: str  # torch's kind of hook, such as "forward_pre", "grad" or "step_pre"
    method: str = "fire"
    # The method's place among the hooks of the node; None is the order of the tap.
    order: Order | None = None
    with_kwargs: bool = False  # whether torch also passes the keyword arguments
    always_call: bool = False  # whether torch also calls the method when the module raises


ON_OUTPUT = (HookSpec("forward"),)
ON_INPUTS = (HookSpec("forward_pre", with_kwargs=True),)


# The taps, of all threads, that run while torch iterates over a live hook dictionary. No hook can
# be removed from that dictionary meanwhile.
iterated_taps: list[Tap] = []


# The functions of all taps that torch calls as hooks. Outside a graph, as on a compiled model,
# they run uncompiled. The list grows: a verb, with its taps, is imported at its first use.
hook_functions: list[FunctionType] = []


class HookOwner:
    """The base of the objects whose methods torch calls as hooks."""

    __slots__ = ()
    # Whether the hooks need the graph of autograd to pass through a value.
    needs_graph: ClassVar[bool] = False
    takes_blocks: bool = False  # whether the hooks take an attention pattern in blocks of queries
    hooks: tuple[HookSpec, ...] = ON_OUTPUT  # the hooks of the object
    order: Order  # their place among the hooks of the node, where a hook has no order of its own

    def __init_subclass__(cls) -> None:
        methods = [vars(cls).get(name) for name in ("fire", "leave", "begin", "end")]
        hook_functions.extend(method for method in methods if isinstance(method, FunctionType))

    @property
    def changes_values(self) -> bool:
        """Tell whether the hooks may change a value of the forward."""
        return getattr(self, "order", Order.RECORD) in (Order.EDIT, Order.HOOK)

    def hooks_on(self, node: Any) -> tuple[HookSpec, ...]:
        """Return the hooks to register on a node, which this object is about to meet."""
        return self.hooks


def foreign_hooks(module: nn.Module) -> set[tuple[str, Any]]:
    """Return the kind and the id of each hook around a module's forward that is not hookline's."""
    return {
        (kind, key)
        for kind in ("forward_pre", "forward")
        for key, hook in list(hook_dict(module, kind).items())
        if not isinstance(getattr(hook, "__self__", None), HookOwner)
    }


class AroundCall(HookOwner):
    """Two functions to call around each call of a module.

    Args:
        begin: called with the module, its arguments and its keyword arguments.
        end: called with the module, its arguments and its output, also when the module raises.
        orders: the places of the two functions among the hooks of the module.
    """

    __slots__ = ("begin", "end", "hooks")

    def __init__(
        self, begin: Callable[..., Any], end: Callable[..., Any], orders: tuple[Order, Order]
    ) -> None:
        self.begin: Callable[..., Any] = begin
        self.end: Callable[..., Any] = end
        self.hooks: tuple[HookSpec, HookSpec] = (
            HookSpec("forward_pre", "begin", orders[0], with_kwargs=True),
            HookSpec("forward", "end", orders[1], always_call=True),
        )


class Tap(HookOwner):
    """The base of all taps: it knows its line, whether it may fire now, and how often it fired.

    Args:
        site: the tap's site.
        passes: the passes of the tap's line.
        callback: called with the pass and the value; a result other than None replaces the value.
        order: the tap's place among the hooks of its module.
    """

    __slots__ = (
        "__weakref__", "active", "callback", "change", "fired", "halves", "in_thread", "order",
        "passes", "ran", "site", "takes_blocks", "traced",
    )  # fmt: skip
    is_on_calls: ClassVar[bool] = True  # whether the call of a module fires the tap

    def __init__(self, site: Site, passes: Passes, callback: Callback, order: Order) -> None:
        self.site: Site = site
        self.passes: Passes = passes
        self.in_thread: Any = passes.in_thread
        self.order: Order = order
        self.fired: int = 0
        self.ran: int = 0
        self.takes_blocks: bool = False
        # In compiled code the capture counts the calls, so `change` does not.
        self.change: Callback = callback
        self.callback: Callback = callback
        if (site.leaf or site.call is not None) and not site.is_gradient:
            self._restrict_to_site(callback, site)  # gradients already arrive by leaf and by call
        self.halves: SplitCallback | None = None
        # The capture in compiled code; None until code may be compiled.
        self.traced: GraphCapture | None = None
        self.active: GraphCapture | None = None  # the capture, while compiled code should use it

    def _restrict_to_site(self, callback: Callback, site: Site) -> None:
        """Restrict the callback to one leaf of the value, or to one call of the module."""
        if site.leaf:
            self.change = self.callback = callback = _restrict_to_leaf(callback, site)
        if site.call is not None:
            self.callback = _restrict_to_call(callback, site.call, self)

    def prepare_capture(self) -> None:
        """Make the capture for compiled code, which may call this tap from now on."""
        if self.traced is None:
            self.traced = self._make_capture()
            self.active = self.traced if self.passes.switch.is_on else None

    def _make_capture(self) -> GraphCapture:
        if self.order in (Order.EDIT, Order.HOOK):
            return GraphEdit(self.site.call, self.change)
        if self.halves is not None:
            return GraphReduce(self.site.call, self.halves.inside)
        return GraphCapture(self.site.call)

    def _callback_after_graph(self) -> Callback:
        """Return the callback for values that compiled code has captured."""
        if self.halves is None:
            return self.callback
        after, call = self.halves.after, self.site.call
        return after if call is None else _restrict_to_call(after, call, self)

    @run_at_trace_time
    def prepare_tracing(self) -> None:
        """Prepare the tap while code is compiled that calls it."""
        refuse_tracing()
        if self.passes.compiler is not None:
            self.passes.compiler.prepare_tracing(self)
        if self.passes is not _INERT:
            self.prepare_capture()

    def fire_in_graph(self, value: Any) -> Any:
        """Do the work of `fire` inside compiled code."""
        self.prepare_tracing()
        return None if self.active is None else self.active.capture(value)

    def count_earlier_calls(self, current: Pass) -> None:
        """Set the number of earlier calls, before compiled code runs that may call this tap."""
        if self.traced is not None and self.site.call is not None:
            self.traced.n_before = current.calls.get(self, 0)

    def collect(self, current: Pass, run: CompiledRun) -> None:
        """Process the values that compiled code has captured in a run."""
        captured = () if self.traced is None else self.traced.take_captured()
        if isinstance(self.traced, GraphEdit):
            n_calls = current.calls.get(self, 0) + len(captured)
            current.calls[self] = n_calls
            self.ran = max(self.ran, n_calls)
            self.fired += 0 if run.is_again else sum(captured)
        elif not run.is_again:
            after = self._callback_after_graph()
            for value in captured:
                self.fired += 1
                after(current, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, (type(self),)

    def __deepcopy__(self, memo: Any) -> Tap:
        return _inert(type(self))

    def _pass_of(self, module: nn.Module) -> Pass | None:
        """Return the pass that a call of this module belongs to; None if the line sees none."""
        return self.in_thread.current or self._pass_outside_root(module)

    def _pass_outside_root(self, module: nn.Module) -> Pass | None:
        """Return the pass for a call outside this thread's pass; None if the line sees none.

        An inert copy of the tap is removed from the module.
        """
        if self.passes is _INERT:
            _discard_copied(module, self)
            return None
        current = self.passes.pass_outside_root()
        if current is not None and self.passes.compiler is not None:
            self.passes.compiler.refuse_stale_forward(module)
        return (
            current
            if current is None or current.recomputation is None
            else self._recomputed_pass(current)
        )

    def _recomputed_pass(self, current: Pass) -> Pass | None:
        """Return the pass of a recomputation; None for taps that do not change values."""
        if not self.changes_values:
            return None
        self.fired -= 1  # the first run counted this call
        return current

    @property
    def is_removed(self) -> bool:
        """Tell whether a handle has removed this tap while its line went on."""
        return self.passes is _REMOVED

    def retire(self) -> None:
        """Stop firing as at the line's end, while the line goes on without this tap."""
        self.passes, self.in_thread = _REMOVED, _REMOVED.in_thread
        self.traced = self.active = None

    def end_iteration(self) -> None:
        """Remove this tap from `iterated_taps`."""
        if self in iterated_taps:  # absent if interrupted before it was added
            iterated_taps.remove(self)

    def _add_error_note(self, error: Exception, value: Any = None) -> None:
        site, note = self.site, ""
        if site.port in ("input", "output") and not site.leaf:
            note = _structure_note(site, error, value)
        error.add_note(f"{NOTE_OF_HOOK}{site} ({site.module_type}){note}")

    @property
    def may_stay_silent(self) -> bool:
        """Tell whether this tap need not fire, because no value was due."""
        return False

    def closing_hook(self) -> str | None:
        """Return the hook that must stay until a running call ends, by name; None without one."""
        return None

    def call_when_closed(self, then: Callable[[], None]) -> None:
        """Call a function when the running calls have ended."""
        then()

    def why_silent(self) -> str | None:
        """Say why this tap has not fired; None if the tap cannot tell."""
        if self.site.call is not None and self.ran:
            runs = "once" if self.ran == 1 else f"{self.ran} times"
            return f"the module ran {runs} in a pass, so call #{self.site.call} never came"
        return None


def is_reading_tap_running(frame: FrameType | None) -> bool:
    """Tell whether a tap that only reads values is running, or what is computed for it alone.

    Args:
        frame: the frame of the running code, from which the stack is walked.
    """
    while frame is not None:
        if frame.f_code.co_name == "fire":  # only then: to read a frame's variables is slow
            tap = frame.f_locals.get("self")
            if isinstance(tap, Tap) and tap.order not in (Order.EDIT, Order.HOOK):
                return True
        if is_computing_for_readers(frame):
            return True
        frame = frame.f_back
    return False


def do_nothing(*values: Any) -> None:
    """Do nothing: the callback of taps without a single value, and of removed taps."""


def _restrict_to_leaf(callback: Callback, site: Site) -> Callback:
    leaf, where = site.leaf, str(site)

    def at_leaf(current: Pass, value: Any) -> Any:
        new = callback(current, leaves.get(value, leaf, where))
        return None if new is None else leaves.put(value, leaf, new, where)

    return at_leaf


def _restrict_to_call(callback: Callback, call: int, tap: Tap) -> Callback:
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
    tap.site, tap.passes, tap.in_thread = Site(""), _INERT, _INERT.in_thread
    tap.fired, tap.ran, tap.order = 0, 0, Order.HOOK
    tap.traced = tap.active = None
    return tap


_INERT = Passes(closed=True)
# The passes of taps that a handle has removed: no pass ever begins.
_REMOVED = Passes(closed=True)


class RootTap(HookOwner):
    """A tap on the root that begins and ends a line's passes; inert in copies, as every tap."""

    __slots__ = ("passes",)
    hooks: tuple[HookSpec, HookSpec] = (
        HookSpec("forward_pre", "begin", Order.BEGIN),
        HookSpec("forward", "end", Order.END, always_call=True),
    )

    def __init__(self, passes: Passes) -> None:
        self.passes: Passes = passes

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_root, ()

    def begin(self, module: nn.Module, args: Any) -> None:
        """Begin a pass: the forward-pre hook."""
        if is_dynamo_compiling():
            self.prepare_tracing()
            return
        if self.passes is _INERT:
            _discard_copied(module, self)
            return
        frame = call_frame(sys._getframe(1))
        drop_leftover_modes(frame.f_back)
        self.passes.begin(frame, module)

    @run_at_trace_time
    def prepare_tracing(self) -> None:
        """Prepare the line while code is compiled that calls the root."""
        refuse_tracing()
        if self.passes.compiler is not None:
            self.passes.compiler.prepare_tracing(None)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a pass: the always-called forward hook."""
        if is_dynamo_compiling():
            return
        if self.passes is _INERT:
            _discard_copied(module, self)
            return
        self.passes.end(call_frame(sys._getframe(1)))


def call_frame(frame: FrameType) -> FrameType:
    """Return the frame of a module's call, given the frame that calls the module's hooks.

    torch calls hooks from an inner function. After an exception, torch calls the always-called
    hooks from the outer function.
    """
    outer = frame.f_back
    return outer if outer is not None and frame.f_code.co_name == "inner" else frame


def _inert_root() -> RootTap:
    return RootTap(_INERT)


def _discard_copied(module: nn.Module, owner: object) -> None:
    """Remove a tap and a mark that were copied along with a hooked module."""
    discard_hooks_of(module, owner, is_inert)
    unmark_copied_module(module)


def is_inert(owner: object) -> bool:
    """Tell whether this object is a tap that was copied along with a hooked model."""
    return isinstance(owner, Tap | RootTap) and owner.passes is _INERT
