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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, final

from torch import nn

from hookline.engine import (
    Attachment,
    HookHandle,
    Line,
    Node,
    Operation,
    Passes,
    Registrations,
    Selector,
    Site,
    Tap,
    hide_from_dir,
    hook_dict,
    may_have_compiled,
    retry_interrupted,
)
from hookline.engine.taps.fast_path import REMEDY, is_fused
from hookline.errors import SelectionError
from hookline.util.fork_safe_lock import fork_safe_lock

Matcher = Callable[[nn.Module], bool]


class _GlobalHook(NamedTuple):
    """A hook of a line, and the function that says which modules it runs on."""

    kind: str
    matches: Matcher
    tap: Any  # RawTap | BackwardPreTap | BackwardTap | EventTap


@final
@dataclass(slots=True, eq=False)
class GlobalHooks(Attachment):
    """The hooks of one line on modules, registrations and optimizers everywhere."""

    # The passes of the line. They tell whether the line sees the present thread and task.
    passes: Passes
    # Whether the line has no model, so that these are all its hooks.
    is_all: bool = field(kw_only=True)
    note: str | None = None  # a warning, if torch ran matching modules as one operation
    taps: list[_GlobalHook] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)

    def add_hook(self, kind: str, matches: Matcher, tap: Any, *, prepend: bool) -> None:
        """Add a hook of a kind on the modules that `matches` accepts."""
        self.taps.insert(0 if prepend else len(self.taps), _GlobalHook(kind, matches, tap))
        self.groups |= _groups_needed_by(kind)

    @property
    def has_hooks(self) -> bool:
        """Tell whether any hook is registered."""
        return bool(self.groups)

    def end(self) -> None:
        """Remove all hooks."""
        self.drop_taps([hook.tap for hook in self.taps])

    def drop_taps(self, taps: Iterable[Any]) -> None:
        """Drop some taps, and the process-wide hooks that no other tap needs."""
        dropped = set(map(id, taps))
        self.taps[:] = [hook for hook in self.taps if id(hook.tap) not in dropped]
        self.groups = {group for hook in self.taps for group in _groups_needed_by(hook.kind)}
        DISPATCHER.remove_unneeded_hooks(self)

    def why_silent(self) -> str | None:
        """Name the compiled code that no process-wide hook reaches, if there may be any."""
        return _BESIDE if self.is_all and may_have_compiled() else None

    @contextmanager
    def undo_on_error(self) -> Iterator[None]:
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


def _groups_needed_by(kind: str) -> set[str]:
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

    def lines_in_context(self) -> list[GlobalHooks]:
        """List the lines that see the present thread and task."""
        return [line for line in self._lines if line.passes.sees_context_or_backward()]

    def register_needed_hooks(self, line: GlobalHooks) -> None:
        """Register the process-wide hooks that a line needs by now."""
        with self._lock:
            if line not in self._lines:
                self._lines = (*self._lines, line)
            for group in filter(line.groups.__contains__, _GROUPS):  # in their order
                self._register_group(group)

    def _register_group(self, group: str) -> None:
        if group in self._placed:
            return
        registrations = self._placed[group] = Registrations()
        try:
            for kind in _GROUPS[group]:
                registrations.register_globally(kind, _HOOKS.get(kind) or _EventDispatcher(kind))
        except BaseException:  # Ctrl-C
            self._remove_group(group)
            raise

    def remove_unneeded_hooks(self, line: GlobalHooks) -> None:
        """Remove the process-wide hooks that nobody needs after a line has dropped some taps.

        A line with taps left keeps its place among the lines.
        """
        with self._lock:
            if not line.groups:
                self._lines = tuple(other for other in self._lines if other is not line)
            needed = {group for other in self._lines for group in other.groups}
            for group in self._placed.keys() - needed:
                retry_interrupted(partial(self._remove_group, group))

    def _remove_group(self, group: str) -> None:
        if group in self._placed:
            self._placed[group].remove()
            self._placed.pop(group)


DISPATCHER = _Dispatcher()


def _matching_hooks(kinds: tuple[str, ...], owner: Any) -> Iterator[_GlobalHook]:
    """Yield the hooks of all lines here that match a module or optimizer."""
    if isinstance(owner, Operation):
        return  # stands for the calls of a function, and is no module of a model
    for line in DISPATCHER.lines_in_context():
        for hook in tuple(line.taps):
            if hook.kind in kinds and hook.matches(owner):
                yield hook


def _dispatch_forward_pre(module: nn.Module, args: Any) -> Any:
    changed, frame = None, sys._getframe(1)
    for hook in _matching_hooks(("forward_pre", "backward"), module):
        if hook.kind == "forward_pre":
            new = hook.tap.fire(module, args)
        else:
            new = hook.tap.begin_call(module, args, {}, frame)
            new = None if new is None else new[0]
        if new is not None:
            changed = args = new
    return changed


def _dispatch_forward(module: nn.Module, args: Any, *rest: Any) -> Any:
    if len(rest) < 2:
        return None  # another thread is registering or removing this hook with its kwargs flag
    kwargs, output = rest
    if isinstance(module, nn.TransformerEncoderLayer):
        _set_fused_layer_warning(module, args, kwargs)
    changed = None
    for callback in _hooks_on_output(module, args, kwargs, id(sys._getframe(1))):
        new = callback(output)
        if new is not None:
            changed = output = new
    return changed


def _dispatch_end_of_call(module: nn.Module, args: Any, output: Any) -> None:
    frame = sys._getframe(1)
    for hook in _matching_hooks(("backward",), module):
        hook.tap.end_call(module, args, output, frame)


def _hooks_on_output(
    module: nn.Module, args: Any, kwargs: Any, key: int
) -> Iterator[Callable[[Any], Any]]:
    """Yield the hooks of all lines on an output, in torch's order.

    Forward hooks come first, then the forward hooks that backward hooks need. Among these,
    backward_pre comes before backward.
    """
    taps: dict[str, list[Any]] = {kind: [] for kind in _ON_OUTPUT}
    for hook in _matching_hooks(_ON_OUTPUT, module):
        taps[hook.kind].append(hook.tap)
    for tap in taps["forward"]:
        arguments = (args, kwargs) if tap.hooks[0].with_kwargs else (args,)
        yield partial(tap.fire, module, *arguments)
    before, around = taps["backward_pre"], taps["backward"]
    for tap in (*before, *around):
        yield partial(tap.join_output_gradients, module, (), key=key)
    for tap in before:
        yield partial(tap.fire, module, ())
    for tap in around:
        yield partial(tap.hook_output_gradients, module, (), key=key)


def _set_fused_layer_warning(layer: nn.Module, args: Any, kwargs: Any) -> None:
    """Note each line that torch hid modules from, by running an encoder layer as one operation."""
    inner = [module for module in layer.modules() if module is not layer]
    has_hooks = any(
        hook_dict(module, kind) for module in layer.modules() for kind in ("forward_pre", "forward")
    )
    if has_hooks or not is_fused(layer, args, kwargs):
        return
    for line in DISPATCHER.lines_in_context():
        matchers = [hook.matches for hook in line.taps if hook.kind in ("forward_pre", *_ON_OUTPUT)]
        if any(matches(module) for matches in matchers for module in inner):
            line.note = _HIDDEN


_ON_OUTPUT = ("forward", "backward_pre", "backward")
_HOOKS: dict[str, Callable[..., Any]] = {
    "forward_pre": _dispatch_forward_pre,
    "forward": _dispatch_forward,
    "after": _dispatch_end_of_call,
}


@final
class _EventDispatcher:
    """A process-wide hook on registrations or on optimizers."""

    __slots__ = ("_kinds",)

    def __init__(self, kind: str) -> None:
        self._kinds = (kind,)

    def __call__(self, owner: Any, *values: Any) -> Any:
        changed = None
        for hook in _matching_hooks(self._kinds, owner):
            new = hook.tap.fire(owner, *values)
            if new is not None:
                changed = new
                # The next hook gets the result: (name, value), or (args, kwargs).
                values = new if isinstance(new, tuple) else (*values[:-1], new)
        return changed


@hide_from_dir("hook_everywhere")
class EverywhereHooks(Line):
    """The part of a raw line that registers hooks everywhere."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._catch = GlobalHooks(self.passes, is_all=self.is_everywhere)
        self.attached.append(self._catch)

    def hook_everywhere(
        self, kind: str, matches: Matcher, tap: Any, *, prepend: bool = False
    ) -> HookHandle:
        """Call a tap wherever a module or optimizer in this context matches."""
        with self.new_handle(tap.site.port) as handle, self._catch.undo_on_error():
            self._catch.add_hook(kind, matches, tap, prepend=prepend)
            DISPATCHER.register_needed_hooks(self._catch)
            self.add_tap(tap)
            return handle

    def _hook_sites(
        self, kind: str, places: Iterable[tuple[Site, Node]], make: Callable[[Site], Tap], *,
        prepend: bool = False,
    ) -> HookHandle:  # fmt: skip
        """Place a tap at each of these sites."""
        with self.new_handle(kind) as handle:
            self.register_taps([(make(site), node) for site, node in places], prepend=prepend)
            return handle


_HIDDEN = (
    "torch ran encoder layers as one operation each, so hl.EVERYWHERE did not see the modules"
    f" in them.\nCall {REMEDY} before the model runs."
)
_BESIDE = (
    "nothing that it matches ran here, except perhaps in compiled code, which hl.EVERYWHERE does"
    " not reach; attach to the model itself"
)
