"""The base of all taps on gradients.

Gradient taps do not use `register_full_backward_hook`. That hook misses outputs in dicts and
dataclasses, misses keyword inputs, and forbids in-place operations after a module. The tensor hook
on a value holds the pass in which the value flowed, so it is right in any thread that autograd
uses. The tensor hook holds no tensor, so it keeps no graph alive. In compiled code it is part of
the graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine.autograd.aliases import has_aliases
from hookline.engine.autograd.gradient_operator import (
    ENDED,
    LOST,
    emptied,
    hook_in_graph,
    number_of,
    outline,
    place_in,
    untraced_views,
)
from hookline.engine.autograd.module_backward import CallGradients
from hookline.engine.autograd.written_views import GradHook, HookedView, hook_value
from hookline.engine.compile.in_graph import NO_PASS, GraphCapture, GraphGradient
from hookline.engine.compile.runs import CompiledRun, run_of
from hookline.engine.passes.modes import hides_gradients, map_batch, refuse_mapped
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.pytree import leaves, outlines, tree
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Order, Tap, no_callback
from hookline.engine.torch_private.autograd import (
    hook_node_before,
    is_run_of_compiled,
    is_written_by_compiled,
    outer_backward,
    version_counter,
)
from hookline.engine.torch_private.distributed import Source, source_of
from hookline.engine.torch_private.dynamo import come_from_outside, next_hook, while_tracing
from hookline.engine.torch_private.graph.checkpoint import region_of, result_of
from hookline.engine.torch_private.modes import is_of_older_vmap
from hookline.engine.torch_private.modules import PYTHON_NODE
from hookline.errors import AttachError, StructureError, warn
from hookline.util.stopwatch import STOPWATCH

# The key in `Pass.opened` of the root's inputs.
ROOT_INPUTS = object()


@final
class PendingGradient:
    """One value of one call, whose gradients are pending.

    Args:
        call: the number of the call within its pass.

    Attributes:
        form: the value's structure, each tensor that has a gradient as a numbered `Slot`; None for
            a lone tensor.
        gathered: the state that a verb keeps for a value of several tensors, by run of autograd.
    """

    __slots__ = ("call", "form", "gathered")

    def __init__(self, call: int) -> None:
        self.call = call
        self.form: Any = None
        self.gathered: dict[Any, Any] = {}


class Call(NamedTuple):
    """One call of a module, while the value at a site is available.

    Attributes:
        current: the pass.
        number: the number of the call within the pass.
        owner: the module's id; it orders the hooks of several modules on one tensor.
        aliases: the aliases that raw backward hooks have put in place of the call's tensors.
    """

    current: Pass
    number: int
    owner: int
    aliases: CallGradients | None = None

    @property
    def first(self) -> Pass:
        """Return the pass that the call's gradients belong to."""
        again = self.current.recomputation
        return self.current if again is None else again.pass_of_gradients()


class Early(NamedTuple):
    """Name the tensors of a value that got hooks in the first run of a reentrant checkpoint.

    They came into the region from outside. Their whole gradients arrive outside, too: the second
    run has only the region's share of them.

    Attributes:
        pending: the value. The second run adds the tensors that were made inside.
        slots: the slots of these tensors, by their index among the value's tensors. Slots of early
            tensors are negative, since the second run counts its own from 0.
        results: the slots by `result_of` the tensors, since the second run may meet them again.
    """

    pending: PendingGradient
    slots: Mapping[int, int]
    results: Mapping[tuple[Any, int], int]


class GraphValue(NamedTuple):
    """Describe a value whose gradients come out of a compiled graph.

    Attributes:
        pending: the value.
        ignored: the slots whose gradients are ignored, because hooks outside of the graph get them.
    """

    pending: PendingGradient
    ignored: frozenset[int | None]


# Tensors that a graph got from outside: slot, tensor, and the hook's number in tracing order.
Outside = tuple[tuple[int, Tensor, str], ...]

# The slot of each tensor in a value, in a graph; None for a tensor that requires no gradient.
Slots = tuple[int | None, ...]


class GradientCallback:
    """A verb's callback for the gradients at one site. The base class does nothing."""

    __slots__ = ()
    # Whether the model trains on other numbers once this callback is no longer called.
    changes = False
    # Whether the kept values hold the graph; the graph's hooks must then not hold these values.
    keeps_graph = False
    # Whether it is fine if no gradient ever arrives.
    optional = False
    # Whether to warn at once of a gradient that cannot be told from others.
    warns = True
    # `inside` changes a gradient inside compiled code. `before_inside` is called outside the graph
    # with the gradient before the change.
    inside: Callable[[Tensor], Any] | None = None
    before_inside: Callable[[Tensor], Any] | None = None
    # Called with each tensor whose gradient is pending.
    awaits: Callable[[Pass, PendingGradient, int, Tensor], None] | None = None

    def arrived(
        self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor
    ) -> Tensor | None:
        """Handle the gradient of one tensor; a result other than None replaces the gradient."""

    def missing(self, current: Pass, pending: PendingGradient) -> None:
        """Handle a value that requires no gradient, so that no gradient will arrive."""


class GradientTap(Tap):
    """The base of the taps on gradients.

    Attributes:
        placed: the number of values whose gradients are or were pending.
        needless: the number of values that required no gradient.
        n_lost: the number of gradients that could not be told from others.
        lost: the reason.
        off: the number of values that flowed while gradients were disabled.
    """

    __slots__ = ("lost", "n_lost", "needless", "off", "on", "part", "placed", "told")

    def __init__(self, site: Site, passes: Passes, on: GradientCallback, rank: Order) -> None:
        super().__init__(site, passes, no_callback, rank)
        self.part = _part(site)
        self.on = on
        self.placed = self.needless = self.off = self.n_lost = 0
        self.told, self.lost = False, ""

    def _call(self, module: nn.Module, aliases: CallGradients | None = None) -> Call | None:
        """Count this call of the module and return it; None if its gradients are not wanted."""
        current = self._pass_of(module)
        if current is None:
            return None
        number: int = current.calls.get(self, 0)
        current.calls[self] = number + 1
        self.ran = max(self.ran, number + 1)
        is_wanted = self.site.call in (None, number)
        return Call(current, number, id(module), aliases) if is_wanted else None

    def _as_traced(self) -> GraphCapture:
        return GraphGradient(self.site.call, number_of(self), self.passes.switch)

    def trace(self, value: Any) -> None:
        """Hook a value in the graph being compiled, so that its gradients leave the graph."""
        self.is_traced()
        traced = self.active
        if not isinstance(traced, GraphGradient):
            return
        if not traced.is_meant():
            traced.add(None)
            return
        value = self.part(NO_PASS, value)
        is_on = torch.is_grad_enabled()
        found: list[Tensor] = []
        slots: list[int | None] = []
        for _, tensor in tree.tensors(value):
            slot = None
            if tensor.requires_grad:
                slot = place_in(found, tensor)
                if slot == len(found):
                    found.append(tensor)
            slots.append(slot)
        outside = self._hook_found(traced, found, is_on=is_on) if found else ()
        # The structure of a value with parts, with empty tensors.
        form = None if isinstance(value, Tensor) else tree.map_tensors(emptied, value)
        traced.add((tuple(slots), form, is_on, outside))

    def _hook_found(self, traced: GraphGradient, found: list[Tensor], *, is_on: bool) -> Outside:
        """Hook tensors in a graph, unless gradients are disabled.

        Returns:
            The tensors that the graph got from outside, by slot. Their gradients come from outside,
            too, so these tensors get hooks there.
        """
        call, of_run, owner = traced.n_calls(), traced.switch.number, self._owner()
        are_outside = come_from_outside(found)
        outside: Outside = ()
        for slot, tensor in enumerate(found):
            if are_outside[slot] != "0":
                number = next_hook() if are_outside[slot] == "1" else ""
                outside = (*outside, (slot, tensor, number))
            elif is_on:
                address = traced.number, of_run, call, slot
                hook_in_graph(tensor, address, owner, self.on)
        return outside

    @while_tracing
    def _owner(self) -> str:
        """Return the module's id as a string."""
        compiler = self.passes.compiler
        return "0" if compiler is None else str(compiler.owner_of(self))

    def collect(self, current: Pass, run: CompiledRun) -> None:
        """Count the values whose gradients are pending in a graph."""
        caught = () if self.traced is None else self.traced.taken()
        for view, _ in untraced_views():
            view.settle(is_over=False)
            self.note_view(current, view)
        n_before = run.n_before[self] = current.calls.get(self, 0)
        current.calls[self] = n_before + len(caught)
        self.ran = max(self.ran, n_before + len(caught))
        for call, known in enumerate(caught):
            if known is not None:
                self._collect_call(current, run, call, known)

    def _collect_call(self, current: Pass, run: CompiledRun, call: int, traced: Any) -> None:
        """Count one call's value whose gradients are pending in a graph."""
        slots, form, is_on, outside = traced
        number = run.n_before[self] + call
        early = self._early(current, number)
        pending = PendingGradient(number) if early is None else early.pending
        ignored: frozenset[int | None] = frozenset()
        if current.recomputation is not None and current.recomputation.is_repetition:
            ignored = frozenset(slots)
        elif early is not None:  # the graph has only a share of these tensors' gradients
            ignored = frozenset(slots[index] for index in early.slots)
        run.pending[self, call] = GraphValue(pending, ignored)
        outside = tuple([entry for entry in outside if entry[0] not in ignored])
        if not is_on:
            early = self._collect_off(current, pending, early, slots, outside)
        if form is not None:
            known_slots = {} if early is None else early.slots
            numbers = [known_slots.get(k, slot) for k, slot in enumerate(slots)]
            pending.form = outline(form, numbers)
        if is_on:
            self._collect_on(current, pending, slots, outside)

    def _collect_on(
        self, current: Pass, pending: PendingGradient, slots: Slots, outside: Outside
    ) -> None:
        is_again = current.recomputation is not None
        if not is_again or current.recomputation.has_gradients:
            self._wait_outside(current, pending, outside)
        if is_again:
            return
        if any(slot is not None for slot in slots):
            self.placed += 1
        else:
            self.needless += 1
            self.on.missing(current, pending)

    def _collect_off(
        self,
        current: Pass,
        pending: PendingGradient,
        early: Early | None,
        slots: Slots,
        outside: Outside,
    ) -> Early | None:
        """Handle a value that flowed while gradients were disabled.

        A tensor that came into a reentrant checkpoint from outside gets its hooks now, as in
        `wait`. A change inside the graph would reach only the checkpoint's share of the tensor's
        gradient.
        """
        if current.recomputation is not None and not current.region.is_reentrant:
            return early
        outside = tuple([entry for entry in outside if entry[1].grad_fn is not None])
        if not self._comes_later(current) or not outside:
            return early
        if self.on.inside is not None:
            self.lose(_FROM_BEFORE)
            return early
        places = {slot: -1 - slots.index(slot) for slot, _, _ in outside}
        hooked = tuple([(places[slot], tensor, number) for slot, tensor, number in outside])
        self._wait_outside(current, pending, hooked)
        early = early or Early(pending, {}, {})
        hooked_slots = {index: places[slot] for index, slot in enumerate(slots) if slot in places}
        return self._note_early(current, pending, {**early.slots, **hooked_slots}, early.results)

    def _wait_outside(self, current: Pass, pending: PendingGradient, outside: Outside) -> None:
        """Hook the tensors that a graph got from outside; after the run, these tensors exist."""
        compiler = self.passes.compiler
        owner = 0 if compiler is None else compiler.owner_of(self)
        first = (
            current if current.recomputation is None else current.recomputation.pass_of_gradients()
        )
        for slot, tensor, number in outside:
            # It is known who wrote last, not when: the write may be of code that ran earlier.
            if not number or is_written_by_compiled(tensor):
                self.lose(_WRITTEN_BY_GRAPH)
            else:
                hook = self._hook_for(first, pending, slot)
                self._put(current, tensor, hook, owner, int(number))
                if self.on.awaits is not None:
                    self.on.awaits(current, pending, slot, tensor)

    def _hook_for(self, first: Pass, pending: PendingGradient, slot: int) -> GradHook:
        if self.on.keeps_graph:
            hook = GradHook(self._arrive_weakly, weakref.ref(first), pending, slot)
        else:
            hook = GradHook(self.arrive, first, pending, slot)
        if STOPWATCH.readers and self.rank >= Order.GRAD_READ:  # what only looks is not the model's
            return GradHook(STOPWATCH.leave_out, hook)
        return hook

    def _put(
        self, current: Pass, tensor: Tensor, hook: GradHook, owner: int, number: int | None = None
    ) -> None:
        """Register a hook on a tensor."""
        node = tensor.grad_fn
        if isinstance(node, PYTHON_NODE):
            source = source_of(tensor)
            if source is not None:
                self._put_on_source(current, source, hook, owner, number)
                return
            if is_run_of_compiled(node):
                at_run = GradHook(self._at_compiled, hook, tensor.output_nr)
                hook_node_before(node, at_run, owner, number)
                return
            if self._put_in_region(current, node, tensor.output_nr, hook, owner):
                return
        view = hook_value(tensor, hook, self.lose, owner, number)
        if view is not None:
            self.note_view(current, view)

    def _put_in_region(
        self, current: Pass, node: Any, index: int, hook: GradHook, owner: int
    ) -> bool:
        """Register a hook on the tensor that the function of a reentrant checkpoint returned.

        The gradient of the checkpoint's own output lacks the uses inside the function.

        Args:
            current: the pass.
            node: a node of the graph.
            index: the index of a tensor among the results of the node.
            hook: the hook.
            owner: the hook's owner.

        Returns:
            False if the node is not a checkpoint's, or the checkpoint's output must get the hook.
        """
        region = region_of(node)
        if region is None or index >= len(region.made_inside):
            return False
        if region.made_inside[index]:
            region.at_outputs.append(partial(self._put_again, index, hook, owner))
            return True
        origin = region.passed_on[index]
        if origin is None:
            return False
        outside = origin.tensor()
        if outside is not None and outside.grad_fn is origin.node:
            self._put(current, outside, hook, owner)
        elif not self._put_in_region(current, origin.node, origin.number, hook, owner):
            hook_node_before(origin.node, GradHook(_at_node, hook, origin.number), owner)
        return True

    def _put_again(self, index: int, hook: GradHook, owner: int, outputs: Sequence[Any]) -> None:
        """Register a hook on a tensor that a region's second run returns."""
        current, tensor = self.in_thread.running, outputs[index]
        if current is not None and isinstance(tensor, Tensor) and tensor.requires_grad:
            self._put(current, tensor, hook, owner)

    def _put_on_source(
        self, current: Pass, source: Source, hook: GradHook, owner: int, number: int | None
    ) -> None:
        """Register a hook on the tensor that a parallel library has replaced.

        This tensor's gradient is over all uses.
        """
        if source.layout is not None:
            hook = GradHook(source.layout.call, hook)
        if source.tensor is not None:
            self._put(current, source.tensor, hook, owner, number)
            return
        counter = version_counter(source.alias)
        at_view = GradHook(self._at_source, hook, source.number, counter, counter._version)
        hook_node_before(source.node, at_view, owner, number)

    def _at_source(
        self,
        hook: GradHook,
        index: int,
        counter: Tensor,
        version: int,
        grads: tuple[Tensor | None, ...],
    ) -> Any:
        """Call the hook at a view's node; the gradient is complete if nobody wrote to the view."""
        if counter._version != version:
            self.lose()
            return None
        return _at_node(hook, index, grads)

    def _at_compiled(self, hook: GradHook, index: int, grads: tuple[Tensor | None, ...]) -> Any:
        """Call a hook at the node of a compiled run, for one of the tensors that it returned.

        The node does not show gradients that flow from one returned tensor to another inside the
        compiled code. So the gradient is known only if no other returned tensor has a gradient from
        outside.
        """
        if any(one is not None for k, one in enumerate(grads) if k != index):
            self.lose(INSIDE)
            return None
        return _at_node(hook, index, grads)

    def arrived_from_graph(self, number: int, call: int, slot: int, grad: Tensor) -> None:
        """Handle a gradient that has left a compiled graph."""
        if call == LOST:
            self.lose(_SHARED_OUTPUT)
            return
        if self.on.inside is not None and self.passes.closed:
            raise AttachError(ENDED.format(site=self.site))
        if self.on.before_inside is not None and grad.dtype is not torch.int64:
            self.on.before_inside(grad)
            return
        run = run_of(number)
        current = None if run is None else run.current
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
            self.arrive(current, pending, slot, grad)
        else:
            self._arrives(pending)

    def wait(self, call: Call, value: Any) -> None:
        """Hook each tensor of a value and wait for the gradients."""
        current = call.current
        is_on = torch.is_grad_enabled()
        if not is_on and not self._comes_later(current):
            return
        value = self.part(current, value)
        early = self._early(current, call.number)
        pending = PendingGradient(call.number) if early is None else early.pending
        slots: dict[int, int] = {}
        if not is_on:
            early = self._hook_early(call, pending, early, value)
        if early is not None:
            tensors = enumerate(tensor for _, tensor in tree.tensors(value))
            slots = {id(tensor): early.slots[k] for k, tensor in tensors if k in early.slots}
        if is_on:
            results = {} if early is None else {**early.results}
            self._hook_all(call, pending, value, slots, results)
        if not isinstance(value, Tensor):
            pending.form = outlines.outline(value, lambda tensor: slots.get(id(tensor)))
        if not is_on:
            return
        if slots:
            self.placed += current.recomputation is None
        else:
            self.placed -= current.recomputation is not None
            self.count_needless(value)
            self.on.missing(call.first, pending)

    def _early(self, current: Pass, call: int) -> Early | None:
        """Return the tensors of a call's value that got their hooks in the first run."""
        again = current.recomputation
        return None if again is None else again.early(self, call)

    def _note_early(
        self,
        current: Pass,
        pending: PendingGradient,
        slots: Mapping[int, int],
        results: Mapping[tuple[Any, int], int],
    ) -> Early:
        """Keep the tensors that have got their hooks in the first runs of a region."""
        early = current.region.early[self, pending.call] = Early(pending, slots, results)
        return early

    def _hook_early(
        self, call: Call, pending: PendingGradient, early: Early | None, value: Any
    ) -> Early | None:
        """Hook the tensors that came into a reentrant checkpoint from outside."""
        slots = {} if early is None else {**early.slots}
        results = {} if early is None else {**early.results}
        n_before = len(slots)
        for index, (_, tensor) in enumerate(tree.tensors(value)):
            if tensor.grad_fn is None or index in slots:
                continue
            result = result_of(tensor)
            if result not in results:
                results[result] = -1 - index
                self._hook_slot(call, pending, -1 - index, tensor)
            slots[index] = results[result]
        if len(slots) == n_before:
            return early
        return self._note_early(call.current, pending, slots, results)

    def _hook_all(
        self,
        call: Call,
        pending: PendingGradient,
        value: Any,
        slots: dict[int, int],
        results: dict[tuple[Any, int], int],
    ) -> None:
        """Hook each tensor of a value. Add the slots of the hooked tensors, by tensor id."""
        is_lone = isinstance(value, Tensor) and not results
        for tensor in (value,) if isinstance(value, Tensor) else tree.distinct(value):
            if id(tensor) in slots or not tensor.requires_grad:
                continue
            result = None if is_lone or tensor.grad_fn is None else result_of(tensor)
            if result is not None and result in results:
                slots[id(tensor)] = results[result]
                continue
            slot = len(slots)
            if self._hook_slot(call, pending, slot, tensor):
                slots[id(tensor)] = slot
                if result is not None:
                    results[result] = slot

    def _hook_slot(self, call: Call, pending: PendingGradient, slot: int, tensor: Tensor) -> bool:
        """Hook one tensor of a value, and tell whether it was hooked."""
        if not self._hook_tensor(call, tensor, self._hook_for(call.first, pending, slot)):
            return False
        if self.on.awaits is not None:
            self.on.awaits(call.current, pending, slot, tensor)
        return True

    def _hook_tensor(self, call: Call, tensor: Tensor, hook: GradHook) -> bool:
        """Hook a tensor and tell whether it was hooked; a hook on a leaf would outlive the pass."""
        aliases = call.aliases
        index = None if aliases is None else aliases.index(tensor)
        if aliases is not None and index is not None:
            origin = aliases.origin(index)
            if origin is None:
                aliases.subscribe(self.rank, hook, index)
            else:
                self._put(call.current, origin, hook, call.owner)
        elif tensor.grad_fn is not None:
            self._put(call.current, tensor, hook, call.owner)
        else:
            if not has_aliases(tensor):
                self.lose(_NO_ALIAS)
            return False
        return True

    def _comes_later(self, current: Pass) -> bool:
        """Tell whether gradients, disabled now, come in the recomputation of a region."""
        region = current.region
        if region is None or not region.is_reentrant:
            self.off += 1
            return False
        self.placed += current.recomputation is None
        if self.on.changes:
            region.at_late.add(self._late)
        return True

    def _again(self, current: Pass) -> Pass | None:
        return current if current.recomputation.has_gradients else None

    def count_needless(self, value: Any) -> None:
        """Count a value that seems to require no gradient.

        Raises:
            AttachError: the value does require a gradient, and no hook on it would be called.
        """
        if not self.on.optional and any(hides_gradients(one) for _, one in tree.tensors(value)):
            refuse_mapped(str(self.site))
        self.needless += 1

    def lose(self, why: str = "") -> None:
        """Warn that a gradient cannot be told from others.

        Raises:
            AttachError: the gradient was to be changed.
        """
        self.lost = why or _LOST
        if self.on.changes:
            raise AttachError(f"{self.site} cannot be changed: {self.lost}.")
        if self.on.warns and not self.n_lost:
            warn(f"{self.site} has no gradient: {self.lost}.")
        self.n_lost += 1

    def note_view(self, current: Pass, view: HookedView) -> None:
        """Settle a view when the pass ends, and at the root's border if it is of a root input."""
        lasts = current.roots or current.recomputation is not None or current.opened.get(self)
        if lasts:  # hold the base until then, or the write could not be found
            current.at_end.append(partial(_settle, view, view.base()))
        for base, views in current.opened.get(ROOT_INPUTS, ()):
            if (outside := base()) is not None and view.is_of(outside):
                views.append(weakref.ref(view))

    def arrive(
        self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor | None
    ) -> Tensor | None:
        """Handle a gradient: the hook that is registered on tensors.

        Where one operation has several results, torch calls the hooks on all of them, with None for
        each result without a gradient.
        """
        if grad is None:
            return None
        if self.passes.closed:
            self._late()
            return None
        if is_of_older_vmap(grad):
            return map_batch(partial(self.arrive, current, pending, slot), grad)
        self._arrives(pending)
        try:
            new = self.on.arrived(current, pending, slot, grad)
            if new is not None and grad.is_nested and grad.layout is torch.strided:
                raise StructureError(
                    f"{self.site}: torch accepts no changed gradient of a strided nested tensor."
                    "\nMake the tensor with layout=torch.jagged."
                )
            return new
        except Exception as error:
            self._note_backward(error)
            raise

    def _arrives(self, pending: PendingGradient) -> None:
        if pending.form is None:
            self.fired += 1
            return
        run = outer_backward()
        if run not in pending.gathered:  # count each value once, however many tensors it holds
            pending.gathered[run] = None
            self.fired += 1

    def _arrive_weakly(self, of: Any, pending: PendingGradient, slot: int, grad: Tensor) -> Any:
        current = of()
        return None if current is None else self.arrive(current, pending, slot, grad)

    def _late(self) -> None:
        if self.on.changes and not self.told:
            self.told = True
            warn(
                f"{self.site} was to be changed, but its line ended before this backward ran, so"
                " the gradient was not.\nCall backward() inside the block."
            )

    def _note_backward(self, error: Exception) -> None:
        self._note(error)
        error.add_note(
            "hookline: the backward pass stopped there. Parameters that it had reached before have"
            " their .grad already, the others not: zero_grad() before you go on."
        )

    @property
    def is_excused(self) -> bool:
        """Tell whether no gradient was due: the site is optional, or no value requires one."""
        needless = self.needless > 0 and not self.placed
        return not self.on.changes and (self.on.optional or needless)

    def why_silent(self) -> str | None:
        """Say why no gradient arrived."""
        if self.off and not (self.placed or self.needless):
            return "it ran under torch.no_grad() or inference_mode(); run it with gradients enabled"
        if self.n_lost:
            return self.lost
        if self.needless and not self.placed:
            return _NEEDLESS
        if self.placed:
            return NO_BACKWARD
        return super().why_silent()


def _at_node(hook: GradHook, index: int, grads: tuple[Tensor | None, ...]) -> Any:
    """Call a hook with one of the gradients at a node: the hook on the node."""
    grad = grads[index]
    new = None if grad is None else hook(grad)
    return None if new is None else (*grads[:index], new, *grads[index + 1 :])


def _settle(view: HookedView, base: Tensor | None) -> None:
    view.settle(is_over=False)


_LOST = (
    "it is a view that was changed in place later, so its gradient cannot be told from its base's;"
    " make that operation not in place, or .clone() before"
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
INSIDE = (
    "code that was compiled by itself returned it together with others, and the gradient that flows"
    " to it through those, inside, cannot be seen; compile the model as a whole, or select a part"
    " that is used alone (':grad_output[0]'), or disable compilation: torch.compiler.disable(part)"
)
_SHARED_OUTPUT = (
    "it is a view that was changed in place later, or that compiled code returns together with"
    " others of the same memory, so its gradient cannot be told from theirs; make the operation not"
    " in place, or .clone() the view"
)
_NO_ALIAS = (
    "it is a leaf of a layout of which torch makes no alias (sparse), so its gradient here cannot"
    " be told from the gradient of all its uses; record the latter, a parameter's ports='grad'; or"
    " have the module return the result of an operation"
)
NO_BACKWARD = (
    "no gradient flowed back to it while the line lasted; call backward() inside the block, on a"
    " loss that depends on it, and not for others alone (backward(inputs=...), autograd.grad)"
)
_NEEDLESS = (
    "the value there requires no gradient; nothing before it requires one (frozen parameters, an"
    " input without requires_grad)"
)


def _part(site: Site) -> Callable[[Pass, Any], Any]:
    if not site.leaf:
        return _whole
    leaf, where = site.leaf, str(site)
    return lambda _, value: leaves.get(value, leaf, where)


def _whole(_: Pass, value: Any) -> Any:
    return value


def guarded(function: Callable[[Any], Any], given: Any, where: str) -> Any:
    """Call a user's function on gradients, which it may replace but not change in place.

    Raises:
        StructureError: the function changed a gradient in place.
    """
    tensors = [tensor for _, tensor in tree.tensors(given)]
    before = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    result = function(given)
    after = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    if before != after:
        raise StructureError(
            f"the hook at {where} changed a gradient in place, and all that share its memory."
            "\nReturn a new tensor instead: g.clamp(min=0), not g.clamp_(min=0)."
        )
    return result
