"""The account of one thread: which module the time goes to at present.

Time is charged at borders: where a module begins or ends, where a backward enters the part of the
graph that another module made, and around the steps of an optimizer.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import (
    GradHook,
    at_end_of_inner_backward,
    backward_number,
    hook_gradient,
    memory_key_and_size,
    next_number,
    node_number,
    nodes_below,
    prehook_node,
    raw_tensors_saved_by,
    rnn_workspace_bytes,
)
from hookline.engine.pytree import tree
from hookline.util.stopwatch import is_caller
from hookline.verbs.profile.call_tree import (
    BACKWARD,
    CALLS,
    COLLECTIVES,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    SLOTS,
    CallContext,
)
from hookline.verbs.profile.clocks import Clock
from hookline.verbs.profile.costs_by_pass import CostsByPass
from hookline.verbs.profile.runs_by_shape import Run

_MOST_EVENTS = 800_000  # four entries an event, of a thread, for the trace
_MOST_BORDERS = 8192


@final
class Account:
    """Name what is charged: a context, and the slot of the phase.

    It is also the hook on the nodes of the graph that belong to it. There is one object for all of
    them, because objects that live until backward would make Python's garbage collector run.
    """

    __slots__ = ("at", "at_calls", "backward", "context", "inner", "lane", "slot")

    def __init__(self, lane: Lane, context: CallContext, slot: int) -> None:
        # The accounts of the modules that are called from here, in the same pass and phase.
        self.inner: dict[str, Account] = {}
        self.backward: Account | None = None
        self.lane: Lane = lane
        self.context: CallContext = context
        self.slot: int = slot
        # The places of the seconds and of the number of calls among the costs of a pass.
        self.at: int = context.index * len(SLOTS) + slot
        self.at_calls: int = context.index * len(SLOTS) + CALLS

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        """Charge this account from now on: the hook before a node of its part of the graph."""
        if not self.lane.closed:
            self.lane.enter_backward(self)


@final
@dataclass(slots=True, eq=False)
class ModuleCall:
    """A call of a module that is under way."""

    key: int  # the id of the frame of the call; the frame itself is not kept alive
    account: Account  # the account of the call
    before: Account  # the account to go on with when the call has ended
    lowest: int  # the number of the first node of the graph that the call can make
    began: Any = None  # the mark at which the module began; None before
    run: Run | None = None  # the kind of the run, for an outermost call


class _NodeOwners(threading.local):
    """Who made the nodes of a lane: from each number on, an account.

    Each thread numbers its own nodes, also one of autograd, which recomputes calls on a GPU.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.owners: list[Account] = []
        self.hooked: set[int] = set()


@final
class Lane:
    """The calls of one thread, its clock, and the account that is charged.

    Attributes:
        account: the account that is charged at present.
        calls: the calls under way, outermost first.
        events: the finished calls and the stretches of backward, flat: context, phase, first and
            last mark of the first, then of the second, and so on.
        n_lost: the number of events that were not kept.
        costs_by_pass: the costs of each pass.
        closed: whether the line has ended.
    """

    def __init__(self, clock: Clock, top: CallContext, *, name: str) -> None:
        self.clock = clock
        self.name = name
        self.costs_by_pass: CostsByPass = CostsByPass(clock.read_pending)
        self._costs = self.costs_by_pass.current.costs
        self.top: Account = Account(self, top, FORWARD)
        self.account: Account = self.top
        self._optimizer = Account(self, top, OPTIMIZER)
        self._collectives = Account(self, top, COLLECTIVES)
        self._before_collectives = self.top
        self._accounts: dict[tuple[CallContext, int], Account] = {}
        self.calls: list[ModuleCall] = []
        self.events: list[Any] = []
        self.n_lost: int = 0
        self.closed: bool = False
        self._tasks: list[tuple[int, Account]] = []
        self._node_owners: _NodeOwners = _NodeOwners()
        clock.pause()
        self._start: Any = clock.resume()

    # -- accounts ---------------------------------------------------------------------------------

    def _add_time_until(self, mark: Any) -> None:
        """Charge the time since the last border to the present account."""
        account = self.account
        self.clock.add_time(self._costs, account.at, self._start, mark)
        if account.slot == BACKWARD:
            self._add_trace_event(account, self._start, mark)
        self._start = mark

    def _add_trace_event(self, account: Account, start: Any, end: Any) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events += (account.context, account.slot, start, end)
        else:
            self.n_lost += 1

    def _account_of(self, context: CallContext, phase: int) -> Account:
        """Return the account of a context for a phase."""
        key = context, phase
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(self, context, phase)
            self.costs_by_pass.make_room(context.index + 1)
        return account

    def switch_account(self, account: Account) -> None:
        """Charge another account from now on."""
        self._add_time_until(self.clock.pause())
        self.account = account
        self._start = self.clock.resume()

    def stop_clock(self) -> None:
        """Charge the rest, and charge nothing any more."""
        if not self.closed:
            self._end_interrupted_calls(sys._getframe(1))
            self._add_time_until(self.clock.pause())
            self.closed = True
            self.clock.resume()

    # -- forward ----------------------------------------------------------------------------------

    def enter_call(self, path: str, frame: FrameType, *, number: int, is_again: bool) -> ModuleCall:
        """Begin the call of a module: the clock stands still until `begin`."""
        mark = self.clock.pause()
        if self.account is self._collectives:
            self._add_time_until(mark)
            self.account = self._before_collectives
        calls = self.calls
        self._end_interrupted_calls(frame)
        if not calls and backward_number() == -1:
            self._tasks.clear()  # of a backward that raised
            self.account = self.top
        self._add_time_until(mark)
        if not calls and not is_again and number > self.costs_by_pass.current.number:
            self.costs_by_pass.begin_pass(number)
            self._costs = self.costs_by_pass.current.costs
        account = self.account.inner.get(path) if calls else None
        if account is None:
            account = self._account_for_call(path, is_again=is_again)
        call = ModuleCall(id(frame), account, self.account, next_number())
        self.account = account
        if not is_again:
            self._costs[account.at_calls] += 1
        calls.append(call)
        return call

    def _end_interrupted_calls(self, frame: FrameType) -> None:
        """End the calls that Ctrl-C has ended: torch calls no hook then."""
        while self.calls and not is_caller(self.calls[-1].key, frame):
            call = self.calls.pop()
            self.account = call.before
            self._mark_failure(call)

    def _mark_failure(self, call: ModuleCall) -> None:
        """Note that a call has raised; with the root's call, the pass has failed."""
        if call.run is not None and call.run.mark_failed() and not call.run.kind.path:
            self.costs_by_pass.current.has_failed = True

    def _account_for_call(self, path: str, *, is_again: bool) -> Account:
        """Return the account of a module that is called from the present account."""
        above = self.account.context
        context = above.recomputed_child(path) if is_again and not self.calls else above.child(path)
        account = self._account_of(context, RECOMPUTE if is_again else FORWARD)
        if self.calls:
            self.account.inner[path] = account
        return account

    def resume_for_module(self, call: ModuleCall) -> None:
        """Let the clock go on: the module runs."""
        self._assign_next_nodes(call.account)
        call.began = self._start = self.clock.resume()

    def pause_after_module(self, call: ModuleCall) -> None:
        """Stop the clock when the module has run, until `finish_call`."""
        mark = self.clock.pause()
        while self.calls[-1] is not call:
            self.calls.pop()
        self._add_time_until(mark)
        if call.began is not None:
            self._add_trace_event(call.account, call.began, mark)
        self._assign_next_nodes(call.before)

    def finish_call(self, call: ModuleCall, output: Any) -> None:
        """End the call: hook the graph that it made, and let the clock go on."""
        self.calls.pop()
        if call.run is not None and call.run.has_raised():
            self._mark_failure(call)
        elif output is not None and torch.is_grad_enabled():
            self._hook_outputs(call, output)
        if call.run is not None and not call.run.has_failed:
            call.run.kind.is_noted = True
        if not self.calls and len(self._node_owners.numbers) > _MOST_BORDERS:
            self._drop_oldest_node_owners()
        self.account = call.before
        self._start = self.clock.resume()

    def find_call(self, frame: FrameType) -> ModuleCall | None:
        """Return the call with this frame."""
        key = id(frame)
        for call in reversed(self.calls):
            if call.key == key:
                return call
        return None

    # -- collectives ------------------------------------------------------------------------------

    def begin_gather(self) -> None:
        """Charge collectives, before a sharded module gathers its parameters, until it begins."""
        if self.account is not self._collectives:
            self._before_collectives = self.account
        self.switch_account(self._collectives)
        self._assign_next_nodes(self._collectives)

    def begin_reshard(self, output: Any) -> None:
        """Charge collectives, after a sharded module has run, until its call has ended.

        In backward the module gathers again when the gradient of its output arrives.
        """
        self.switch_account(self._collectives)
        self._assign_next_nodes(self._collectives)
        for tensor in tree.distinct_tensors(output):
            if tensor.grad_fn is not None:
                hook_gradient(tensor, GradHook(self._charge_collectives_in_backward))

    def _charge_collectives_in_backward(self, grad: Tensor) -> None:
        self._collectives(())

    # -- the graph --------------------------------------------------------------------------------

    def _hook_outputs(self, call: ModuleCall, output: Any) -> None:
        outputs = (output,) if isinstance(output, Tensor) else tree.distinct_tensors(output)
        roots = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        for node in roots:
            self._hook_node(node, node_number(node))
        if self.calls or not roots:
            return
        nodes, before = nodes_below(roots, call.lowest)
        last: CallContext | None = None
        for number, node in nodes:
            owner = self._owner_of_node(number).context
            if owner is not last:
                self._hook_node(node, number)
                last = owner
        if before is not None:
            self._hook_node(before, node_number(before))
        run = call.run
        if run is not None:
            run.kind.n_nodes.add(len(nodes))
            run.count_backwards(outputs)
            if run.is_new:
                self._add_saved_bytes(nodes, run)

    def _assign_next_nodes(self, account: Account) -> None:
        """Note that the nodes from now on belong to an account; in backward, to its backward."""
        node_owners = self._node_owners
        node_owners.numbers.append(next_number())
        node_owners.owners.append(account.backward or self._backward_account_of(account))

    def _backward_account_of(self, account: Account) -> Account:
        """Return the account of backward through what an account has made."""
        backward = account
        if account.context.path is not None and account.slot != BACKWARD:
            backward = self._account_of(account.context, BACKWARD)
        account.backward = backward
        return backward

    def _drop_oldest_node_owners(self) -> None:
        """Forget the nodes of old calls, whose graphs hardly go on into another call."""
        node_owners = self._node_owners
        del node_owners.numbers[: _MOST_BORDERS // 2], node_owners.owners[: _MOST_BORDERS // 2]
        node_owners.hooked = {
            number for number in node_owners.hooked if number >= node_owners.numbers[0]
        }

    def _owner_of_node(self, number: int) -> Account:
        """Return the account of the innermost call that made a node."""
        node_owners = self._node_owners
        at = bisect_right(node_owners.numbers, number) - 1
        return node_owners.owners[at] if at >= 0 else self.top

    def _hook_node(self, node: Any, number: int) -> None:
        """Have backward charge the module that made a node when the node's turn comes."""
        hooked = self._node_owners.hooked
        if number not in hooked and number < 2**63:
            hooked.add(number)
            prehook_node(node, self._owner_of_node(number))

    def _add_saved_bytes(self, nodes: list[tuple[int, Any]], run: Run) -> None:
        """Add up the bytes that each module's nodes keep; memory that several keep counts once."""
        counted, bytes_by_context = set(run.memory), dict[CallContext, int]()
        for number, node in reversed(nodes):
            for tensor in raw_tensors_saved_by(node):
                key, n_bytes = memory_key_and_size(tensor)
                if key not in counted:
                    counted.add(key)
                    context = self._owner_of_node(number).context
                    bytes_by_context[context] = bytes_by_context.get(context, 0) + n_bytes
                    run.kind.kept_inputs += n_bytes * (key in run.inputs)
            workspace = rnn_workspace_bytes(node)
            if workspace is not None:
                path = self._owner_of_node(number).context.path or ""
                run.kind.workspaces.setdefault(path, []).append(workspace)
        for context, n_bytes in bytes_by_context.items():
            context.kept = max(context.kept, n_bytes)

    # -- backward ---------------------------------------------------------------------------------

    def enter_backward(self, account: Account) -> None:
        """Charge a module from now on: a backward reaches its part of the graph."""
        mark = self.clock.pause()
        task = backward_number()
        if not self._tasks or self._tasks[-1][0] != task:
            self._tasks.append((task, self.account))
            at_end_of_inner_backward(partial(self._end_backward, task))
        self._add_time_until(mark)
        self.account = account
        self._start = self.clock.resume()

    def runs_backward(self, task: int) -> bool:
        """Tell whether a run of autograd is a backward of this thread's calls."""
        return bool(self._tasks) and self._tasks[-1][0] == task

    def _end_backward(self, task: int) -> None:
        """Charge what was charged before a backward, when the backward has ended."""
        if self.closed or not any(running == task for running, _ in self._tasks):
            return
        self._add_time_until(self.clock.pause())
        while (ended := self._tasks.pop())[0] != task:
            pass
        self.account = ended[1]
        self._start = self.clock.resume()

    # -- optimizers -------------------------------------------------------------------------------

    def begin_optimizer_step(self) -> None:
        """Charge the optimizer."""
        self._tasks.clear()
        self.switch_account(self._optimizer)

    def end_optimizer_step(self) -> None:
        """Charge the code around the model."""
        self.switch_account(self.top)
