"""Keep gradients: the callbacks and taps of `record` at gradient ports."""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    PYTHON_NODE,
    GradHook,
    GradientCallback,
    GradOutputTap,
    Order,
    Pass,
    Passes,
    PendingGradient,
    Site,
    backward_number,
    has_numbers,
    hook_value_gradient,
    is_legacy_batched,
    is_wrapped,
    local_part,
    outer_backward_number,
    unwrap_ended_transforms,
    unwrap_legacy_vmap,
)
from hookline.engine.pytree import outlines, tree
from hookline.recordings import PartialGradients, version_stamp
from hookline.statistics.flat_numbers import sum_of_squares
from hookline.verbs.record.keep import Keeper


@final
class GradientKeeper(GradientCallback):
    """Keep the gradients at one site.

    Args:
        number: the number of the site in the recording.
        keeper: makes the kept form of a gradient.
        parameter: the parameter whose gradient is kept. The parameter's norm is kept, too.
        keeps_graph: whether the kept gradients hold their graph.
    """

    __slots__ = ("_kept", "_number", "_parameter", "keeps_graph")

    def __init__(
        self, number: int, keeper: Keeper, parameter: Tensor | None, *, keeps_graph: bool
    ) -> None:
        self._number = number
        self._kept = keeper
        self.keeps_graph: bool = keeps_graph
        # Not weakly: torch swaps no tensor that has weak references, as `model.to` does DTensors.
        self._parameter = parameter

    def on_gradient(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Keep the gradient of one tensor."""
        value, was = self._kept(current, grad)
        if is_wrapped(grad) and not current.is_transformed:
            # Only the backward is batched. The whole batch must not be taken for a value of a later
            # transform.
            unwrap = partial(
                unwrap_ended_transforms, keeps_graph=self.keeps_graph, also_running=True
            )
            value = tree.map_tensors(unwrap, value)
            was = version_stamp(value)
        run = outer_backward_number()
        if pending.form is None:
            current.log_entry((self._number, value, was, pending.call, run, self._parameter_norm()))
            return
        reference = pending.gathered[run]
        gathered = None if reference is None else reference()
        if gathered is None:
            gathered = PartialGradients(pending.form)
            # The recording alone holds it: an object of the graph's hooks must not hold the graph.
            pending.gathered[run] = weakref.ref(gathered)
            current.log_entry((self._number, gathered, None, pending.call, run))
        gathered.parts[slot] = value, was

    def on_no_gradient(self, current: Pass, pending: PendingGradient) -> None:
        """Keep None in the value's structure, because no gradient will arrive."""
        current.log_entry((self._number, outlines.fill(pending.form, {}), None, pending.call))

    def _parameter_norm(self) -> Tensor | None:
        parameter = self._parameter
        if parameter is None or not has_numbers(parameter):
            return None
        plain = local_part(parameter.detach())
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.is_complex():
            plain = plain.abs()
        wide = plain if plain.dtype is torch.float64 else plain.float()
        return sum_of_squares(wide).sqrt()


@final
class PlainGradTap(GradOutputTap):
    """Keep the gradient of a lone output: `GradOutputTap` and `GradientKeeper` in one, for speed.

    Two calls lie between torch and the recording for each site and pass.
    """

    __slots__ = ("index",)

    def __init__(self, site: Site, passes: Passes, on: GradientKeeper, number: int) -> None:
        super().__init__(site, passes, on, Order.GRAD_RECORD)
        self.index: int = number

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Register a hook on the output's gradient: the forward hook."""
        if is_dynamo_compiling():
            return super().fire(module, args, output)
        current = self.in_thread.current
        node = output.grad_fn if type(output) is Tensor else None
        # The node of a Python function may stand for compiled code with several outputs.
        # `hook_output` handles these.
        is_plain = node is not None and not issubclass(type(node), PYTHON_NODE)
        if current is None or not is_plain or current.region is not None:
            return self.hook_output(module, output, id(sys._getframe(1)))
        calls = current.calls
        call = calls.get(self, 0)
        calls[self] = call + 1
        self.placed += 1
        view = hook_value_gradient(
            output, GradHook(self.keep_gradient, current, call), self.warn_ambiguous, id(module)
        )
        if view is not None:
            self.settle_view_later(current, view)
        return None

    def keep_gradient(self, current: Pass, call: int, grad: Tensor | None) -> None:
        """Keep the gradient: the hook on the tensor."""
        if self.passes.closed or grad is None:
            return
        self.fired += 1
        if is_legacy_batched(grad):
            grad, _ = unwrap_legacy_vmap(grad)
        if grad.requires_grad:
            grad = grad.detach()
        current.log_entry((self.index, grad, grad._version, call, backward_number()))
