"""Taps on the inputs and outputs of a module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.compile.graph_capture import Callback
from hookline.engine.passes.passes import Passes
from hookline.engine.pytree.call_arguments import ArgumentBinder
from hookline.engine.selection.site import Site
from hookline.engine.taps.base import ON_INPUTS, HookSpec, Order, Tap


class OutputTap(Tap):
    """A tap on the output of a module: a forward hook."""

    __slots__ = ()

    def fire(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Call the callback: the forward hook.

        This is the hot path; a call of `_pass_of` would cost too much.
        """
        if is_dynamo_compiling():
            return self.fire_in_graph(output)
        current = self.in_thread.current
        if current is None:
            current = self._pass_outside_root(module)
            if current is None:
                return None
        self.fired += 1
        try:
            return self.callback(current, output)
        except Exception as error:
            self._add_error_note(error, output)
            raise


class InputTap(Tap):
    """A tap on the inputs of a module, as bound arguments: a forward-pre hook with kwargs."""

    __slots__ = ("arguments",)
    hooks: tuple[HookSpec, ...] = ON_INPUTS

    def __init__(self, site: Site, passes: Passes, callback: Callback, order: Order) -> None:
        super().__init__(site, passes, callback, order)
        self.arguments: ArgumentBinder = ArgumentBinder()

    def fire(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        """Call the callback: the forward-pre hook."""
        if kwargs is None:
            # Another thread is removing this hook and has already cleared its with_kwargs flag.
            return None
        if is_dynamo_compiling():
            value = self.arguments.bind(module, args, kwargs)
            new = self.fire_in_graph(value)
            return None if new is None else self.arguments.unbind(module, new, value, args, kwargs)
        current = self._pass_of(module)
        if current is None:
            return None
        self.fired += 1
        value = None
        try:
            value = self.arguments.bind(module, args, kwargs)
            new = self.callback(current, value)
            return None if new is None else self.arguments.unbind(module, new, value, args, kwargs)
        except Exception as error:
            self._add_error_note(error, value)
            raise
