"""Hooks around the steps of optimizers, and around the closures of these steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

from torch.optim import Optimizer

from hookline.engine.taps.base import hook_functions


def parameter_ids(optimizer: Optimizer) -> Iterator[int]:
    """Yield the ids of an optimizer's parameters."""
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure with which a step computes the gradients itself; None without one.

    The arguments are those of the step's hooks: the optimizer comes first.
    """
    closure: Callable[[], Any] | None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure


@final
@dataclass(slots=True)
class OptimizerSteps:
    """Call functions when an optimizer begins to work, and when it ends.

    An optimizer works during its step, except while the step's closure runs.
    """

    # Tells whether the step of an optimizer matters to the line.
    is_mine: Callable[[Optimizer], bool]
    # Called with the optimizer, and with whether its gradients are complete. They are not before
    # the closure has run.
    begin: Callable[[Optimizer, bool], None]
    end: Callable[[], None]  # called when the optimizer has stepped, and before the closure runs

    def begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step: the hook before the step."""
        if not self.is_mine(optimizer):
            return None
        closure = closure_of(args, kwargs)
        self.begin(optimizer, closure is None)
        if closure is None:
            return None

        @functools.wraps(closure)
        def outside_work() -> Any:
            self.end()
            loss = closure()
            self.begin(optimizer, True)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": outside_work}
        return (args[0], outside_work, *args[2:]), kwargs

    def end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step: the hook after the step."""
        if self.is_mine(optimizer):
            self.end()


hook_functions.extend(vars(OptimizerSteps)[name] for name in ("begin_step", "end_step"))
