"""Taps: the objects whose bound methods torch calls as hooks.

Imports traced, passes, arguments, tree, site, regime, torch_internals.

A tap is all that is ever put on a module. It holds no module and no name that is read while firing;
it pickles and deep-copies as an inert tap, which takes itself off the copy when first called, so
that a copy of a hooked model never writes into the original's recording.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine import tree
from hookline.engine.arguments import Arguments
from hookline.engine.compile_internals import while_tracing
from hookline.engine.passes import Pass, Passes
from hookline.engine.regime import refuse_tracing
from hookline.engine.site import Site
from hookline.engine.torch_internals import discard_hooks_of
from hookline.engine.traced import Halves, See, Traced, snapshot


class Rank(IntEnum):
    """Where a hook stands among the others on its module; foreign hooks count as HOOK.

    Those that only ask for a value's gradient come after the ones that may still change the value;
    in backward they are called as they stand here: edits, hooks, what reads after them, recorders.
    """

    EVERYWHERE = -2
    BEGIN = -1
    EDIT = 0
    HOOK = 1
    JOIN = 2
    GRAD_EDIT = 3
    GRAD_HOOK = 4
    GRAD_READ = 5
    GRAD_RECORD = 6
    RECORD = 7
    END = 8


GRADIENT_RANKS = {
    Rank.EDIT: Rank.GRAD_EDIT, Rank.HOOK: Rank.GRAD_HOOK, Rank.RECORD: Rank.GRAD_RECORD,
}  # fmt: skip


class Tap:
    """What every tap shares: whose it is, whether it may fire now, how often it did.

    Args:
        site: where it is.
        passes: the passes of its line.
        see: called with the pass and the value; what it returns, unless None, replaces the value.
        rank: its place among the hooks of its module.
    """

    __slots__ = (
        "__weakref__", "alter", "fired", "halves", "lane", "passes", "ran", "rank", "see", "site",
        "traced",
    )  # fmt: skip

    def __init__(self, site: Site, passes: Passes, see: See, rank: Rank) -> None:
        self.site = site
        self.passes = passes
        self.lane = passes.lane
        self.rank = rank
        self.fired = 0
        self.ran = 0
        if site.leaf and not site.is_gradient:  # gradients arrive by leaf and by call as it is
            see = _at_leaf(see, site)
        self.alter = see
        if site.call is not None and not site.is_gradient:
            see = _at_call(see, site.call, self)
        self.see = see
        self.halves: Halves | None = None
        self.traced: Traced | None = None

    @while_tracing
    def prepare(self) -> None:
        """Code is being compiled that calls this tap; of an export, it would become a part."""
        refuse_tracing()
        if self.traced is not None:
            return
        _, inside, after = self.halves or (None, snapshot, self.see)
        alter = self.alter if self.rank in (Rank.EDIT, Rank.HOOK) else None
        self.traced = Traced(self.passes.switch, alter, inside, after, self.site.call)

    def trace(self, value: Any) -> Any:
        """What `fire` does inside compiled code."""
        self.prepare()
        return None if self.traced is None else self.traced.meet(value)

    def harvest(self, current: Pass) -> None:
        """See what compiled code has caught in a pass."""
        if self.traced is None:
            return
        for value in self.traced.taken():
            self.fired += 1
            if self.traced.alter is None:
                self.traced.after(current, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, (type(self),)

    def __deepcopy__(self, memo: Any) -> Tap:
        return _inert(type(self))

    def _outside(self, module: nn.Module) -> Pass | None:
        """The slow path: no pass runs here. Ours all the same, another's, or an inert copy?"""
        if self.passes is _INERT:
            discard_hooks_of(module, self, _is_inert)
            return None
        return self.passes.outside()

    def _note(self, error: Exception) -> None:
        error.add_note(f"hookline: raised by the hook at {self.site} ({self.site.module_type})")

    def why_silent(self) -> str | None:
        """Why this tap has not fired, as far as it can tell itself."""
        if self.site.call is not None and self.ran:
            runs = "once" if self.ran == 1 else f"{self.ran} times"
            return f"the module ran {runs} in a pass, so there is no call #{self.site.call}"
        return None


class EventTap(Tap):
    """Passes torch's arguments to a user's function, at what is no value and belongs to no pass.

    A step of an optimizer, a state dict, a registration, a parameter whose gradient is complete.
    """

    __slots__ = ("check", "function")

    def __init__(
        self, site: Site, passes: Passes, function: Callable[..., Any], check: Callable[..., Any]
    ) -> None:
        super().__init__(site, passes, unused, Rank.HOOK)
        self.function = function
        self.check = check

    def fire(self, *values: Any) -> Any:
        """The hook itself."""
        if self.passes is _INERT:
            if isinstance(values[0], nn.Module):
                discard_hooks_of(values[0], self, _is_inert)
            return None
        if not self.passes.is_ours():
            return None
        self.fired += 1
        try:
            result = self.function(*values)
            return None if result is None else self.check(result, values)
        except Exception as error:
            self._note(error)
            raise

    def why_silent(self) -> str:
        """What did not happen."""
        return _NEVER.get(self.site.port.partition(" ")[0], "nothing of the kind happened")


_NEVER = {
    "grad": "no gradient was accumulated while the line lasted; call backward() inside the block",
    "registered": "nothing of the kind was registered while the line lasted",
    "step_pre": "the optimizer made no step while the line lasted",
    "step_post": "the optimizer made no step while the line lasted",
}


def unused(current: Pass, value: Any) -> None:
    """What taps that see no single value are made with."""


class OutputTap(Tap):
    """Sees what a module returns: a forward hook."""

    __slots__ = ()

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook itself: the hot path."""
        if is_dynamo_compiling():
            return self.trace(output)
        current = self.lane.current
        if current is None:
            current = self._outside(module)
            if current is None:
                return None
        self.fired += 1
        try:
            return self.see(current, output)
        except Exception as error:
            self._note(error)
            raise


class InputTap(Tap):
    """Sees what a module is called with, as bound arguments: a forward-pre hook with kwargs."""

    __slots__ = ("arguments",)

    def __init__(self, site: Site, passes: Passes, see: See, rank: Rank) -> None:
        super().__init__(site, passes, see, rank)
        self.arguments = Arguments()

    def fire(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The hook itself."""
        if kwargs is None:
            return None  # another thread is taking it off, and has the mark that it wants them
        if is_dynamo_compiling():
            value = self.arguments.bind(module, args, kwargs)
            new = self.trace(value)
            return None if new is None else self.arguments.unbind(new, value, args, kwargs)
        current = self.lane.current
        if current is None:
            current = self._outside(module)
            if current is None:
                return None
        self.fired += 1
        try:
            value = self.arguments.bind(module, args, kwargs)
            new = self.see(current, value)
            return None if new is None else self.arguments.unbind(new, value, args, kwargs)
        except Exception as error:
            self._note(error)
            raise


class RawTap(Tap):
    """Passes torch's own arguments to a user's function and checks what comes back."""

    __slots__ = ("check", "function")

    def __init__(
        self,
        site: Site,
        passes: Passes,
        function: Callable[..., Any],
        check: Callable[..., Any],
    ) -> None:
        self.function = function
        self.check = check
        super().__init__(site, passes, self._call, Rank.HOOK)

    def fire(self, module: nn.Module, *values: Any) -> Any:
        """The hook itself."""
        if is_dynamo_compiling():
            return self.trace((module, *values))
        current = self.lane.current
        if current is None:
            current = self._outside(module)
            if current is None:
                return None
        self.fired += 1
        try:
            return self.see(current, (module, *values))
        except Exception as error:
            self._note(error)
            raise

    def _call(self, current: Pass, values: tuple[Any, ...]) -> Any:
        result = self.function(*values)
        return None if result is None else self.check(result, values)


def _at_leaf(see: See, site: Site) -> See:
    leaf, where = site.leaf, str(site)

    def at_leaf(current: Pass, value: Any) -> Any:
        new = see(current, tree.get(value, leaf, where))
        return None if new is None else tree.put(value, leaf, new)

    return at_leaf


def _at_call(see: See, call: int, tap: Tap) -> See:
    def at_call(current: Pass, value: Any) -> Any:
        count = current.calls.get(tap, 0)
        current.calls[tap] = count + 1
        tap.ran = max(tap.ran, count + 1)
        if count == call:
            return see(current, value)
        tap.fired -= 1
        return None

    return at_call


def _inert(kind: type[Tap]) -> Tap:
    tap = kind.__new__(kind)
    tap.site, tap.passes, tap.lane = Site(""), _INERT, _INERT.lane
    tap.fired, tap.ran, tap.rank = 0, 0, Rank.HOOK
    tap.traced = None
    return tap


_INERT = Passes()
_INERT.closed = True


class RootTap:
    """Tells a line's passes when its root begins and ends. Inert in copies, as every tap is."""

    __slots__ = ("passes", "rank")

    def __init__(self, passes: Passes, rank: Rank) -> None:
        self.passes = passes
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_root, (int(self.rank),)

    def begin(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        if is_dynamo_compiling():
            self.is_inside()
            return
        if self.passes is _INERT:
            discard_hooks_of(module, self, _is_inert)
            return
        self.passes.begin()

    @while_tracing
    def is_inside(self) -> bool:
        """Whether code is compiled in which the root is called and its border is seen."""
        return self.passes.is_inside()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook, always called."""
        if is_dynamo_compiling():
            return
        if self.passes is _INERT:
            discard_hooks_of(module, self, _is_inert)
            return
        self.passes.end()


def _inert_root(rank: int) -> RootTap:
    return RootTap(_INERT, Rank(rank))


def _is_inert(owner: object) -> bool:
    return isinstance(owner, Tap | RootTap) and owner.passes is _INERT
