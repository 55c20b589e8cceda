"""EVERYWHERE: the modules of any model, but only in this context. Imports placing, select, taps.

torch's process-wide hooks see every thread. So there is one dispatcher, on torch only while some
line needs it, and it asks a context variable which lines are to be told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, final

from torch import nn

from hookline.engine.errors import SelectionError
from hookline.engine.placing import register_everywhere
from hookline.engine.select import Selector
from hookline.engine.taps import RawTap
from hookline.engine.torch_internals import forget_global_hook


@final
class Everywhere:
    """Stands for the modules of any model; `hl.EVERYWHERE` is the only one."""

    def __repr__(self) -> str:
        return "hl.EVERYWHERE"


EVERYWHERE = Everywhere()


@final
class Catch:
    """The hooks of one line on modules everywhere, each with what it matches."""

    __slots__ = ("taps",)

    def __init__(self) -> None:
        self.taps: list[tuple[str, Callable[[nn.Module], bool], RawTap, bool]] = []

    def add(
        self, kind: str, selector: Selector, tap: RawTap, *, with_kwargs: bool, prepend: bool
    ) -> None:
        """Add a hook of a kind, on the modules that a selector matches wherever they run."""
        at = 0 if prepend else len(self.taps)
        self.taps.insert(at, (kind, everywhere_matcher(selector), tap, with_kwargs))


def everywhere_matcher(selector: Selector) -> Callable[[nn.Module], bool]:
    """A selector that needs no paths, since a module met anywhere has none."""
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
        f"{selector!r} cannot select with hl.EVERYWHERE, where modules have no paths."
        "\nGive a module type, a module, a predicate (path, module) -> bool, or None for all."
    )


# The lines that see this context.
_here: ContextVar[tuple[Catch, ...]] = ContextVar("hookline_everywhere", default=())


@final
class _Dispatcher:
    """Torch's process-wide hooks, there only while some line needs them; each asks the context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: list[Catch] = []
        self._handles: list[Any] = []

    def add(self, line: Catch) -> None:
        """Let a line see this context."""
        with self._lock:
            if line in self._lines:
                return
            self._lines.append(line)
            if not self._handles:
                self._handles = register_everywhere(self._forward_pre, self._forward)
        _here.set((*_here.get(), line))

    def discard(self, line: Catch) -> None:
        """A line has ended; with the last one, torch's hooks go."""
        _here.set(tuple(other for other in _here.get() if other is not line))
        line.taps.clear()  # another context may go on holding the line
        with self._lock:
            if line in self._lines:
                self._lines.remove(line)
            if not self._lines:
                while self._handles:
                    forget_global_hook(self._handles.pop())

    @staticmethod
    def _forward_pre(module: nn.Module, args: Any) -> Any:
        changed = None
        for line in _here.get():
            for kind, matches, tap, _ in line.taps:
                if kind == "forward_pre" and matches(module):
                    new = tap.fire(module, args)
                    if new is not None:
                        changed = args = new
        return changed

    @staticmethod
    def _forward(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        changed = None
        for line in _here.get():
            for kind, matches, tap, with_kwargs in line.taps:
                if kind == "forward" and matches(module):
                    values = (args, kwargs, output) if with_kwargs else (args, output)
                    new = tap.fire(module, *values)
                    if new is not None:
                        changed = output = new
        return changed


DISPATCHER = _Dispatcher()
