"""Register hooks on the modules of any model, but only in this context.

torch's process-wide hooks run in every thread. So one dispatcher registers them, and only while a
line needs them. The dispatcher calls the hooks of the lines whose passes belong to the present
context. Backward needs no process-wide hook, because a forward hook of the line registers hooks on
the values of its context.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

from torch import nn

from hookline.engine.line.attachment import Attachment, surely
from hookline.engine.line.handle import HookHandle
from hookline.engine.line.line import Line
from hookline.engine.line.registration import Registrations
from hookline.engine.passes.passes import Passes
from hookline.engine.selection.selectors import Selector
from hookline.engine.taps.fast_path import REMEDY, is_fused
from hookline.engine.torch_private.dynamo import has_compiled
from hookline.engine.torch_private.hooks import hook_dict
from hookline.errors import SelectionError
from hookline.util.locks import fork_safe_lock
from hookline.verbs.attach.backward_taps import BackwardPreTap, BackwardTap
from hookline.verbs.attach.raw_taps import EventTap, RawTap

Matcher = Callable[[nn.Module], bool]


class _GlobalHook(NamedTuple):
    """A hook of a line, and the function that says which modules it runs on."""

    kind: str
    matches: Matcher
    tap: Any  # RawTap | BackwardPreTap | BackwardTap | EventTap
    with_kwargs: bool


@final
class GlobalHooks(Attachment):
    """The hooks of one line on modules, registrations and optimizers everywhere.

    Args:
        passes: the passes of the line. They tell whether the line sees the present thread and task.
        is_all: whether the line has no model, so that these are all its hooks.
    """

    __slots__ = ("groups", "is_all", "note", "passes", "taps")

    def __init__(self, passes: Passes, *, is_all: bool) -> None:
        self.passes = passes
        self.is_all = is_all
        self.note: str | None = None  # a warning, if torch ran matching modules as one operation
        self.taps: list[_GlobalHook] = []
        self.groups: set[str] = set()

    def add(
        self,
        kind: str,
        matches: Matcher,
        tap: RawTap | BackwardPreTap | BackwardTap | EventTap,
        *,
        with_kwargs: bool = False,
        prepend: bool = False,
    ) -> None:
        """Add a hook of a kind on the modules that `matches` accepts."""
        self.taps.insert(
            0 if prepend else len(self.taps), _GlobalHook(kind, matches, tap, with_kwargs)
        )
        self.groups |= _groups(kind)

    @property
    def has_hooks(self) -> bool:
        """Tell whether any hook is registered."""
        return bool(self.groups)

    def end(self) -> None:
        """Remove all hooks."""
        if self.groups:
            DISPATCHER.discard(self)

    def drop(self, taps: Iterable[Any]) -> None:
        """Drop some taps, and the process-wide hooks that no other tap needs."""
        gone = set(map(id, taps))
        self.taps[:] = [one for one in self.taps if id(one.tap) not in gone]
        self.groups = {group for one in self.taps for group in _groups(one.kind)}
        DISPATCHER.shrink(self)

    def why_silent(self) -> str | None:
        """Name the compiled code that no process-wide hook reaches, if there may be any."""
        return _BESIDE if self.is_all and has_compiled() else None

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Undo what the block added if it raises."""
        before = list(self.taps)
        try:
            yield
        except BaseException:
            self.taps[:] = before
            raise


# torch's process-wide hooks that are registered together. "after" comes after "modules".
_GROUPS = {
    "modules": ("forward_pre", "forward"),
    "after": ("after",),
    "registration": ("parameter", "buffer", "module"),
    "optimizers": ("step_pre", "step_post"),
}


def _groups(kind: str) -> set[str]:
    """Return the groups of process-wide hooks that a kind of hook needs."""
    if kind in ("parameter", "buffer", "module"):
        return {"registration"}
    if kind.startswith("step"):
        return {"optimizers"}
    return {"modules", "after"} if kind == "backward" else {"modules"}


def everywhere_matcher(selector: Selector) -> Matcher:
    """Return the predicate of a selector that needs no paths.

    A module that is met anywhere has no path.

    Raises:
        SelectionError: the selector needs paths.
    """
    if selector is None or selector == "**":
        return lambda module: True
    if isinstance(selector, nn.Module):
        return lambda module: module is selector
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda module: isinstance(module, selector)
    if isinstance(selector, list | tuple) and selector:
        parts = [everywhere_matcher(part) for part in selector]
        return lambda module: any(part(module) for part in parts)
    if callable(selector) and not isinstance(selector, type):
        return lambda module: bool(selector("", module))
    raise SelectionError(
        f"the selector must need no paths with hl.EVERYWHERE, got {selector!r}."
        "\nGive a module type, a module, a predicate (path, module) -> bool, or None for all."
    )


@final
class _Dispatcher:
    """Register torch's process-wide hooks while a line needs them, and call the lines' hooks."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may attach a line while its own thread holds the lock.
        self._lock = fork_safe_lock()
        self._lines: tuple[GlobalHooks, ...] = ()
        self._placed: dict[str, Registrations] = {}

    def here(self) -> list[GlobalHooks]:
        """List the lines that see the present thread and task."""
        return [line for line in self._lines if line.passes.is_here()]

    def add(self, line: GlobalHooks) -> None:
        """Register the process-wide hooks that a line needs by now."""
        with self._lock:
            if line not in self._lines:
                self._lines = (*self._lines, line)
            for group in _GROUPS:  # in their order
                if group not in line.groups or group in self._placed:
                    continue
                try:
                    registrations = self._placed[group] = Registrations()
                    for name, hook in self._hooks(group).items():
                        registrations.register_everywhere(name, hook)
                except BaseException:  # Ctrl-C
                    self._remove(group)
                    raise

    def discard(self, line: GlobalHooks) -> None:
        """Remove a line that has ended, and the process-wide hooks that no other line needs."""
        with self._lock:
            self._lines = tuple(other for other in self._lines if other is not line)
            self._remove_unwanted()

    def shrink(self, line: GlobalHooks) -> None:
        """Remove the process-wide hooks that nobody needs after a line has dropped some taps.

        A line with taps left keeps its place among the lines.
        """
        with self._lock:
            if not line.groups:
                self._lines = tuple(other for other in self._lines if other is not line)
            self._remove_unwanted()

    def _remove_unwanted(self) -> None:
        wanted = {group for other in self._lines for group in other.groups}
        for group in self._placed.keys() - wanted:
            surely(partial(self._remove, group))

    def _remove(self, group: str) -> None:
        if group in self._placed:
            self._placed[group].remove()
            self._placed.pop(group)

    def _hooks(self, group: str) -> dict[str, Callable[..., Any]]:
        names = _GROUPS[group]
        own: dict[str, Callable[..., Any]] = {
            "forward_pre": self._forward_pre, "forward": self._forward, "after": self._after,
        }  # fmt: skip
        return {name: own.get(name) or _Event(name) for name in names}

    @staticmethod
    def _forward_pre(module: nn.Module, args: Any) -> Any:
        changed = None
        for line in DISPATCHER.here():
            for kind, matches, tap, _ in tuple(line.taps):
                if kind == "forward_pre" and matches(module):
                    new = tap.fire(module, args)
                elif kind == "backward" and matches(module):
                    new = tap.enter_at(module, args, {}, sys._getframe(1))
                    new = None if new is None else new[0]
                else:
                    continue
                if new is not None:
                    changed = args = new
        return changed

    @staticmethod
    def _forward(module: nn.Module, args: Any, *rest: Any) -> Any:
        if len(rest) < 2:
            return None  # another thread is registering or removing this hook with its kwargs flag
        kwargs, output = rest
        if isinstance(module, nn.TransformerEncoderLayer):
            _note_hidden(module, args, kwargs)
        changed = None
        for callback in _on_output(module, args, kwargs, id(sys._getframe(1))):
            new = callback(output)
            if new is not None:
                changed = output = new
        return changed

    @staticmethod
    def _after(module: nn.Module, args: Any, output: Any) -> None:
        frame = sys._getframe(1)
        for line in DISPATCHER.here():
            for kind, matches, tap, _ in tuple(line.taps):
                if kind == "backward" and matches(module):
                    tap.close_at(output, frame)


def _on_output(
    module: nn.Module, args: Any, kwargs: Any, key: int
) -> Iterator[Callable[[Any], Any]]:
    """Yield the hooks of all lines on an output, in torch's order.

    Forward hooks come first, then the forward hooks that backward hooks need. Among these,
    backward_pre comes before backward.
    """
    found: dict[str, list[_GlobalHook]] = {kind: [] for kind in _AFTER}
    for line in DISPATCHER.here():
        for one in tuple(line.taps):
            if one.kind in _AFTER and one.matches(module):
                found[one.kind].append(one)
    for one in found["forward"]:
        given = (args, kwargs) if one.with_kwargs else (args,)
        yield partial(one.tap.fire, module, *given)
    before, around = found["backward_pre"], found["backward"]
    for one in (*before, *around):
        yield partial(one.tap.join_at, module, key=key)
    for one in before:
        yield partial(one.tap.fire, module, ())
    for one in around:
        yield partial(one.tap.read_at, module, key=key)


def _note_hidden(layer: nn.Module, args: Any, kwargs: Any) -> None:
    """Note each line that torch hid modules from, by running an encoder layer as one operation."""
    inner = [module for module in layer.modules() if module is not layer]
    has_hooks = any(
        hook_dict(module, kind) for module in layer.modules() for kind in ("forward_pre", "forward")
    )
    if has_hooks or not is_fused(layer, args, kwargs):
        return
    for line in DISPATCHER.here():
        caught = [one.matches for one in line.taps if one.kind in ("forward_pre", *_AFTER)]
        if any(matches(module) for matches in caught for module in inner):
            line.note = _HIDDEN


_AFTER = ("forward", "backward_pre", "backward")


@final
class _Event:
    """A process-wide hook on registrations or on optimizers."""

    __slots__ = ("_kind",)

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, owner: Any, *values: Any) -> Any:
        changed = None
        for line in DISPATCHER.here():
            for kind, matches, tap, _ in tuple(line.taps):
                if kind == self._kind and matches(owner):
                    new = tap.fire(owner, *values)
                    if new is None:
                        continue
                    changed = new
                    # The next hook gets the result: (name, value), or (args, kwargs).
                    values = new if isinstance(new, tuple) else (*values[:-1], new)
        return changed


DISPATCHER = _Dispatcher()


class EverywhereHooks(Line):
    """The part of a raw line that registers hooks everywhere."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._catch = GlobalHooks(self.passes, is_all=self.is_everywhere)
        self.attached.append(self._catch)

    def _caught(self, kind: str, matches: Matcher, tap: Any, **options: bool) -> HookHandle:
        """Call a tap wherever a module or optimizer in this context matches."""
        with self.hooking(tap.site.port) as (_, handle), self._catch.all_or_nothing():
            self._catch.add(kind, matches, tap, **options)
            DISPATCHER.add(self._catch)
            self.keep(tap)
            return handle


_HIDDEN = (
    "torch ran encoder layers as one operation each, so hl.EVERYWHERE did not see the modules"
    f" in them.\nCall {REMEDY} before the model runs."
)
_BESIDE = (
    "nothing that it matches ran here, except perhaps in compiled code, which hl.EVERYWHERE does"
    " not reach; attach to the model itself"
)
