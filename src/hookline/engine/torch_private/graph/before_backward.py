"""Learn of each run of autograd before it begins, while its graph is still whole.

torch has no hook there. While one is registered here, `torch.autograd` calls it by another function
in place of its own private one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch.autograd import graph

from hookline.engine.torch_private.autograd import backward_number

autograd: Any = torch.autograd  # its private name is written to

# Called with the tensors that a backward begins at, and the gradients that it was given. It returns
# a function to call when the backward has ended.
BackwardHook = Callable[[Sequence[Any], Sequence[Any]], Callable[[], None]]


@final
class _BackwardHooks(dict[int, BackwardHook]):
    """Hold the hooks by their ids. torch is patched while there are any."""

    # The function that is called in the end: torch's own, or another patch of it.
    run: Callable[..., Any] = staticmethod(graph._engine_run_backward)
    # Whether torch calls `_run_hooked_backward`, itself or by a later patch.
    is_patched: bool = False

    def __setitem__(self, key: int, hook: BackwardHook) -> None:
        super().__setitem__(key, hook)
        now = autograd._engine_run_backward
        # A patch that came later calls this one; to call that one in turn would never end.
        if now is graph._engine_run_backward or not self.is_patched:
            self.run, self.is_patched = now, True
            autograd._engine_run_backward = _run_hooked_backward

    def pop(self, key: int, default: Any = None) -> Any:
        hook = super().pop(key, default)
        # A patch that came later goes on to call this one.
        if not self and autograd._engine_run_backward is _run_hooked_backward:
            autograd._engine_run_backward, self.is_patched = self.run, False
        return hook


BACKWARD_HOOKS = _BackwardHooks()


def _run_hooked_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if backward_number() != -1:  # a checkpoint runs it inside another
        return BACKWARD_HOOKS.run(roots, *args, **kwargs)
    with ExitStack() as ends:
        for hook in tuple(BACKWARD_HOOKS.values()):
            ends.callback(hook(roots, args[0] if args else ()))
        return BACKWARD_HOOKS.run(roots, *args, **kwargs)
