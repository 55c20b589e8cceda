"""Taps that pass torch's own arguments to a user's function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import (
    ELSEWHERE,
    HookSpec,
    Order,
    OutputTap,
    Pass,
    Passes,
    Site,
    Tap,
    discard_hooks_of,
    do_nothing,
    is_inert,
    iterated_taps,
)


class EventTap(Tap):
    """Pass torch's arguments to a user's function, for events that have no value and no pass.

    Such events are a step of an optimizer, a state dict, a registration, and a parameter whose
    gradient is complete.
    """

    __slots__ = ("check", "function", "hooks", "is_elsewhere")
    is_on_calls: ClassVar[bool] = False

    def __init__(
        self, site: Site, passes: Passes, function: Callable[..., Any], check: Callable[..., Any],
        spec: HookSpec,
    ) -> None:  # fmt: skip
        super().__init__(site, passes, do_nothing, Order.HOOK)
        self.hooks: tuple[HookSpec] = (spec,)
        self.is_elsewhere: bool = False  # whether it fired in a context that the line does not see
        self.function: Callable[..., Any] = function
        self.check: Callable[..., Any] = check

    def fire(self, *values: Any) -> Any:
        """Call the user's function and check its result: the hook."""
        if is_inert(self):
            if isinstance(values[0], nn.Module):
                discard_hooks_of(values[0], self, is_inert)
            return None
        if not self.passes.sees_backward():
            self.is_elsewhere = self.is_elsewhere or not self.passes.closed
            return None
        self.fired += 1
        try:
            iterated_taps.append(self)
            result = self.function(*values)
            return None if result is None else self.check(result, values)
        except Exception as error:
            self._add_error_note(error)
            raise
        finally:
            self.end_iteration()

    def retire(self) -> None:
        """Stop firing, and drop the user's function."""
        super().retire()
        self.function = do_nothing

    def why_silent(self) -> str:
        """Return the reason why the event did not occur."""
        if self.is_elsewhere:
            return f"it happened {ELSEWHERE}"
        return _NEVER.get(self.site.port.partition(" ")[0], "nothing of the kind happened")


_NEVER = {
    "grad": (
        "no gradient was accumulated while the line lasted; call backward() inside the block, on a"
        " loss that depends on it (autograd.grad, backward(inputs=...) of other tensors and"
        " torch.func.functional_call accumulate none)"
    ),
    "registered": "nothing of the kind was registered while the line lasted",
    "step_pre": "the optimizer made no step while the line lasted",
    "step_post": "the optimizer made no step while the line lasted",
}


class RawTap(OutputTap):
    """Pass torch's own arguments to a user's function and check its result.

    The value that the tap sees is the tuple of all these arguments.
    """

    __slots__ = ("check", "function", "hooks")
    # False for hooks that may get another value in a checkpointed region's recomputation.
    is_comparable: ClassVar[bool] = True

    def __init__(
        self, site: Site, passes: Passes, function: Callable[..., Any], check: Callable[..., Any],
        spec: HookSpec,
    ) -> None:  # fmt: skip
        self.hooks: tuple[HookSpec] = (spec,)
        self.function: Callable[..., Any] = function
        self.check: Callable[..., Any] = check
        super().__init__(site, passes, self._call_function, Order.HOOK)

    def fire(self, module: nn.Module, *values: Any) -> Any:
        """Call the tap with the module's arguments and output: the hook."""
        return OutputTap.fire(self, module, None, (module, *values))

    def retire(self) -> None:
        """Stop firing, and drop the user's function."""
        super().retire()
        self.function = do_nothing

    def _call_function(self, current: Pass, values: tuple[Any, ...]) -> Any:
        result = self.function(*values)
        if result is None:
            if current.region is not None and self.is_comparable:
                current.region.record_no_change(str(self.site))
            return None
        if current.region is not None:
            current.region.record_change(str(self.site), values[1:], result)
        return self.check(result, values)


class AlwaysCalledTap(RawTap):
    """A raw tap that torch also calls when the module raises, while it iterates over its hooks."""

    __slots__ = ()
    is_comparable = False  # torch ends a recomputation by an exception, inside any module

    def fire(self, module: nn.Module, *values: Any) -> Any:
        """Call the tap, and note that torch is iterating over the module's hooks."""
        if is_dynamo_compiling():
            return RawTap.fire(self, module, *values)
        try:
            iterated_taps.append(self)
            return RawTap.fire(self, module, *values)
        finally:
            self.end_iteration()
