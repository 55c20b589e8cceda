"""Gradient taps in compiled code, whose hooks are part of the graph.

A hook in a graph hands the gradient to the tap through an operator. A tensor that the graph got
from outside gets a hook outside, after the graph has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookline.engine.autograd.gradient_operator import (
    ENDED,
    LOST,
    empty_placeholder,
    hook_in_graph,
    index_or_length,
    outline_with_slots,
    register_receiver,
    settle_untraced_views,
)
from hookline.engine.compile.compiled_runs import CompiledRun, compiled_run
from hookline.engine.compile.graph_capture import NO_PASS, GraphCapture, GraphGradient
from hookline.engine.gradients.gradient_tap import (
    NO_BACKWARD,
    FirstRunHooks,
    GradientCallback,
    GradientTap,
    PendingGradient,
    gradient_pass,
)
from hookline.engine.passes.modes import (
    is_compiled_in_transform,
    is_vmapped_with_gradient,
    vmapped_gradient_text,
)
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.pytree import tree
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Order
from hookline.engine.torch_private.autograd import is_written_by_compiled
from hookline.engine.torch_private.dynamo import (
    TracingAttachError,
    graph_input_codes,
    next_hook_number,
    run_at_trace_time,
)
from hookline.engine.torch_private.graph.compiler_state import has_compiled_backward
from hookline.engine.torch_private.graph.dynamo_fakes import store_fake_tensors, take_fake_tensors
from hookline.errors import AttachError


class GraphValue(NamedTuple):
    """Describe a value whose gradients come out of a compiled graph."""

    pending: PendingGradient
    # The slots whose gradients are ignored, because hooks outside of the graph get them.
    ignored: frozenset[int | None]


# Tensors that a graph got from outside: slot, tensor, and the hook's number in tracing order.
Outside = tuple[tuple[int, Tensor, str], ...]

# The slot of each tensor in a value, in a graph; None for a tensor that requires no gradient.
TensorSlots = tuple[int | None, ...]


class GraphGradientTap(GradientTap):
    """A gradient tap that also works in compiled code.

    Attributes:
        is_in_graph: whether compiled code has run the tap.
    """

    __slots__ = ("is_in_graph",)

    def __init__(self, site: Site, passes: Passes, on: GradientCallback, order: Order) -> None:
        super().__init__(site, passes, on, order)
        self.is_in_graph: bool = False

    def _make_capture(self) -> GraphCapture:
        return GraphGradient(self.site.call, register_receiver(self), self.passes.switch)

    def fire_in_graph(self, value: Any) -> None:
        """Hook a value in the graph being compiled, so that its gradients leave the graph."""
        self.prepare_tracing()
        traced = self.active
        if not isinstance(traced, GraphGradient):
            return
        if not traced.should_capture():
            traced.add_result(None)
            return
        value = self.part(NO_PASS, value)
        is_on = torch.is_grad_enabled()
        tensors: list[Tensor] = []
        slots: list[int | None] = []
        for tensor in _lone_or_all_tensors(value):
            slot = None
            if tensor.requires_grad:
                slot = index_or_length(tensors, tensor)
                if slot == len(tensors):
                    tensors.append(tensor)
            slots.append(slot)
        if is_on and not tensors and is_compiled_in_transform():
            store_fake_tensors(_lone_or_all_tensors(value))
            self._refuse_vmapped()
        outside = self._hook_graph_tensors(traced, tensors, is_on=is_on) if tensors else ()
        # The structure of a value with parts, with empty tensors.
        form = None if isinstance(value, Tensor) else tree.map_tensors(empty_placeholder, value)
        traced.add_result((tuple(slots), form, is_on, outside))

    def _hook_graph_tensors(
        self, traced: GraphGradient, tensors: list[Tensor], *, is_on: bool
    ) -> Outside:
        """Hook tensors in a graph, unless gradients are disabled.

        Returns:
            The tensors that the graph got from outside, by slot. Their gradients come from outside,
            too, so these tensors get hooks there.
        """
        call, of_run, owner = traced.n_calls(), traced.switch.number, self._module_id_text()
        are_outside = graph_input_codes(tensors)
        outside: Outside = ()
        for slot in range(len(tensors)):  # not enumerate: dynamo traces each step of it
            tensor = tensors[slot]
            if are_outside[slot] != "0":
                trace_order = next_hook_number() if are_outside[slot] == "1" else ""
                outside = (*outside, (slot, tensor, trace_order))
            elif is_on:
                address = traced.number, of_run, call, slot
                hook_in_graph(tensor, address, owner, self.on)
        return outside

    @run_at_trace_time
    def _refuse_vmapped(self) -> None:
        """Refuse a value under vmap that requires a gradient, on which no hook would be called.

        Raises:
            TracingAttachError: a noted tensor is one example of a batch that requires a gradient.
        """
        if any(map(is_vmapped_with_gradient, take_fake_tensors())) and not self.on.optional:
            raise TracingAttachError(vmapped_gradient_text(str(self.site)))

    @run_at_trace_time
    def _module_id_text(self) -> str:
        """Return the module's id as a string."""
        compiler = self.passes.compiler
        return "0" if compiler is None else str(compiler.module_id_of(self))

    def collect(self, current: Pass, run: CompiledRun) -> None:
        """Count the values whose gradients are pending in a graph."""
        captured = () if self.traced is None else self.traced.take_captured()
        for view in settle_untraced_views():
            self.settle_view_later(current, view)
        n_before = run.n_before[self] = current.calls.get(self, 0)
        current.calls[self] = n_before + len(captured)
        self.is_in_graph |= bool(captured)
        self.ran: int = max(self.ran, n_before + len(captured))
        for call, value in enumerate(captured):
            if value is not None:
                self._collect_call(current, run, call, value)

    def _collect_call(self, current: Pass, run: CompiledRun, call: int, value: Any) -> None:
        """Count one call's value whose gradients are pending in a graph."""
        slots, form, is_on, outside = value
        number = run.n_before[self] + call
        first_hooks = self._first_run_hooks(current, number) or FirstRunHooks(
            PendingGradient(number), {}, {}
        )
        pending = first_hooks.pending
        if current.recomputation is not None and current.recomputation.is_repetition:
            ignored = frozenset(slots)
        else:  # the graph has only a share of these tensors' gradients
            ignored = frozenset(slots[index] for index in first_hooks.slots)
        run.pending[self, call] = GraphValue(pending, ignored)
        outside = tuple([entry for entry in outside if entry[0] not in ignored])
        if not is_on:
            first_hooks = self._collect_without_grad(current, first_hooks, slots, outside)
        if form is not None:
            numbers = [first_hooks.slots.get(index, slot) for index, slot in enumerate(slots)]
            pending.form = outline_with_slots(form, numbers)
        is_again = current.recomputation is not None
        if is_on and (not is_again or current.recomputation.has_gradients):
            self._hook_graph_inputs(current, pending, outside)
        if not is_on or is_again:
            return
        if any(slot is not None for slot in slots):
            self.placed += 1
        else:
            self.needless += 1
            self.on.on_no_gradient(current, pending)

    def _collect_without_grad(
        self, current: Pass, first_hooks: FirstRunHooks, slots: TensorSlots, outside: Outside
    ) -> FirstRunHooks:
        """Handle a value that flowed while gradients were disabled.

        A tensor that came into a reentrant checkpoint from outside gets its hooks now, as in
        `hook_tensors`. A change inside the graph would reach only the checkpoint's share of the
        tensor's gradient.
        """
        if current.recomputation is not None and not current.region.is_reentrant:
            return first_hooks
        outside = tuple([entry for entry in outside if entry[1].grad_fn is not None])
        if not self._gradients_come_in_recomputation(current) or not outside:
            return first_hooks
        if self.on.inside is not None:
            self.warn_ambiguous(_FROM_BEFORE)
            return first_hooks
        places = {slot: -1 - slots.index(slot) for slot, _, _ in outside}
        hooked = tuple(
            [(places[slot], tensor, trace_order) for slot, tensor, trace_order in outside]
        )
        self._hook_graph_inputs(current, first_hooks.pending, hooked)
        hooked_slots = {index: places[slot] for index, slot in enumerate(slots) if slot in places}
        return self._keep_first_run_hooks(
            current, first_hooks._replace(slots={**first_hooks.slots, **hooked_slots})
        )

    def _hook_graph_inputs(self, current: Pass, pending: PendingGradient, outside: Outside) -> None:
        """Hook the tensors that a graph got from outside; after the run, these tensors exist."""
        compiler = self.passes.compiler
        owner = 0 if compiler is None else compiler.module_id_of(self)
        first = gradient_pass(current)
        for slot, tensor, trace_order in outside:
            # It is known who wrote last, not when: the write may be of code that ran earlier.
            if not trace_order or is_written_by_compiled(tensor):
                self.warn_ambiguous(_WRITTEN_BY_GRAPH)
            else:
                hook = self._make_hook(first, pending, slot)
                self._hook_gradient_of(current, tensor, hook, owner, int(trace_order))
                if self.on.awaits is not None:
                    self.on.awaits(current, pending, slot, tensor)

    def receive_from_graph(self, number: int, call: int, slot: int, grad: Tensor) -> None:
        """Handle a gradient that has left a compiled graph."""
        if call == LOST:
            self.warn_ambiguous(_SHARED_OUTPUT)
            return
        if self.on.inside is not None and self.passes.closed:
            raise AttachError(ENDED.format(site=self.site))
        if self.on.before_inside is not None and grad.dtype is not torch.int64:
            self.on.before_inside(grad)
            return
        run = compiled_run(number)
        current = None if run is None else run.current()
        if run is None or current is None:
            self.fired += self.on.inside is not None and slot == 0
            return
        value = run.pending.get((self, call))
        if value is None:  # the gradient arrived before the run was collected
            value = GraphValue(PendingGradient(run.n_before.get(self, 0) + call), frozenset())
        pending, ignored = value
        if slot in ignored:
            return
        if self.on.inside is None:
            self.receive_gradient(current, pending, slot, grad)
        else:
            self._count_arrival(pending)

    def why_silent(self) -> str | None:
        """Say why no gradient arrived."""
        reason = super().why_silent()
        if reason == NO_BACKWARD and self.is_in_graph and has_compiled_backward():
            return f"{reason}; or {_COMPILED_AGAIN}"
        return reason


def _lone_or_all_tensors(value: Any) -> list[Tensor]:
    # A lone tensor without a walk: dynamo traces each step.
    return [value] if isinstance(value, Tensor) else [tensor for _, tensor in tree.tensors(value)]


def add_compiled_backward_note(taps: Iterable[Any], error: Exception) -> None:
    """Add a note to an error of torch's compilers that compiled autograd may be the cause of."""
    is_of_torch = type(error).__module__.startswith("torch.")
    if is_of_torch and has_compiled_backward():
        sites = [tap.site for tap in taps if isinstance(tap, GraphGradientTap) and tap.is_in_graph]
        if sites:
            error.add_note(
                f"hookline: the gradient of {sites[0]} leaves compiled code, and {_COMPILED_AGAIN}."
            )


_COMPILED_AGAIN = (
    "compiled autograd compiles the backward of compiled code again, and may drop or refuse"
    " hookline's part in it; call backward() without compiled autograd"
    " (torch._dynamo.config.compiled_autograd = False), or do not compile the model"
)
_WRITTEN_BY_GRAPH = (
    "compiled code got it from outside and writes to it in place, so the gradient of its earlier"
    " value cannot be told; make that operation not in place, or .clone() before"
)
_FROM_BEFORE = (
    "it came into a reentrant checkpoint from outside, and compiled code in the checkpoint gets"
    " only the gradient that flows through the checkpoint; checkpoint with use_reentrant=False, or"
    " change it where it was computed"
)
_SHARED_OUTPUT = (
    "it is a view that was changed in place later, or that compiled code returns together with"
    " others of the same memory, so its gradient cannot be told from theirs; make the operation not"
    " in place, or .clone() the view"
)
