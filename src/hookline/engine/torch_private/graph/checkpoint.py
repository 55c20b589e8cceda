"""Wrap the private names of torch.utils.checkpoint that hookline uses.

There are two kinds of checkpoint. A reentrant checkpoint first runs a function without gradients.
In backward it runs the function again with gradients, and runs a backward of its own over that. The
other kind runs the function with gradients and drops the tensors that autograd saves. In backward
it runs the function again until all these tensors exist again.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from hookline.engine.torch_private.autograd import OUTER, at_end_of_backward, backward_number
from hookline.util.walk_stack import walk_stack

checkpointing: Any = checkpoint  # untyped, and written to

# The callback for a checkpoint. Its arguments are the function that recomputes the region and
# whether the checkpoint is reentrant. It returns the function to use instead, and a function to
# call when the first run has ended.
Begin = Callable[[Callable[..., Any], bool], tuple[Callable[..., Any], Callable[[], None]]]


class CheckpointPatch:
    """Patch torch to call `begin` at each checkpoint, from `start` to `stop`."""

    def __init__(self, begin: Begin) -> None:
        function = checkpointing.CheckpointFunction
        self._before = checkpointing._checkpoint_hook, function.__dict__["backward"]
        self._patched = _make_patches(begin)

    def start(self) -> None:
        """Start the calls. `stop` undoes this also after an interrupt."""
        function = checkpointing.CheckpointFunction
        checkpointing._checkpoint_hook, function.apply, function.backward = self._patched

    def stop(self) -> None:
        """Restore torch's names."""
        function = checkpointing.CheckpointFunction
        checkpointing._checkpoint_hook, function.backward = self._before
        if "apply" in vars(function):
            del function.apply


@functools.cache
def _make_patches(begin: Begin) -> tuple[Any, Any, Any]:
    # Cached, because making a class takes longer than attaching a line.
    function, hooks = checkpointing.CheckpointFunction, checkpointing._checkpoint_hook
    original_apply, original_backward = function.apply, function.backward

    class Patched(hooks):  # type: ignore[misc, valid-type]
        def __init__(self, frame: Any) -> None:
            super().__init__(frame)
            frame.recompute_fn, self._end = begin(frame.recompute_fn, False)

        def __exit__(self, *error: object) -> None:
            self._end()
            super().__exit__(*error)

    def apply(run: Callable[..., Any], keeps_draws: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return _apply_without_graph(original_apply, run, keeps_draws, args)
        region = ReentrantRegion(run, args)
        region.again, end = begin(region.recompute, True)
        try:
            return original_apply(region, keeps_draws, *args)
        finally:
            end()

    def backward(ctx: Any, *grads: Any) -> Any:
        if OUTER.number is not None:
            return original_backward(ctx, *grads)
        OUTER.number = backward_number()
        try:
            return original_backward(ctx, *grads)
        finally:
            OUTER.number, at_end, OUTER.at_end = None, OUTER.at_end, ()
            for act in at_end:
                at_end_of_backward(act)

    return Patched, apply, staticmethod(backward)


class _Recomputing(threading.local):
    # The reentrant regions whose functions run again in this thread, innermost first.
    regions: tuple[ReentrantRegion, ...] = ()


_recomputing = _Recomputing()


class OuterTensor(NamedTuple):
    """Refer to a tensor outside of a reentrant region, which may be freed before its node."""

    tensor: Callable[[], Tensor | None]  # a weak reference to the tensor
    node: Any  # the node that computed the tensor
    number: int  # the tensor's index among the results of the node


@final
class ReentrantRegion:
    """Stand for the function of a reentrant checkpoint. The first call is the first run.

    The tensors that the checkpoint returns are not those that the function returns. A tensor that
    the function both uses and returns has its whole gradient only in the second run.

    Args:
        run: the user's function.
        inputs: the arguments of the checkpoint.

    Attributes:
        again: called for each run after the first; it must call `recompute`.
        at_outputs: functions to call with the tensors that each later run returns.
        made_inside: for each tensor that the function returned, whether it made the tensor. Empty
            before the first run has ended.
        passed_on: for each of these tensors, the tensor outside that the function returned as it
            is; None for others and for leaves, such as parameters.
    """

    __slots__ = (
        "_detached", "_inputs", "_run", "again", "at_outputs", "has_run", "made_inside",
        "passed_on",
    )  # fmt: skip

    def __init__(self, run: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
        self._run = run
        self._inputs = [
            _outer_tensor_of(value) if isinstance(value, Tensor) else None for value in inputs
        ]
        self._detached: tuple[Any, ...] = ()
        self.again: Callable[..., Any] | None = None
        self.at_outputs: list[Callable[[Sequence[Any]], None]] = []
        self.has_run: bool = False
        self.made_inside: list[bool] = []
        self.passed_on: list[OuterTensor | None] = []

    def __call__(self, *inputs: Any) -> Any:
        """Run the function, or have it run again."""
        if self.has_run:
            assert self.again is not None
            return self.again(*inputs)
        self.has_run = True
        outputs = self._run(*inputs)
        for output in _as_tuple(outputs):
            # The first run builds no graph. A view that it makes of a tensor from outside says that
            # it requires a gradient, too.
            is_outer = isinstance(output, Tensor) and (
                output.grad_fn is not None
                or (output.requires_grad and not output._is_view())
                or output in _stand_ins
            )
            self.made_inside.append(not is_outer)
            self.passed_on.append(_outer_tensor_of(output) if is_outer else None)
        return outputs

    def recompute(self, *inputs: Any) -> Any:
        """Run the function again, on detached inputs."""
        before, self._detached = _recomputing.regions, inputs
        _recomputing.regions = (self, *before)
        try:
            outputs = self._run(*inputs)
            for act in self.at_outputs:
                act(_as_tuple(outputs))
            return outputs
        finally:
            _recomputing.regions, self._detached = before, ()

    def outer_input_of(self, detached: Tensor) -> OuterTensor | None:
        """Return the checkpoint's input that the present run has as this detached tensor."""
        for tensor, origin in zip(self._detached, self._inputs, strict=False):
            if tensor is detached:
                return origin
        return None


# Torch has a view in place of each tensor that a checkpoint passes on in the first run of another.
_stand_ins: MutableMapping[Tensor, OuterTensor] = WeakTensorKeyDictionary()


def _outer_tensor_of(tensor: Tensor) -> OuterTensor | None:
    """Return the tensor in the graph that a tensor is, stands for, or was detached from.

    Checkpoints detach their inputs. None for other leaves.
    """
    if tensor.grad_fn is not None:
        return OuterTensor(weakref.ref(tensor), tensor.grad_fn, tensor.output_nr)
    if tensor in _stand_ins:
        return _stand_ins[tensor]
    origins = (region.outer_input_of(tensor) for region in _recomputing.regions)
    return next((origin for origin in origins if origin is not None), None)


def _apply_without_graph(
    apply: Callable[..., Any], run: Callable[..., Any], keeps_draws: bool, args: tuple[Any, ...]
) -> Any:
    """Apply a checkpoint where no graph is built, and note which tensors it only passes on."""
    outputs: tuple[Any, ...] = ()

    def run_and_note(*inputs: Any) -> Any:
        nonlocal outputs
        returned = run(*inputs)
        outputs = _as_tuple(returned)
        return returned

    results = apply(run_and_note, keeps_draws, *args)
    for output, result in zip(outputs, _as_tuple(results), strict=False):
        origin = _outer_tensor_of(output) if isinstance(output, Tensor) else None
        if origin is not None and result is not output:
            _stand_ins[result] = origin
    return results


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def reentrant_region_of(node: Any) -> ReentrantRegion | None:
    """Return the region of a reentrant checkpoint's node in the graph; None for other nodes."""
    run = getattr(node, "run_function", None)
    return run if isinstance(run, ReentrantRegion) else None


def producer_of(tensor: Tensor) -> tuple[Any, int]:
    """Return the node of the graph that computed a tensor, and the tensor's index in its results.

    A tensor that a reentrant checkpoint only passes on is the tensor that the checkpoint was given.
    """
    node, index = tensor.grad_fn, tensor.output_nr
    region = reentrant_region_of(node)
    while region is not None and index < len(region.passed_on):
        origin = region.passed_on[index]
        if origin is None:
            break
        node, index = origin.node, origin.number
        region = reentrant_region_of(node)
    return node, index


def is_recomputing() -> bool:
    """Tell whether the calling hook runs in the recomputation of a checkpointed region."""
    return _recomputing_function() is not None


def is_resaving_tensors() -> bool:
    """Tell whether the calling code runs in a recomputation that only saves tensors again.

    Gradients flow through the graph of the first run, not through that of the recomputation.
    """
    return _recomputing_function() == "recompute_fn"


def _recomputing_function() -> str | None:
    """Return torch's function that recomputes the innermost region; None without one."""
    if backward_number() == -1:
        return None
    for frame in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name in _RECOMPUTES and code.co_filename == checkpointing.__file__:
            return code.co_name
    return None


_RECOMPUTES = frozenset({"recompute_fn", "backward"})


def outside_checkpoint(region: Any) -> AbstractContextManager[Any]:
    """Return a context for operations in a region that the second run will not repeat.

    A selective checkpoint identifies the operations of the second run by their number. Without a
    region, the context does nothing.
    """
    is_counted = region is not None and torch._C._len_torch_dispatch_stack() > 0
    return _disable_current_modes() if is_counted else _NOTHING


_NOTHING = nullcontext()
