"""Taps on what a module takes and returns."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.in_graph import Callback
from hookline.engine.passes.passes import Passes
from hookline.engine.pytree.call_arguments import Arguments
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import Order, Tap


class OutputTap(Tap):
    """Sees what a module returns: a forward hook."""

    __slots__ = ()

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The hook itself: the hot path, on which `_pass_of` would be a call too many."""
        if is_dynamo_compiling():
            return self.trace(output)
        current = self.lane.current
        if current is None:
            current = self._slow_path(module)
            if current is None:
                return None
        self.fired += 1
        try:
            return self.callback(current, output)
        except Exception as error:
            self._note(error)
            raise


class InputTap(Tap):
    """Sees what a module is called with, as bound arguments: a forward-pre hook with kwargs."""

    __slots__ = ("arguments",)

    def __init__(self, site: Site, passes: Passes, callback: Callback, rank: Order) -> None:
        super().__init__(site, passes, callback, rank)
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
            return None if new is None else self.arguments.unbind(module, new, value, args, kwargs)
        current = self._pass_of(module)
        if current is None:
            return None
        self.fired += 1
        try:
            value = self.arguments.bind(module, args, kwargs)
            new = self.callback(current, value)
            return None if new is None else self.arguments.unbind(module, new, value, args, kwargs)
        except Exception as error:
            self._note(error)
            raise
