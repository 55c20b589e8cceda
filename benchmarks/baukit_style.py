"""The technique of a widely copied tracing dictionary, baukit's, written anew for this table.

One object for each layer, which looks its module up by walking the model to that name, and puts
one hook on it that keeps the output. Options to clone, detach or retain gradients are left off.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Self

from torch import nn


class Stop(Exception):
    """Ends the forward once the last layer has its value."""


class Trace:
    """Keeps the output of the layer of this name."""

    def __init__(self, model: nn.Module, name: str, stop: bool = False) -> None:
        self.output: Any = None
        self._stop = stop
        self._handle = _find(model, name).register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output
        if self._stop:
            raise Stop

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()


class TraceDict(OrderedDict[str, Trace]):
    """One `Trace` for each named layer, for the length of a `with` block.

    Args:
        model: the model.
        names: the layers, in the order in which they run.
        stop: end the forward at the last of them.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], stop: bool = False) -> None:
        super().__init__()
        self._stop = stop
        for number, name in enumerate(names, 1):
            self[name] = Trace(model, name, stop and number == len(names))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        for trace in self.values():
            trace.close()
        return self._stop and kind is not None and issubclass(kind, Stop)


def _find(model: nn.Module, name: str) -> nn.Module:
    for found, module in model.named_modules():
        if found == name:
            return module
    raise LookupError(name)
