"""Every private name of torch.utils.checkpoint that hookline uses.

There are two kinds of checkpoint. A reentrant checkpoint first runs a function without gradients.
In backward it runs the function again with gradients, and runs a backward of its own over that. The
other kind runs the function with gradients and drops the tensors that autograd saves. In backward
it runs the function again until all these tensors exist again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from hookline.engine.torch_private.autograd import OUTER, at_end_of_backward, backward_number

checkpointing: Any = checkpoint  # untyped, and written to

# The callback for a checkpoint. Its arguments are the function that recomputes the region and
# whether the checkpoint is reentrant. It returns the function to use instead, and a function to
# call when the first run has ended.
Begin = Callable[[Callable[..., Any], bool], tuple[Callable[..., Any], Callable[[], None]]]


class CheckpointPatch:
    """A patch of torch that calls `begin` at each checkpoint, from `start` to `stop`."""

    def __init__(self, begin: Begin) -> None:
        function = checkpointing.CheckpointFunction
        self._before = checkpointing._checkpoint_hook, function.__dict__["backward"]
        self._patched = _patched(begin)

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
def _patched(begin: Begin) -> tuple[Any, Any, Any]:
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

    def apply(run: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return original_apply(run, *args)
        again, end = begin(run, True)
        runs = iter((run,))
        try:
            return original_apply(lambda *inputs: next(runs, again)(*inputs), *args)  # noqa: PLW0108
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
            for one in at_end:
                at_end_of_backward(one)

    return Patched, apply, staticmethod(backward)


def is_recomputing() -> bool:
    """Tell whether the calling hook runs in the recomputation of a checkpointed region."""
    if backward_number() == -1:
        return False
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTES and code.co_filename == checkpointing.__file__:
            return True
        frame = frame.f_back
    return False


_RECOMPUTES = frozenset({"recompute_fn", "backward"})


def aside(region: Any) -> AbstractContextManager[Any]:
    """Return a context for operations in a region that the second run will not repeat.

    A selective checkpoint identifies the operations of the second run by their number.

    Args:
        region: the checkpointed region; None for a context that does nothing.
    """
    is_counted = region is not None and torch._C._len_torch_dispatch_stack() > 0
    return _disable_current_modes() if is_counted else _NOTHING


_NOTHING = nullcontext()
