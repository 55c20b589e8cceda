"""Raw backward hooks on modules, with torch's signatures.

`fn(module, grad_output)` runs before a module's backward. `fn(module, grad_input, grad_output)`
runs after it. As in torch, gradients are tuples, and a lone output gives a tuple of one. For an
output that is a dict, a `ModelOutput` or a dataclass, torch calls no hook. Here the gradients of
such an output keep its structure. Inputs are the positional arguments, then the keyword arguments
in the order in which they were given.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    GradHook,
    GradientCallback,
    GradientTap,
    HookSpec,
    Order,
    Pass,
    Passes,
    Site,
    at_end_of_backward,
    backward_number,
    call_frame,
    call_gradient_function,
    do_nothing,
    hook_value_gradient,
    outside_checkpoint,
    path_text,
    run_at_trace_time,
)
from hookline.engine.autograd.aliases import alias_leaves
from hookline.engine.autograd.module_backward import (
    CallGradients,
    alias_inputs,
    alias_saved_outputs,
    alias_several_outputs,
    output_gradients,
    refuse_ambiguous_gradient,
)
from hookline.engine.pytree import outlines, tree
from hookline.errors import AttachError, StructureError
from hookline.verbs.attach.check_returns import check_backward

Hook = Callable[..., Any]
Grads = list[Tensor | None]


@final
@dataclass(slots=True, eq=False)
class _PendingCall:
    """One call of a module whose backward is still to come.

    Args:
        module: a function that returns the module, for the user's function.
        frame: the id of the frame of the call.

    Attributes:
        flow: the gradients of the inputs until the call ends; None if no input requires a gradient.
        has_inputs: whether an input requires a gradient.
        inputs: the outline of the inputs.
        outputs: the outline of the outputs.
        waits: whether an output requires a gradient.
        grad_output: the gradients of the outputs that have arrived, by the run of autograd.
    """

    module: Callable[[], nn.Module | None]
    frame: int = 0
    flow: CallGradients | None = None
    has_inputs: bool = False
    inputs: Any = ()
    outputs: Any = None
    waits: bool = False
    grad_output: dict[int, dict[int, Tensor | None]] = field(default_factory=dict)


class _RawBackwardTap(GradientTap):
    """Call the user's function and check its result: the base of both kinds of tap."""

    __slots__ = ("function", "is_everywhere")

    def __init__(
        self, site: Site, passes: Passes, function: Hook, *, is_everywhere: bool = False
    ) -> None:
        super().__init__(site, passes, GradientCallback(), Order.GRAD_HOOK)
        self.function: Callable[..., Any] = function
        self.is_everywhere: bool = is_everywhere

    @property
    def _path(self) -> str:
        return path_text(self.site.path)

    @run_at_trace_time
    def refuse_compilation(self) -> None:
        """Refuse the compilation of code that calls this tap.

        Raises:
            AttachError: always, because a graph cannot hold a raw backward hook.
        """
        raise AttachError(
            f"{self._path} must run outside compiled code for raw backward hooks, got compiled"
            " code.\nUse hl.record or hl.edit at ':grad_output' or ':grad_input', or put"
            " torch.compiler.set_stance('force_eager') around the block."
        )

    def retire(self) -> None:
        """Stop firing, and drop the user's function."""
        super().retire()
        self.function = do_nothing

    def _count_and_list_tensors_to_hook(self, output: Any) -> list[Tensor]:
        """List the output tensors that require gradients, each once, and count the output."""
        distinct = tree.distinct_tensors(output)
        tensors = [t for t in distinct if t.requires_grad and t.grad_fn is not None]
        if tensors:
            self.placed += 1
        else:
            self.count_value_without_grad(output)
        return tensors

    def _order_or_everywhere(self, order: Order) -> Order:
        return Order.EVERYWHERE if self.is_everywhere else order

    def _hook_output_tensor(
        self, current: Pass, tensor: Tensor, hook: GradHook, module: nn.Module, *, reads: bool
    ) -> None:
        lost = GradHook(refuse_ambiguous_gradient, self._path)
        # torch calls process-wide hooks first. A tap that only reads must still come after those of
        # the module's own hooks that change gradients.
        is_last = reads and self.is_everywhere
        with outside_checkpoint(current.region):
            view = hook_value_gradient(tensor, hook, lost, id(module), is_last=is_last)
        if view is not None:
            self.settle_view_later(current, view)

    def _new_pending_call(self, module: nn.Module, frame: int = 0) -> _PendingCall:
        # Weakly, because a module that keeps its output would be held by that output's graph for
        # ever. The line holds its own modules while it lasts. Nothing else holds a module that
        # hl.EVERYWHERE met, so the call holds that one.
        return _PendingCall((lambda: module) if self.is_everywhere else weakref.ref(module), frame)

    def _call_user_hook(self, call: _PendingCall, old: Any, *rest: Any) -> Any:
        """Call the user's function with the gradients; return None if they stay unchanged."""
        module = call.module()
        if self.passes.closed or module is None:
            return None
        self.fired += 1
        try:
            result = call_gradient_function(
                lambda grads: self.function(module, *grads), (old, *rest), str(self.site)
            )
            return None if result is None else check_backward(result, old)
        except Exception as error:
            self._add_backward_note(error)
            raise


@final
class BackwardPreTap(_RawBackwardTap):
    """Call `fn(module, grad_output)` before the gradients of a module's outputs enter it."""

    __slots__ = ()
    hooks: tuple[HookSpec, HookSpec] = (
        HookSpec("forward", "join_output_gradients", Order.JOIN),
        HookSpec("forward", "fire", Order.GRAD_HOOK),
    )

    def join_output_gradients(self, module: nn.Module, args: Any, output: Any, key: int = 0) -> Any:
        """Join the gradients of several outputs in one node: an early forward hook."""
        if not key and is_dynamo_compiling():
            self.refuse_compilation()
        key = key or id(sys._getframe(1))
        current = self._pass_of(module)
        if current is None or not torch.is_grad_enabled():
            return None
        with outside_checkpoint(current.region):
            output, meeting = alias_several_outputs(
                key, self._path, alias_saved_outputs(key, output)
            )
        if meeting is None:
            return output
        call = self._new_pending_call(module)
        call.outputs = _outline_as_tuple(output, meeting.alias_index)

        def hook(grads: Grads) -> Grads | None:
            old = outlines.fill(call.outputs, dict(enumerate(grads)))
            new = self._call_user_hook(call, old)
            return None if new is None else _replace_gradients(call.outputs, new, grads)

        self.placed += 1
        meeting.add_hook(self._order_or_everywhere(Order.GRAD_HOOK), hook)
        return output

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Hook the gradient of a lone output: a forward hook among the module's other hooks."""
        current = self._pass_of(module)
        if current is None:
            return None
        with outside_checkpoint(current.region):
            value = alias_leaves(output)
        if not torch.is_grad_enabled():
            self._gradients_come_in_recomputation(current)
            return None
        tensors = self._count_and_list_tensors_to_hook(value)
        if len(tensors) != 1:
            return None
        call = self._new_pending_call(module)
        call.outputs = _outline_as_tuple(value, lambda tensor: 0 if tensor is tensors[0] else None)
        self._hook_output_tensor(
            current, tensors[0], GradHook(self._on_output_gradient, call), module, reads=False
        )
        return None if value is output else value

    def _on_output_gradient(self, call: _PendingCall, grad: Tensor) -> Tensor | None:
        new = self._call_user_hook(call, outlines.fill(call.outputs, {0: grad}))
        return None if new is None else _replace_gradients(call.outputs, new, [grad])[0]


@final
class BackwardTap(_RawBackwardTap):
    """Call `fn(module, grad_input, grad_output)` when a module's input gradients are complete."""

    __slots__ = ()
    hooks: tuple[HookSpec, HookSpec, HookSpec, HookSpec] = (
        HookSpec("forward_pre", "begin_call", Order.JOIN, with_kwargs=True),
        HookSpec("forward", "join_output_gradients", Order.JOIN),
        HookSpec("forward", "hook_output_gradients", Order.GRAD_READ),
        HookSpec("forward", "end_call", Order.CLOSE, always_call=True),
    )

    def begin_call(
        self, module: nn.Module, args: Any, kwargs: Any = None, frame: FrameType | None = None
    ) -> Any:
        """Replace the inputs by aliases: the forward-pre hook."""
        if frame is None and is_dynamo_compiling():
            self.refuse_compilation()
        if kwargs is None:
            return None  # another thread is removing this hook and has cleared its with_kwargs flag
        frame = frame or sys._getframe(1)
        current = self._pass_of(module)
        if current is None:
            return None
        call = self._new_pending_call(module, id(call_frame(frame)))
        current.opened.setdefault(self, []).append(call)
        if not torch.is_grad_enabled():
            self._gradients_come_in_recomputation(current)
            return None
        with outside_checkpoint(current.region):
            key = id(frame), id(module)
            args, kwargs, call.flow = alias_inputs(key, self._path, args, kwargs)
        entered = call.flow
        call.has_inputs = entered is not None
        if entered is not None and entered.view is not None:
            self.settle_view_later(current, entered.view)
        number = (lambda tensor: None) if entered is None else entered.alias_index
        call.inputs = tuple(outlines.outline(value, number) for value in (*args, *kwargs.values()))
        if entered is None:
            return None

        def hook(grads: Grads) -> Grads | None:
            if call.waits and backward_number() not in call.grad_output:
                return None  # it bypassed the outputs, as in a second derivative
            new = self._call_hook_with_gradients(call, dict(enumerate(grads)))
            return None if new is None else _replace_gradients(call.inputs, new, grads)

        # It gets what flowed through the module, before an edit (GRAD_EDIT) of the input.
        entered.add_hook(self._order_or_everywhere(Order.HOOK), hook)
        return args, kwargs

    def join_output_gradients(self, module: nn.Module, args: Any, output: Any, key: int = 0) -> Any:
        """Join the outputs' gradients where no input requires one: an early forward hook."""
        key = key or id(sys._getframe(1))
        call = self._current_call()
        if call is None or not torch.is_grad_enabled():
            return None
        with outside_checkpoint(call):
            output, meeting = alias_saved_outputs(key, output), None
            if call.flow is None:
                output, meeting = alias_several_outputs(key, self._path, output)
        if meeting is None:
            return output
        call.outputs = _outline_as_tuple(output, meeting.alias_index)

        def hook(grads: Grads) -> None:
            call.grad_output[backward_number()] = dict(enumerate(grads))
            self._call_hook_with_gradients(call, {})

        meeting.add_hook(Order.GRAD_READ, hook)
        return output

    def hook_output_gradients(self, module: nn.Module, args: Any, output: Any, key: int = 0) -> Any:
        """Note the outputs' gradients: a forward hook after all hooks that change gradients."""
        key = key or id(sys._getframe(1))
        call = self._current_call()
        current = self.in_thread.running
        if call is None or current is None or not torch.is_grad_enabled():
            return None
        with outside_checkpoint(current.region):
            value = alias_leaves(output)
        tensors = self._count_and_list_tensors_to_hook(value)
        if call.outputs is not None:
            return None
        call.waits = bool(tensors)
        numbers = {id(tensor): slot for slot, tensor in enumerate(tensors)}
        call.outputs = _outline_as_tuple(value, lambda tensor: numbers.get(id(tensor)))
        meeting = output_gradients(key)
        for slot, tensor in enumerate(tensors):
            hook = GradHook(self._on_output_gradient, call, slot)
            index = None if meeting is None else meeting.alias_index(tensor)
            if meeting is None or index is None:
                self._hook_output_tensor(current, tensor, hook, module, reads=True)
            else:
                meeting.add_hook(Order.GRAD_READ, hook, index)
        return None if value is output else value

    def _on_output_gradient(self, call: _PendingCall, slot: int, grad: Tensor) -> None:
        run = backward_number()
        if run not in call.grad_output:
            call.grad_output[run] = {}
            # Where no gradient of an input is wanted, nothing else removes the gradients.
            at_end_of_backward(partial(_drop_output_gradients, call, run))
        call.grad_output[run][slot] = grad
        if not call.has_inputs:  # no input requires a gradient, and this is the only output
            self._call_hook_with_gradients(call, {})

    def _call_hook_with_gradients(
        self, call: _PendingCall, input_grads: dict[int, Tensor | None]
    ) -> Any:
        grad_output = call.grad_output.pop(backward_number(), {})
        grad_input = outlines.fill(call.inputs, input_grads)
        return self._call_user_hook(call, grad_input, outlines.fill(call.outputs, grad_output))

    def end_call(
        self, module: nn.Module, args: Any, output: Any, frame: FrameType | None = None
    ) -> None:
        """End the call: the last forward hook, always called."""
        current = self.in_thread.running
        opened = None if current is None else current.opened.get(self)
        key = id(call_frame(frame or sys._getframe(1)))
        # A call whose pre-hooks failed was never opened. A call that Ctrl-C ended was never closed.
        if current is None or not opened or all(call.frame != key for call in opened):
            return
        while (call := opened.pop()).frame != key:
            pass
        if call.flow is not None:
            call.flow.end_call(output)
            call.flow = None  # the hooks of the flow hold the call
        if not opened and not current.roots:
            current.call_end_functions()

    def _current_call(self) -> _PendingCall | None:
        current = self.in_thread.running
        opened = None if current is None else current.opened.get(self)
        return opened[-1] if opened else None


def _drop_output_gradients(call: _PendingCall, run: int) -> None:
    call.grad_output.pop(run, None)


def _outline_as_tuple(output: Any, slot_of: Callable[[Tensor], int | None]) -> Any:
    """Return the outline of an output: of a tensor or a list as a tuple, as in torch."""
    if isinstance(output, Tensor):
        return (outlines.outline(output, slot_of),)
    form = outlines.outline(output, slot_of)
    return tuple(form) if isinstance(output, list) else form


def _replace_gradients(outline: Any, new: Any, old: Sequence[Tensor | None]) -> Grads:
    """Return the gradients by slot, with the new ones in place of the old.

    Raises:
        StructureError: a tensor that occurs several times got different gradients.
    """
    grads = list(old)
    new_grads: dict[int, Any] = {}
    for slot, grad in _values_by_slot(outline, new):
        if slot in new_grads and not _are_same_gradient(new_grads[slot], grad):
            raise StructureError(
                "the hook must return one gradient for each tensor, got several for a tensor that"
                " the module took or returned more than once."
                "\nReturn the same gradient, the sum, in each of its places."
            )
        grads[slot] = new_grads[slot] = grad
    return grads


def _are_same_gradient(a: Any, b: Any) -> bool:
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return a is b or (are_tensors and torch.equal(a, b))


def _values_by_slot(form: Any, value: Any) -> Iterator[tuple[int, Any]]:
    """Yield each slot of a form, with the part of a value at its place."""
    if isinstance(form, outlines.Slot):
        yield form, value
        return
    for (_, inner), (_, part) in zip(tree.items(form) or (), tree.items(value) or (), strict=True):
        yield from _values_by_slot(inner, part)
