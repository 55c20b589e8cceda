"""Count the FLOPs and the peak memory of each module: one run on shapes for each kind of runs.

The run calls the model's own Python code, on a copy of the model without numbers. So it counts what
torch's FLOP counter would count, and disturbs no time. Inside compiled code it counts the eager
operations that the code was compiled from.
"""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from bisect import bisect_right
from collections import Counter
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.display.text import plural
from hookline.engine import (
    AroundCall,
    FakeModel,
    ModuleNode,
    OperationCounter,
    Order,
    Registrations,
    backward_number,
    next_number,
    node_number,
    path_text,
    running_node,
    why_not_fakeable,
)
from hookline.engine.pytree import tree
from hookline.verbs.profile.call_tree import BACKWARD, FORWARD, RECOMPUTE, CallContext
from hookline.verbs.profile.runs_by_shape import RunKind, RunKinds
from hookline.verbs.shared.run_settings import use_autocast
from hookline.verbs.summary import missing_formulas_text


class RunCounts(NamedTuple):
    """The FLOPs and the peak memory of all runs."""

    top: CallContext  # the top of the calling contexts, with FLOPs, peaks and numbers of calls
    failure: str  # why some are not known; an empty text if all are
    # The modules that run operations without a formula, by the operation's name.
    missing: dict[str, list[str]]

    def missing_formulas_text(self) -> str:
        """Say which operations have no FLOPs in the numbers; an empty text if all have."""
        named = [f"{name} (in {path_text(paths[0])})" for name, paths in self.missing.items()]
        return missing_formulas_text(named) if named else ""

    def find_differing_call(self, calls: dict[str, float]) -> str:
        """Return the first module that was called another number of times than was counted.

        Its code depends on more than the shapes of the inputs, or raised in some run.
        """
        first, all_calls = Counter[str | None](), Counter[str | None]()
        for context in self.top.walk():
            first[context.path] += context.n_calls[0]
            all_calls[context.path] += sum(context.n_calls)
        for path, number in calls.items():
            # A module that a custom backward calls is no recomputation to hookline.
            if number not in (first[path], all_calls[path]):
                return (
                    f"{path_text(path)} was called {plural(int(number), 'time')}, and"
                    f" {plural(first[path], 'time')} where the same shapes were counted"
                )
        return ""


def count_flops_and_memory(kinds: RunKinds) -> RunCounts:
    """Count the FLOPs and the peak memory of all runs."""
    top, failure = CallContext(), kinds.failure
    missing: dict[str, list[str]] = {}
    for kind in kinds.kinds:
        if kinds.copy is None or kind.inputs is None or not kind.n_runs:
            continue
        counted = _CallStack(top, kind, missing)
        try:
            # In a context of its own, where no line of the caller sees the run.
            contextvars.Context().run(_run_and_count, kinds.copy, kind, counted)
        except (Exception, SystemExit) as error:
            failure = failure or f"the model cannot run on shapes alone: {why_not_fakeable(error)}"
    return RunCounts(top, failure, missing)


def _run_and_count(copy: FakeModel, kind: RunKind, counted: _CallStack) -> None:
    registrations = Registrations()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        run = stack.enter_context(copy.runnable_copy(kind.inputs, kind.flags))
        stack.enter_context(use_autocast(kind.autocast))
        stack.callback(registrations.end)
        for path, module in run.modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                counted.attach(registrations, path, module)
        counter = OperationCounter(
            counted.add_costs, counted.add_missing_formula, counted.workspace_bytes
        )
        stack.enter_context(counter.counting())
        with torch.set_grad_enabled(kind.has_gradients):
            output = run.modules[kind.path](*run.args, **run.kwargs)
        outputs = [output] if isinstance(output, Tensor) else tree.distinct_tensors(output)
        results = [outputs[k] for k in sorted(kind.seeds) if k < len(outputs)]
        results = [result for result in results if result.requires_grad]
        if results:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])


@final
class _CallStack:
    """The calling context of each operation of a run."""

    def __init__(self, top: CallContext, kind: RunKind, missing: dict[str, list[str]]) -> None:
        self._stack = [top]
        self._is_again = [False]  # of each on the stack, whether a backward called it
        self._kind = kind
        self._missing = missing
        self._workspaces = {path: iter(sizes) for path, sizes in kind.workspaces.items()}
        self._numbers: list[int] = []
        self._owners: list[CallContext] = []

    def attach(self, registrations: Registrations, path: str, module: nn.Module) -> None:
        """Register the hooks that keep the stack of calls."""
        begin, end = partial(self._enter, path), partial(self._leave, path)
        around = AroundCall(begin, end, (Order.JOIN, Order.END))
        registrations.register_taps([(around, ModuleNode(path, module, 0))])

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        above = self._stack[-1]
        if len(self._stack) == 1 and backward_number() != -1:
            self._stack.append(self._context_in_backward().recomputed_child(path))
        else:
            self._stack.append(above.child(path))
        self._is_again.append(backward_number() != -1)
        self._stack[-1].n_calls[self._is_again[-1]] += self._kind.n_runs
        self._assign_next_nodes()

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if any(context.path == path for context in self._stack):
            while self._stack.pop().path != path:
                pass  # a module that raised before its hooks were on
            del self._is_again[len(self._stack) :]
        self._assign_next_nodes()

    def _assign_next_nodes(self) -> None:
        self._numbers.append(next_number())
        self._owners.append(self._stack[-1])

    def _context_in_backward(self) -> CallContext:
        node = running_node()
        at = -1 if node is None else bisect_right(self._numbers, node_number(node)) - 1
        return self._owners[min(at, len(self._owners) - 1)] if at >= 0 else self._stack[0]

    def add_costs(self, flops: int, n_bytes: int) -> None:
        """Charge an operation to the module that runs it."""
        context, is_inside = self._running_context()
        phase = (RECOMPUTE if self._is_again[-1] else FORWARD) if is_inside else BACKWARD
        # A backward that the model's own forward runs is work of this forward.
        is_forward = is_inside and not self._is_again[1]
        times = self._kind.n_runs if is_forward else self._kind.n_backwards
        context.flops[phase] += flops * times
        n_bytes += self._kind.kept_inputs
        for above in context.chain:
            above.peak = max(above.peak, n_bytes)

    def add_missing_formula(self, operation: str) -> None:
        """Note the module that runs an operation without a formula."""
        path = self._running_context()[0].path
        if path is not None and path not in self._missing.setdefault(operation, []):
            self._missing[operation].append(path)

    def workspace_bytes(self) -> int:
        """Return the bytes of the workspace that the running operation keeps for backward."""
        sizes = self._workspaces.get(self._running_context()[0].path or "", iter(()))
        return next(sizes, 0)

    def _running_context(self) -> tuple[CallContext, bool]:
        """Return the context that runs an operation, and whether a module in it is being called."""
        if len(self._stack) > 1:
            return self._stack[-1], True
        return self._context_in_backward(), False
