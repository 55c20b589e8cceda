"""Compiled: what it takes for torch.compile to honour a line. Imports taps, passes.

Compiled code is reused as long as its guards hold, and by default they look at no hook. So while a
line is on, code is compiled with guards on hooks; and each hooked module carries a mark that code
compiled before is guarded against. When the mark goes with the line, the old code serves again.

No Python of ours runs inside a graph. A pass is therefore begun and ended at its border, where the
compiled model is called.
"""

from __future__ import annotations

import threading
from typing import Any, final

import torch
from torch import nn

from hookline.engine.compile_internals import (
    Border,
    dynamo_config,
    has_compiled,
    mark_module,
    unmark_module,
)
from hookline.engine.modules import Node, TensorNode
from hookline.engine.passes import Pass, Passes
from hookline.engine.taps import Tap


@final
class Compiled:
    """What one line needs of torch.compile, from when dynamo is there until the line ends.

    Args:
        passes: the line's, begun and ended at the border of the compiled model.
        root: the line's model, if it has one.
        taps: the line's, which grow.
        nodes: where they are, by id.
    """

    __slots__ = ("_border", "_marked", "_nodes", "_passes", "_root", "_taps", "is_on")

    def __init__(
        self,
        passes: Passes,
        root: nn.Module | None,
        taps: list[Tap],
        nodes: dict[int, Node | TensorNode],
    ) -> None:
        self._passes = passes
        self._root = root
        self._taps = taps
        self.is_on = False
        self._nodes = nodes
        self._marked: list[nn.Module] = []
        self._border: Border | None = None

    def look_around(self) -> None:
        """Unless it is done: if dynamo is loaded by now, have it look at hooks.

        As long as it is not, nothing can be compiled.
        """
        if self.is_on or self._root is None or dynamo_config() is None:
            return
        self.is_on = True
        _GUARDS.hold(self)
        self._border = Border(self._root, self._passes.begin, self._passes.end)
        if has_compiled():
            self._mark(self._root)
        for tap in self._taps:
            self.hooked(tap, self._nodes.get(id(tap)))

    def hooked(self, tap: Tap, node: Node | TensorNode | None) -> None:
        """A module has got a hook: code compiled before is not to serve while the line lasts."""
        is_used = has_compiled()
        # What compiled code reads has to be there before it is called, or its guards would fail.
        if is_used or tap.site.is_gradient:
            tap.prepare()
        if is_used and isinstance(node, Node):
            self._mark(node.module)

    def _mark(self, module: nn.Module) -> None:
        self._marked.append(module)  # first: an interrupt from here on takes it off, too
        mark_module(module, self)

    def begin_pass(self, current: Pass) -> None:
        """A pass begins: compiled code may ask which."""
        self.look_around()
        if self.is_on:
            self._passes.numbered[current.number] = current
            self._passes.switch.number = torch.tensor(current.number, device="cpu")

    def restart(self) -> None:
        """Nothing of another thread is kept here."""

    def end_pass(self, current: Pass) -> None:
        """A pass has ended in which compiled code has left values: see them."""
        for tap in self._taps:
            tap.harvest(current)

    def end(self) -> None:
        """Put all back."""
        self._root = None
        self._nodes = {}
        while self._marked:
            unmark_module(self._marked[-1], self)
            self._marked.pop()
        if self._border is not None:
            self._border.remove()
            self._border = None
        _GUARDS.release(self)
        self.is_on = False


@final
class _Guards:
    """Dynamo's setting that has guards look at hooks; on while any line needs it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders: set[int] = set()
        self._before: Any = None

    def hold(self, holder: object) -> None:
        with self._lock:
            config = dynamo_config()
            if not self._holders:
                self._before = config.skip_nnmodule_hook_guards
            self._holders.add(id(holder))
            config.skip_nnmodule_hook_guards = False

    def release(self, holder: object) -> None:
        with self._lock:
            if id(holder) not in self._holders:
                return
            if len(self._holders) == 1:
                dynamo_config().skip_nnmodule_hook_guards = self._before
            self._holders.discard(id(holder))


_GUARDS = _Guards()
