"""The base of all taps on gradients.

Gradient taps do not use `register_full_backward_hook`. That hook misses outputs in dicts and
dataclasses, misses keyword inputs, and forbids in-place operations after a module. The tensor hook
on a value holds the pass in which the value flowed, so it is right in any thread that autograd
uses. The tensor hook holds no tensor, so it keeps no graph alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from hookline.engine.autograd.aliases import can_be_aliased
from hookline.engine.autograd.module_backward import CallGradients
from hookline.engine.autograd.view_hooks import GradHook, HookedView, hook_value_gradient
from hookline.engine.passes.modes import (
    is_vmapped_with_gradient,
    map_legacy_vmap,
    vmapped_gradient_text,
)
from hookline.engine.passes.passes import Pass, Passes
from hookline.engine.pytree import leaves, outlines, tree
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Order, Tap, do_nothing
from hookline.engine.torch_private.autograd import (
    is_compiled_node,
    outer_backward_number,
    prehook_node,
    version_counter,
)
from hookline.engine.torch_private.distributed import ReplacedTensor, find_replaced_tensor
from hookline.engine.torch_private.graph.checkpoint import producer_of, reentrant_region_of
from hookline.engine.torch_private.modes import is_legacy_batched
from hookline.engine.torch_private.modules import PYTHON_NODE
from hookline.errors import AttachError, StructureError, warn
from hookline.util.stopwatch import STOPWATCH

# The key in `Pass.opened` of the root's inputs.
ROOT_INPUTS = object()


@final
@dataclass(slots=True, eq=False)
class PendingGradient:
    """One value of one call, whose gradients are pending.

    Args:
        call: the number of the call within its pass.

    Attributes:
        form: the value's structure, each tensor that has a gradient as a numbered `Slot`; None for
            a lone tensor.
        gathered: the state that a verb keeps for a value of several tensors, by run of autograd.
    """

    call: int
    form: Any = None
    gathered: dict[Any, Any] = field(default_factory=dict)


class TappedCall(NamedTuple):
    """One call of a module, while the value at a site is available."""

    current: Pass
    number: int  # the number of the call within the pass
    owner: int  # the module's id; it orders the hooks of several modules on one tensor
    # The aliases that raw backward hooks have put in place of the call's tensors.
    aliases: CallGradients | None = None


def gradient_pass(current: Pass) -> Pass:
    """Return the pass that the gradients of a pass belong to: in a recomputation, another one."""
    again = current.recomputation
    return current if again is None else again.gradient_pass()


class FirstRunHooks(NamedTuple):
    """Name the tensors of a value that got hooks in the first run of a reentrant checkpoint.

    They came into the region from outside. Their whole gradients arrive outside, too: the second
    run has only the region's share of them.
    """

    pending: PendingGradient  # the second run adds the tensors that were made inside
    # The slots of these tensors, by their index among the value's tensors. Slots of these tensors
    # are negative, since the second run counts its own from 0.
    slots: Mapping[int, int]
    # The slots by `producer_of` the tensors, since the second run may meet them again.
    results: Mapping[tuple[Any, int], int]


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

    def on_gradient(
        self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor
    ) -> Tensor | None:
        """Handle the gradient of one tensor; a result other than None replaces the gradient."""

    def on_no_gradient(self, current: Pass, pending: PendingGradient) -> None:
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

    __slots__ = ("has_warned", "lost", "n_lost", "needless", "off", "on", "part", "placed")
    needs_graph: ClassVar[bool] = True

    def __init__(self, site: Site, passes: Passes, on: GradientCallback, order: Order) -> None:
        super().__init__(site, passes, do_nothing, order)
        self.takes_blocks = True  # if no graph is there: a graph needs the whole pattern
        self.part: Callable[..., Any] = _leaf_getter(site)
        self.on: GradientCallback = on
        self.placed: int = 0
        self.needless: int = 0
        self.off: int = 0
        self.n_lost: int = 0
        self.has_warned: bool = False
        self.lost: str = ""

    def _count_call(
        self, module: nn.Module, aliases: CallGradients | None = None
    ) -> TappedCall | None:
        """Count this call of the module and return it; None if its gradients are not wanted."""
        current = self._pass_of(module)
        if current is None:
            return None
        number: int = current.calls.get(self, 0)
        current.calls[self] = number + 1
        self.ran: int = max(self.ran, number + 1)
        is_wanted = self.site.call in (None, number)
        return TappedCall(current, number, id(module), aliases) if is_wanted else None

    def _make_hook(self, first: Pass, pending: PendingGradient, slot: int) -> GradHook:
        if self.on.keeps_graph:
            hook = GradHook(self._receive_unless_pass_freed, weakref.ref(first), pending, slot)
        else:
            hook = GradHook(self.receive_gradient, first, pending, slot)
        if (
            STOPWATCH.readers and self.order >= Order.GRAD_READ
        ):  # what only looks is not the model's
            return GradHook(STOPWATCH.call_untimed, hook)
        return hook

    def _hook_gradient_of(
        self,
        current: Pass,
        tensor: Tensor,
        hook: GradHook,
        owner: int,
        trace_order: int | None = None,
    ) -> None:
        """Register a hook on a tensor."""
        node = tensor.grad_fn
        if isinstance(node, PYTHON_NODE):
            source = find_replaced_tensor(tensor)
            if source is not None:
                self._hook_replaced_tensor(current, source, hook, owner, trace_order)
                return
            if is_compiled_node(node):
                at_run = GradHook(self._call_at_compiled_node, hook, tensor.output_nr)
                prehook_node(node, at_run, owner, trace_order)
                return
            if self._hook_region_output(current, node, tensor.output_nr, hook, owner):
                return
        view = hook_value_gradient(tensor, hook, self.warn_ambiguous, owner, trace_order)
        if view is not None:
            self.settle_view_later(current, view)

    def _hook_region_output(
        self, current: Pass, node: Any, index: int, hook: GradHook, owner: int
    ) -> bool:
        """Register a hook on the tensor that the function of a reentrant checkpoint returned.

        The gradient of the checkpoint's own output lacks the uses inside the function. Return False
        if the node is not a checkpoint's, or if the checkpoint's output must get the hook.
        """
        region = reentrant_region_of(node)
        if region is None or index >= len(region.made_inside):
            return False
        if region.made_inside[index]:
            region.at_outputs.append(partial(self._hook_recomputed, index, hook, owner))
            return True
        origin = region.passed_on[index]
        if origin is None:
            return False
        outside = origin.tensor()
        if outside is not None and outside.grad_fn is origin.node:
            self._hook_gradient_of(current, outside, hook, owner)
        elif not self._hook_region_output(current, origin.node, origin.number, hook, owner):
            prehook_node(origin.node, GradHook(_call_at_node, hook, origin.number), owner)
        return True

    def _hook_recomputed(
        self, index: int, hook: GradHook, owner: int, outputs: Sequence[Any]
    ) -> None:
        """Register a hook on a tensor that a region's second run returns."""
        current, tensor = self.in_thread.running, outputs[index]
        if current is not None and isinstance(tensor, Tensor) and tensor.requires_grad:
            self._hook_gradient_of(current, tensor, hook, owner)

    def _hook_replaced_tensor(
        self,
        current: Pass,
        source: ReplacedTensor,
        hook: GradHook,
        owner: int,
        trace_order: int | None,
    ) -> None:
        """Register a hook on the tensor that a parallel library has replaced.

        This tensor's gradient is over all uses.
        """
        if source.layout is not None:
            hook = GradHook(source.layout.call_hook, hook)
        if source.tensor is not None:
            self._hook_gradient_of(current, source.tensor, hook, owner, trace_order)
            return
        counter = version_counter(source.alias)
        at_view = GradHook(self._call_at_view_node, hook, source.number, counter, counter._version)
        prehook_node(source.node, at_view, owner, trace_order)

    def _call_at_view_node(
        self, hook: GradHook, index: int, counter: Tensor, version: int, grads: Sequence[Any]
    ) -> Any:
        """Call the hook at a view's node; the gradient is complete if nobody wrote to the view."""
        if counter._version != version:
            self.warn_ambiguous()
            return None
        return _call_at_node(hook, index, grads)

    def _call_at_compiled_node(
        self, hook: GradHook, index: int, grads: tuple[Tensor | None, ...]
    ) -> Any:
        """Call a hook at the node of a compiled run, for one of the tensors that it returned.

        The node does not show gradients that flow from one returned tensor to another inside the
        compiled code. So the gradient is known only if no other returned tensor has a gradient from
        outside.
        """
        if any(grad is not None for k, grad in enumerate(grads) if k != index):
            self.warn_ambiguous(INSIDE)
            return None
        return _call_at_node(hook, index, grads)

    def hook_tensors(self, call: TappedCall, value: Any) -> None:
        """Hook each tensor of a value and wait for the gradients."""
        current = call.current
        is_on = torch.is_grad_enabled()
        if not is_on and not self._gradients_come_in_recomputation(current):
            return
        value = self.part(current, value)
        first_hooks = self._first_run_hooks(current, call.number)
        pending = PendingGradient(call.number) if first_hooks is None else first_hooks.pending
        slots: dict[int, int] = {}
        if not is_on:
            first_hooks = self._hook_checkpoint_inputs(
                call, first_hooks or FirstRunHooks(pending, {}, {}), value
            )
        if first_hooks is not None:
            tensors = enumerate(tensor for _, tensor in tree.tensors(value))
            slots = {
                id(tensor): first_hooks.slots[k] for k, tensor in tensors if k in first_hooks.slots
            }
        if is_on:
            results = {} if first_hooks is None else {**first_hooks.results}
            self._hook_distinct_tensors(call, pending, value, slots, results)
        if not isinstance(value, Tensor):
            pending.form = outlines.outline(value, lambda tensor: slots.get(id(tensor)))
        if not is_on:
            return
        if slots:
            self.placed += current.recomputation is None
        else:
            self.placed -= current.recomputation is not None
            self.count_value_without_grad(value)
            self.on.on_no_gradient(gradient_pass(current), pending)

    def _first_run_hooks(self, current: Pass, call: int) -> FirstRunHooks | None:
        """Return the tensors of a call's value that got their hooks in the first run."""
        again = current.recomputation
        return None if again is None else again.first_run_hooks(self, call)

    def _keep_first_run_hooks(self, current: Pass, first_hooks: FirstRunHooks) -> FirstRunHooks:
        """Keep the tensors that have got their hooks in the first runs of a region."""
        current.region.first_run_hooks[self, first_hooks.pending.call] = first_hooks
        return first_hooks

    def _hook_checkpoint_inputs(
        self, call: TappedCall, first_hooks: FirstRunHooks, value: Any
    ) -> FirstRunHooks:
        """Hook the tensors that came into a reentrant checkpoint from outside."""
        slots, results = {**first_hooks.slots}, {**first_hooks.results}
        for index, (_, tensor) in enumerate(tree.tensors(value)):
            if tensor.grad_fn is None or index in slots:
                continue
            result = producer_of(tensor)
            if result not in results:
                results[result] = -1 - index
                self._hook_tensor_in_slot(call, first_hooks.pending, -1 - index, tensor)
            slots[index] = results[result]
        if len(slots) == len(first_hooks.slots):
            return first_hooks
        return self._keep_first_run_hooks(
            call.current, FirstRunHooks(first_hooks.pending, slots, results)
        )

    def _hook_distinct_tensors(
        self,
        call: TappedCall,
        pending: PendingGradient,
        value: Any,
        slot_by_id: dict[int, int],
        slot_by_result: dict[tuple[Any, int], int],
    ) -> None:
        """Hook each tensor of a value. Add the slots of the hooked tensors, by tensor id."""
        is_lone = isinstance(value, Tensor) and not slot_by_result
        for tensor in (value,) if isinstance(value, Tensor) else tree.distinct_tensors(value):
            if id(tensor) in slot_by_id or not tensor.requires_grad:
                continue
            result = None if is_lone or tensor.grad_fn is None else producer_of(tensor)
            if result is not None and result in slot_by_result:
                slot_by_id[id(tensor)] = slot_by_result[result]
                continue
            slot = len(slot_by_id)
            if self._hook_tensor_in_slot(call, pending, slot, tensor):
                slot_by_id[id(tensor)] = slot
                if result is not None:
                    slot_by_result[result] = slot

    def _hook_tensor_in_slot(
        self, call: TappedCall, pending: PendingGradient, slot: int, tensor: Tensor
    ) -> bool:
        """Hook one tensor of a value, and tell whether it was hooked.

        A hook on a leaf would outlive the pass.
        """
        hook = self._make_hook(gradient_pass(call.current), pending, slot)
        aliases = call.aliases
        index = None if aliases is None else aliases.alias_index(tensor)
        if aliases is not None and index is not None:
            origin = aliases.aliased_input(index)
            if origin is None:
                aliases.add_hook(self.order, hook, index)
            else:
                self._hook_gradient_of(call.current, origin, hook, call.owner)
        elif tensor.grad_fn is not None:
            self._hook_gradient_of(call.current, tensor, hook, call.owner)
        else:
            if not can_be_aliased(tensor):
                self.warn_ambiguous(_NO_ALIAS)
            return False
        if self.on.awaits is not None:
            self.on.awaits(call.current, pending, slot, tensor)
        return True

    def _gradients_come_in_recomputation(self, current: Pass) -> bool:
        """Tell whether gradients, disabled now, come in the recomputation of a region."""
        region = current.region
        if region is None or not region.is_reentrant:
            self.off += 1
            return False
        self.placed += current.recomputation is None
        if self.on.changes:
            region.at_late.add(self._warn_line_ended)
        return True

    def _recomputed_pass(self, current: Pass) -> Pass | None:
        return current if current.recomputation.has_gradients else None

    def count_value_without_grad(self, value: Any) -> None:
        """Count a value that seems to require no gradient.

        Raises:
            AttachError: the value does require a gradient, and no hook on it would be called.
        """
        if not self.on.optional and any(
            is_vmapped_with_gradient(tensor) for _, tensor in tree.tensors(value)
        ):
            raise AttachError(vmapped_gradient_text(str(self.site)))
        self.needless += 1

    def warn_ambiguous(self, why: str = "") -> None:
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

    def settle_view_later(self, current: Pass, view: HookedView) -> None:
        """Settle a view when the pass ends, and at the root's border if it is of a root input."""
        lasts = current.roots or current.recomputation is not None or current.opened.get(self)
        if lasts:
            current.at_end.append(view.write_finder())
        for base, views in current.opened.get(ROOT_INPUTS, ()):
            if (outside := base()) is not None and view.is_view_of(outside):
                views.append(weakref.ref(view))

    def receive_gradient(
        self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor | None
    ) -> Tensor | None:
        """Handle a gradient: the hook that is registered on tensors.

        Where one operation has several results, torch calls the hooks on all of them, with None for
        each result without a gradient.
        """
        if grad is None:
            return None
        if self.passes.closed:
            self._warn_line_ended()
            return None
        if is_legacy_batched(grad):
            return map_legacy_vmap(partial(self.receive_gradient, current, pending, slot), grad)
        self._count_arrival(pending)
        try:
            new = self.on.on_gradient(current, pending, slot, grad)
            if new is not None and grad.is_nested and grad.layout is torch.strided:
                raise StructureError(
                    f"{self.site}: torch accepts no changed gradient of a strided nested tensor."
                    "\nMake the tensor with layout=torch.jagged."
                )
            return new
        except Exception as error:
            self._add_backward_note(error)
            raise

    def _count_arrival(self, pending: PendingGradient) -> None:
        if pending.form is None:
            self.fired += 1
            return
        run = outer_backward_number()
        if run not in pending.gathered:  # count each value once, however many tensors it holds
            pending.gathered[run] = None
            self.fired += 1

    def _receive_unless_pass_freed(
        self, of: Any, pending: PendingGradient, slot: int, grad: Tensor
    ) -> Any:
        current = of()
        return None if current is None else self.receive_gradient(current, pending, slot, grad)

    def _warn_line_ended(self) -> None:
        if self.on.changes and not self.has_warned:
            self.has_warned = True
            warn(
                f"{self.site} was to be changed, but its line ended before this backward ran, so"
                " the gradient was not.\nCall backward() inside the block."
            )

    def _add_backward_note(self, error: Exception) -> None:
        self._add_error_note(error)
        error.add_note(
            "hookline: the backward pass stopped there. Parameters that it had reached before have"
            " their .grad already, the others not: zero_grad() before you go on."
        )

    @property
    def may_stay_silent(self) -> bool:
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


def _call_at_node(hook: GradHook, index: int, grads: Sequence[Tensor | None]) -> Any:
    """Call a hook with one of the gradients at a node: the hook on the node."""
    grad = grads[index]
    new = None if grad is None else hook(grad)
    return None if new is None else (*grads[:index], new, *grads[index + 1 :])


_LOST = (
    "it is a view that was changed in place later, so its gradient cannot be told from its base's;"
    " make that operation not in place, or .clone() before"
)
INSIDE = (
    "code that was compiled by itself returned it together with others, and the gradient that flows"
    " to it through those, inside, cannot be seen; compile the model as a whole, or select a part"
    " that is used alone (':grad_output[0]'), or disable compilation: torch.compiler.disable(part)"
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


def _leaf_getter(site: Site) -> Callable[[Pass, Any], Any]:
    if not site.leaf:
        return _get_whole
    leaf, where = site.leaf, str(site)
    return lambda _, value: leaves.get(value, leaf, where)


def _get_whole(_: Pass, value: Any) -> Any:
    return value


def call_gradient_function(function: Callable[[Any], Any], value: Any, where: str) -> Any:
    """Call a user's function on gradients, which it may replace but not change in place.

    Raises:
        StructureError: the function changed a gradient in place.
    """
    tensors = [tensor for _, tensor in tree.tensors(value)]
    before = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    result = function(value)
    after = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    if before != after:
        raise StructureError(
            f"the hook at {where} changed a gradient in place, and all that share its memory."
            "\nReturn a new tensor instead: g.clamp(min=0), not g.clamp_(min=0)."
        )
    return result
