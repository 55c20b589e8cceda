"""Arguments: what a module is called with, as one value. Imports only torch.

That value is the tensor itself if the module got nothing else, otherwise a dict by parameter name.
"""

from __future__ import annotations

import inspect
from typing import Any, final

from torch import Tensor, nn


@final
class Arguments:
    """Binds the arguments of one module's calls, and takes bound ones apart again."""

    __slots__ = ("_signature",)

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call's arguments as one value. A lone tensor needs no names: the hot path."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return args[0]
        if not args and len(kwargs) == 1:
            (value,) = kwargs.values()
            if isinstance(value, Tensor):
                return value
        names, rest = self._positional(module)
        return {**_bind(args, names, rest), **kwargs}

    def unbind(
        self, new: Any, old: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A changed value as (args, kwargs), in the form in which the `old` one came."""
        if isinstance(old, Tensor):
            return ((new,), kwargs) if args else ((), dict.fromkeys(kwargs, new))
        names, rest = self._signature
        positional = [new[name] for name in names[: len(args)]]
        if len(args) > len(names):
            if rest is not None:
                positional.extend(new[rest])
            else:
                positional.extend(new[f"arg{k}"] for k in range(len(names), len(args)))
        return tuple(positional), {name: new[name] for name in kwargs}

    def _positional(self, module: nn.Module) -> tuple[list[str], str | None]:
        """The positional parameters of the module's forward, and the name of its `*args`."""
        try:
            return self._signature
        except AttributeError:
            pass
        named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names, rest = [], None
        try:
            for parameter in inspect.signature(module.forward).parameters.values():
                if parameter.kind in named:
                    names.append(parameter.name)
                elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                    rest = parameter.name
        except (TypeError, ValueError):  # a forward written in C has no signature
            pass
        self._signature: tuple[list[str], str | None] = (names, rest)
        return self._signature


def _bind(args: tuple[Any, ...], names: list[str], rest: str | None) -> dict[str, Any]:
    """Positional arguments by name; those that no parameter takes are numbered: `arg2`."""
    bound = dict(zip(names, args, strict=False))
    if len(args) > len(names):
        if rest is not None:
            bound[rest] = args[len(names) :]
        else:
            bound.update((f"arg{k}", args[k]) for k in range(len(names), len(args)))
    return bound
