"""Gradient taps by port: forward hooks that register tensor hooks on the values."""

from __future__ import annotations

import sys
import weakref
from typing import Any, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.parameter import is_lazy
from torch.utils.hooks import unserializable_hook

from hookline.engine.autograd import aliases, module_backward
from hookline.engine.gradients.compiled_tap import GraphGradientTap
from hookline.engine.gradients.gradient_tap import (
    INSIDE,
    NO_BACKWARD,
    ROOT_INPUTS,
    GradientCallback,
    GradientTap,
    PendingGradient,
)
from hookline.engine.passes.passes import ELSEWHERE, Pass, Passes
from hookline.engine.pytree import tree
from hookline.engine.pytree.call_arguments import ArgumentBinder
from hookline.engine.selection.module_tree import ParameterNode
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import ON_INPUTS, HookSpec, Order, Tap, do_nothing
from hookline.engine.torch_private.autograd import (
    base_in_graph,
    is_compiled_node,
    outer_backward_number,
    version_counter,
)
from hookline.engine.torch_private.dynamo import may_have_compiled_forward
from hookline.engine.torch_private.graph.checkpoint import outside_checkpoint
from hookline.errors import AttachError, StructureError, warn


class GradOutputTap(GraphGradientTap):
    """A tap on the gradients of a module's output: a forward hook."""

    __slots__ = ()

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Wait for the gradients of the output: the forward hook on the module."""
        if is_dynamo_compiling():
            value = aliases.alias_leaves(output)
            self.fire_in_graph(value)
            return value
        return self.hook_output(module, output, id(sys._getframe(1)))

    def hook_output(self, module: nn.Module, output: Any, key: int) -> Any:
        """Do the work of `fire` for the call with this key."""
        call = self._count_call(module)
        if call is None:
            return None
        region = call.current.region
        if region is None and type(output) is Tensor and output.grad_fn is not None:
            self.hook_tensors(call, output)
            return None
        with outside_checkpoint(region):
            value = aliases.alias_leaves(output)
            if self.passes.compiler is not None and _returns_recreated_views(module, value):
                self.placed += 1
                self.warn_ambiguous(INSIDE)
            else:
                self.hook_tensors(
                    call._replace(aliases=module_backward.output_gradients(key)), value
                )
        return None if value is output else value


def _returns_recreated_views(module: nn.Module, value: Any) -> bool:
    """Tell whether a module compiled by itself returned several tensors that share memory.

    Such tensors are views that were made outside the compiled code.
    """
    if isinstance(value, Tensor):
        return False
    nodes = [(tensor._is_view(), tensor.grad_fn) for tensor in tree.distinct_tensors(value)
             if tensor.grad_fn]  # fmt: skip
    return (
        len(nodes) > 1
        and any(is_view and not is_compiled_node(node) for is_view, node in nodes)
        and may_have_compiled_forward(module)
    )


class GradInputTap(GraphGradientTap):
    """A tap on the gradients of a module's inputs: a forward-pre hook."""

    __slots__ = ("arguments",)
    hooks: tuple[HookSpec] = ON_INPUTS

    def __init__(self, site: Site, passes: Passes, on: GradientCallback, order: Order) -> None:
        super().__init__(site, passes, on, order)
        self.arguments: ArgumentBinder = ArgumentBinder()

    def fire(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Wait for the gradients of the inputs: the forward-pre hook on the module."""
        if kwargs is None:
            # Another thread is removing this hook and has already cleared its with_kwargs flag.
            return None
        if is_dynamo_compiling():
            new = aliases.alias_lasting_inputs(args, kwargs, leaves_only=True)
            args, kwargs = new or (args, kwargs)
            self.fire_in_graph(self.arguments.bind(module, args, kwargs))
            return new
        key = id(sys._getframe(1))
        call = self._count_call(module, module_backward.input_gradients(key))
        if call is None:
            return None
        with outside_checkpoint(call.current.region):
            new = aliases.alias_lasting_inputs(args, kwargs, (key, id(module)), leaves_only=True)
            args, kwargs = new or (args, kwargs)
            try:
                self.hook_tensors(call, self.arguments.bind(module, args, kwargs))
            except Exception as error:
                self._add_error_note(error)
                raise
        return new


class RootAliasTap(Tap):
    """A tap at the border of the root that keeps the gradients of different passes apart."""

    __slots__ = ()
    hooks: tuple[HookSpec, HookSpec] = (
        HookSpec("forward_pre", "fire", Order.BORDER, with_kwargs=True),
        HookSpec("forward", "leave", Order.GRAD_RECORD, always_call=True),
    )

    def __init__(self, passes: Passes) -> None:
        super().__init__(Site("", "grad_input"), passes, do_nothing, Order.BORDER)

    def fire(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Alias the root's inputs: the forward-pre hook on the root."""
        if kwargs is None:
            # Another thread is removing this hook and has already cleared its with_kwargs flag.
            return None
        if is_dynamo_compiling():
            return aliases.alias_lasting_inputs(args, kwargs, leaves_only=False)
        current = self._pass_of(module)
        if current is None:
            return None
        with outside_checkpoint(current.region):
            new = aliases.alias_lasting_inputs(args, kwargs, leaves_only=False)
        if new is None:
            return None
        # The tensors that outlive the pass, and their views on which the pass has hooks.
        current.opened.setdefault(ROOT_INPUTS, []).extend(
            (weakref.ref(base), [])
            for _, alias in tree.tensors((new[0], tuple(new[1].values())))
            if (base := base_in_graph(alias)) is not None
        )
        return new

    def _recomputed_pass(self, current: Pass) -> Pass | None:
        return current if current.recomputation.has_gradients else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Settle the views of the root's inputs: the always-called forward hook on the root."""
        if is_dynamo_compiling():
            return
        current = self.in_thread.running
        borders = [] if current is None else current.opened.pop(ROOT_INPUTS, [])
        returned = [base_in_graph(tensor) for _, tensor in tree.tensors(output)]
        for base, views in borders:
            outside = base()
            if outside is None or not any(tensor is outside for tensor in returned):
                for view in filter(None, [reference() for reference in views]):
                    view.find_write()


_WRITTEN = (
    "it is a view that was written to in place while the line lasted, or whose base was, and such a"
    " write drops a view's hooks; make that operation not in place, or name a .clone() of the view"
    " and use the clone in its place"
)
_UNREDUCED = (
    "FSDP2 brought no reduced gradient to its .grad while the line lasted; call backward() inside"
    " the block, on a loss that depends on it, with set_requires_gradient_sync(True): with False,"
    " FSDP2 keeps the gradient for a later backward"
)
_REPLACED = "torch.func.functional_call, a parametrization or pruning made after the line"


@final
class ParameterTap(GradientTap):
    """A tap on the gradient of a parameter or tensor: a tensor hook.

    A parameter that FSDP2 shards is not in the graph. Its reduced gradient first appears in
    `.grad`.
    """

    __slots__ = (
        "_counter", "_held", "_is_elsewhere", "_is_sharded", "_n_parts", "_run", "_version",
    )  # fmt: skip

    def __init__(self, site: Site, passes: Passes, on: GradientCallback, order: Order) -> None:
        super().__init__(site, passes, on, order)
        self._run, self._n_parts = -1, 0
        self._counter: Tensor | None = None
        self._version = 0
        # Whether a gradient came in a context that the line does not see.
        self._is_elsewhere = False
        self._is_sharded = False

    def hooks_on(self, node: ParameterNode) -> tuple[HookSpec, ...]:
        """Return the hook for a tensor: of its gradient, or of the reduced gradient of a shard."""
        tensor, self._is_sharded = node.tensor, node.is_sharded
        if node.is_sharded:
            self._held = None if tensor.grad is None else weakref.ref(tensor.grad)
            return (HookSpec("accumulated", "fire_reduced"),)
        # An in-place write drops a view's hooks, so the view's version is watched.
        if not is_lazy(tensor) and base_in_graph(tensor) is not None:
            self._counter = version_counter(tensor)
            self._version = self._counter._version
        return (HookSpec("grad"),)

    def _is_written(self) -> bool:
        return self._counter is not None and self._counter._version != self._version

    @unserializable_hook  # type: ignore[untyped-decorator]
    def fire_reduced(self, parameter: Tensor) -> None:
        """Handle the reduced gradient: the post-accumulate-grad hook.

        Raises:
            AttachError: the gradient was to be changed, but FSDP2 has added it to an earlier
                `.grad`.
        """
        current = self._pass_of_backward(outer_backward_number())
        grad = parameter.grad
        if current is None or grad is None:
            return
        self.ran += 1
        if self._held is not None and self._held() is grad:
            self._report_summed_gradient()
        # .grad is clipped, zeroed and added to in place, so a callback that keeps it must copy it.
        argument = grad if self.on.changes else grad.detach()
        new = self.receive_gradient(current, PendingGradient(0), 0, argument)
        if new is not None:
            if type(new) is not type(grad):
                raise StructureError(
                    f"the edit at {self.site} returned a plain tensor for this rank's shard."
                    "\nCompute the result from the DTensor that it is given: g.clamp(min=0)."
                )
            parameter.grad = grad = new
        self._held = weakref.ref(grad)

    def _report_summed_gradient(self) -> None:
        if self.on.changes:
            raise AttachError(
                f"{self.site} cannot be changed: FSDP2 has added it to the .grad that was there."
                "\nCall zero_grad() before backward(), or change the sum: line.accumulated(...)."
            )
        if not self.has_warned:
            self.has_warned = True
            warn(
                f"{self.site} is recorded as it is in .grad, to which FSDP2 has added the gradients"
                " of several backward passes.\nFor each by itself, zero_grad() before backward()."
            )

    @unserializable_hook  # type: ignore[untyped-decorator]
    def fire(self, grad: Tensor) -> Tensor | None:
        """Handle the gradient: the tensor hook.

        Pickling the tensor drops the hook, without torch's warning.
        """
        number = outer_backward_number()
        current = self._pass_of_backward(number)
        if current is None:
            return None
        if self._is_written():  # a part only: the gradient of the value before the write
            if self.on.changes or self.fired:  # else the line reports this at its end
                self.warn_ambiguous(_WRITTEN)
            return None
        self.ran += 1
        self._n_parts = self._n_parts + 1 if number == self._run else 1
        self._run = number
        if self._n_parts > 1 and not self.has_warned:
            self.has_warned: bool = True
            warn(
                f"{self.site} comes in parts: several reentrant checkpoints use the parameter, and"
                " each has a backward of its own.\nCheckpoint with use_reentrant=False, which gives"
                " the whole gradient at once."
            )
        return self.receive_gradient(current, PendingGradient(self._n_parts - 1), 0, grad)

    def retire(self) -> None:
        """Stop firing and release the callback."""
        super().retire()
        self.on: GradientCallback = GradientCallback()

    def _pass_of_backward(self, backward: int) -> Pass | None:
        current = self.passes.pass_of_parameter_gradient(backward)
        if current is None and not self.passes.closed:
            self._is_elsewhere = True
        return current

    def why_silent(self) -> str | None:
        """Say why no gradient arrived."""
        if self._is_elsewhere:
            return f"its gradient flowed back {ELSEWHERE}"
        if self.off:
            return "it is frozen: requires_grad is False; call requires_grad_() on it first"
        if self._is_written():
            return _WRITTEN
        if self.passes.transformed:
            return (
                "torch.func returns gradients, and accumulates none; take them from what its"
                " transform returns, or select ':grad_output' and ':grad_input' of modules"
            )
        if self._is_sharded:
            return _UNREDUCED
        return f"{NO_BACKWARD}; or the model ran on another one in its place ({_REPLACED})"
