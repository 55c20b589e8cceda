"""The hooks of a profile: around the calls of modules, of compiled code, and of optimizers."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, final

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer

from hookline.engine import (
    HookSpec,
    OptimizerSteps,
    Order,
    Pass,
    Passes,
    RunSubscription,
    Site,
    Tap,
    backward_number,
    call_frame,
    do_nothing,
    parameter_ids,
)
from hookline.util.optional_imports import module_if_imported
from hookline.verbs.profile.call_tree import CallContext
from hookline.verbs.profile.clocks import Clock
from hookline.verbs.profile.runs_by_shape import RunKinds
from hookline.verbs.profile.thread_lane import Lane, ModuleCall


@final
class _ThreadLanes(threading.local):
    """The lanes of a thread.

    Attributes:
        lane: the lane of the thread's calls; None before the first.
        active: the lane whose call began last in the thread.
    """

    lane: Lane | None = None
    active: Lane | None = None


@final
class ProfileLanes:
    """Hold what the hooks of a profile share.

    Attributes:
        lanes: the lanes of all threads.
        ended: whether the clocks have stopped for good.
    """

    def __init__(self, kinds: RunKinds, make_clock: Callable[[], Clock]) -> None:
        self.kinds = kinds
        self.lanes: list[Lane] = []
        self.ended: bool = False
        self._make_clock = make_clock
        self.thread: _ThreadLanes = _ThreadLanes()
        self.thread.active = self.own_lane()

    def own_lane(self) -> Lane:
        """Return the lane of this thread."""
        lane = self.thread.lane
        if lane is None:
            lane = Lane(self._make_clock(), CallContext(), name=threading.current_thread().name)
            self.thread.lane = lane
            self.lanes.append(lane)
        return lane

    def _lane_of_backward(self) -> Lane | None:
        """Return the lane whose backward runs in this thread, which may be one of autograd's."""
        task = backward_number()
        return next((lane for lane in self.lanes if lane.runs_backward(task)), None)

    def running_lane(self) -> Lane | None:
        """Return the lane that is charged in this thread; None if there is none."""
        return self.thread.lane or self._lane_of_backward()

    def begin_call(
        self, path: str, frame: FrameType, current: Pass, args: Any, kwargs: Any
    ) -> Lane:
        """Begin the call of a module, and return its lane."""
        lane, is_again = self.thread.lane, current.recomputation is not None
        if lane is None or is_again:  # autograd may recompute in a thread of its own
            lane = self._lane_of_backward() or self.own_lane()
        self.thread.active = lane
        call = lane.enter_call(path, frame, number=current.number, is_again=is_again)
        if len(lane.calls) == 1 and not is_again:
            call.run = self.kinds.begin_run(path, args, kwargs)
            lane.costs_by_pass.current.has_gradients |= call.run.kind.has_gradients
        return lane

    def find_call(self, frame: FrameType) -> ModuleCall | None:
        """Return the call with this frame in the lane whose call began last in this thread."""
        return None if self.thread.active is None else self.thread.active.find_call(frame)

    def stop_clocks(self) -> None:
        """Stop all clocks."""
        for lane in self.lanes:
            lane.stop_clock()
        self.ended = True


@final
class ProfileTap(Tap):
    """Charge the calls of a module: the first and the last hook before it and after it."""

    __slots__ = ("_profile_lanes",)

    hooks: tuple[HookSpec, HookSpec, HookSpec, HookSpec] = (
        HookSpec("forward_pre", "begin", Order.JOIN, with_kwargs=True),
        HookSpec("forward_pre", "fire", Order.END),
        HookSpec("forward", "leave", Order.JOIN, always_call=True),
        HookSpec("forward", "end", Order.END, always_call=True),
    )

    def __init__(self, site: Site, passes: Passes, profile_lanes: ProfileLanes) -> None:
        super().__init__(site, passes, do_nothing, Order.RECORD)
        self._profile_lanes = profile_lanes

    def begin(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Stop the clock: the first forward-pre hook."""
        if is_dynamo_compiling():
            return
        current = self._pass_of(module)
        if current is not None:
            frame = call_frame(sys._getframe(1))
            self._profile_lanes.begin_call(self.site.path, frame, current, args, kwargs or {})

    def fire(self, module: nn.Module, args: Any) -> None:
        """Let the clock go on: the last forward-pre hook."""
        if is_dynamo_compiling() or self.passes.closed:
            return
        lane = self._profile_lanes.thread.active
        if lane is not None and lane.calls:
            call = lane.calls[-1]
            if call.began is None and call.account.context.path == self.site.path:
                lane.resume_for_module(call)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Stop the clock: the first forward hook, also called when the module raises."""
        if is_dynamo_compiling() or self.passes.closed:
            return
        call = self._profile_lanes.find_call(call_frame(sys._getframe(1)))
        if call is not None:
            call.account.lane.pause_after_module(call)

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Let the clock go on: the last forward hook, also called when the module raises."""
        if is_dynamo_compiling() or self.passes.closed:
            return
        call = self._profile_lanes.find_call(call_frame(sys._getframe(1)))
        if call is not None:
            call.account.lane.finish_call(call, output)

    def _recomputed_pass(self, current: Pass) -> Pass:
        return current  # recomputation has a column of its own


@final
class ShardedTap(Tap):
    """Charge collectives while FSDP2 gathers the parameters of a module, or frees them."""

    __slots__ = ("_profile_lanes",)

    hooks: tuple[HookSpec, HookSpec] = (
        HookSpec("forward_pre", "begin", Order.EVERYWHERE),
        HookSpec("forward", "end", Order.EVERYWHERE),
    )

    def __init__(self, site: Site, passes: Passes, profile_lanes: ProfileLanes) -> None:
        super().__init__(site, passes, do_nothing, Order.RECORD)
        self._profile_lanes = profile_lanes

    def begin(self, module: nn.Module, args: Any) -> None:
        """Charge collectives: the hook before that of FSDP2."""
        if not is_dynamo_compiling() and self.passes.sees_this_context():
            self._profile_lanes.own_lane().begin_gather()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Charge collectives: the hook before that of FSDP2 after the forward."""
        if not is_dynamo_compiling() and self.passes.sees_this_context():
            self._profile_lanes.own_lane().begin_reshard(output)


@final
class CompiledRegions:
    """Charge the calls of compiled modules, whose inner modules are no rows of their own."""

    def __init__(self, profile_lanes: ProfileLanes, passes: Passes, paths: dict[int, str]) -> None:
        self._profile_lanes = profile_lanes
        self._passes = passes
        self._paths = paths
        self._subscription = (
            RunSubscription(self) if module_if_imported("torch._dynamo") is not None else None
        )

    def open(self, compiled: list[nn.Module]) -> None:
        """Begin to watch the modules that hold their compiled call, and all others."""
        if self._subscription is not None:
            self._subscription.open()
            for module in compiled:
                self._subscription.watch_module(module)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._paths = {}
        if self._subscription is not None:
            self._subscription.remove()

    def covers(self, module: nn.Module) -> bool:
        """Tell whether a compiled module is one of the model's."""
        return id(module) in self._paths

    def enter(self, module: nn.Module, frame: FrameType) -> None:
        """Begin the call."""
        current = self._passes.in_thread.running
        if current is None and (current := self._passes.pass_outside_root()) is None:
            return
        local = frame.f_locals
        args, kwargs = local.get("args", ()), local.get("kwargs", {})
        lane = self._profile_lanes.begin_call(self._paths[id(module)], frame, current, args, kwargs)
        lane.resume_for_module(lane.calls[-1])

    def leave(self, module: nn.Module, frame: FrameType, output: Any) -> None:
        """End the call."""
        call = self._profile_lanes.find_call(frame)
        if call is not None and not call.account.lane.closed:
            call.account.lane.pause_after_module(call)
            call.account.lane.finish_call(call, output)

    def add_error_note(self, error: BaseException) -> None:
        """Say nothing of an error."""


@final
class GarbageHooks:
    """Stop a thread's clock while Python collects garbage in it.

    Python calls the object before and after each collection, in any thread. It does not keep the
    lanes alive, and goes at the first collection without it.
    """

    def __init__(self, profile_lanes: ProfileLanes) -> None:
        self._callbacks = gc.callbacks  # modules have lost their names as the interpreter ends
        self._profile_lanes = weakref.ref(profile_lanes)

    def open(self) -> None:
        """Register the object with Python."""
        self._callbacks.append(self)

    def close(self) -> None:
        """Take it away again. Idempotent."""
        if self in self._callbacks:
            self._callbacks.remove(self)

    def __call__(self, phase: str, info: Any) -> None:
        """Stop the clock, or let it go on."""
        profile_lanes = self._profile_lanes()
        if profile_lanes is None:
            self.close()
            return
        lane = profile_lanes.running_lane()
        if lane is not None and not lane.closed:
            if phase == "start":
                lane.clock.pause_for_gc()
            else:
                lane.clock.resume_after_gc()


def optimizer_step_hooks(
    profile_lanes: ProfileLanes, passes: Passes, parameters: set[int]
) -> OptimizerSteps:
    """Return hooks that charge the steps of the optimizers that hold a parameter of the model."""

    def is_mine(optimizer: Optimizer) -> bool:
        if is_dynamo_compiling() or not passes.sees_this_context():
            return False
        return not parameters.isdisjoint(parameter_ids(optimizer))

    def begin(optimizer: Optimizer, has_gradients: bool) -> None:
        profile_lanes.own_lane().begin_optimizer_step()

    def end() -> None:
        profile_lanes.own_lane().end_optimizer_step()

    return OptimizerSteps(is_mine, begin, end)
