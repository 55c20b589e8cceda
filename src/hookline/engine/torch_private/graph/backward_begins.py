"""Learn of each run of autograd before it begins, while its graph is still whole.

torch has no hook there. While one is registered here, `torch.autograd` calls it by another function
in place of its own private one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Hold the hooks by their ids. torch is patched while there are any.

    Attributes:
        run: the function that is called in the end: torch's own, or another patch of it.
    """

    run: Callable[..., Any] = staticmethod(graph._engine_run_backward)

    def __setitem__(self, key: int, hook: BackwardHook) -> None:
        super().__setitem__(key, hook)
        if autograd._engine_run_backward is not _run_backward:
            self.run = autograd._engine_run_backward
            autograd._engine_run_backward = _run_backward

    def pop(self, key: int, default: Any = None) -> Any:
        hook = super().pop(key, default)
        # A patch that came later goes on to call this one.
        if not self and autograd._engine_run_backward is _run_backward:
            autograd._engine_run_backward = self.run
        return hook


BACKWARD_HOOKS = _BackwardHooks()


def _run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    if backward_number() != -1:  # a checkpoint runs it inside another
        return BACKWARD_HOOKS.run(roots, *args, **kwargs)
    ends: list[Callable[[], None]] = []
    try:
        ends += [hook(roots, args[0] if args else ()) for hook in tuple(BACKWARD_HOOKS.values())]
        return BACKWARD_HOOKS.run(roots, *args, **kwargs)
    finally:
        for end in ends:
            end()
