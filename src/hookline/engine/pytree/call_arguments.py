"""Bind the arguments of a module's call to one value.

The value is the tensor itself if the module gets nothing else, otherwise a dict by parameter name.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection
from typing import Any, final

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.function_names import ArgumentNames, argument_names
from hookline.engine.torch_private.dynamo import OLD_DYNAMO, run_at_trace_time


@final
class ArgumentBinder:
    """A binder of the arguments of one module's calls to parameter names, and back."""

    __slots__ = ("_forward", "_positional")

    def __init__(self) -> None:
        # A weak reference, because a forward in a module's `__dict__` may hold that module.
        self._forward: Callable[[], Any] = _unknown_forward
        self._positional = ArgumentNames((), None)

    def bind(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bind a call's arguments to one value; on the hot path, a lone tensor needs no names."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return args[0]
        if not args and len(kwargs) == 1:
            (value,) = kwargs.values()
            if isinstance(value, Tensor):
                return value
        bound = _bind_positional(args, self._parameters_of(module))
        value = {**bound, **kwargs}
        if len(value) == len(bound) + len(kwargs):
            return value
        names = _distinct_keyword_names(kwargs, bound)
        return {**bound, **{names[name]: value for name, value in kwargs.items()}}

    def unbind(
        self, module: nn.Module, new: Any, old: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a changed value to (args, kwargs), in the form of the `old` value."""
        if isinstance(old, Tensor):
            return ((new,), kwargs) if args else ((), dict.fromkeys(kwargs, new))
        parameters = self._parameters_of(module)
        bound, rest = _bind_positional(args, parameters), parameters.rest
        positional = [new[name] for name in bound]
        if rest in bound:
            positional[-1:] = new[rest]
        keywords = _distinct_keyword_names(kwargs, bound)
        return tuple(positional), {name: new[keywords[name]] for name in kwargs}

    def _parameters_of(self, module: nn.Module) -> ArgumentNames:
        """Return the positional parameters of the module's present forward."""
        if is_dynamo_compiling():
            # Dynamo before 2.13 makes constants of numbers, and of modules it makes none.
            key = id(module) if OLD_DYNAMO else module
            names, rest = _parameter_names_in_graph(key).split(";")
            return ArgumentNames(tuple(names.split(",")) if names else (), rest or None)
        forward = module.forward
        function = getattr(forward, "__func__", forward)  # each look-up makes a new method object
        if self._forward() is not function:
            self._positional = argument_names(forward)
            try:
                self._forward = weakref.ref(function)
            except TypeError:  # without weak references, the signature is read in each call
                self._forward = _unknown_forward
        return self._positional


def _unknown_forward() -> object:
    """Stand for an unknown forward."""
    return _unknown_forward


@run_at_trace_time
def _parameter_names_in_graph(module: Any) -> str:
    """Join the names of a forward's positional parameters in one text, which a graph can hold.

    Compiled code is guarded on the code of the forward, through which it calls the forward. If
    compiled code read the signature itself, it would be guarded on the function, and each line has
    another function.

    Args:
        module: the module that is being traced, or its `id()`.
    """
    if isinstance(module, int):
        module = ctypes.cast(module, ctypes.py_object).value  # it runs, so it is alive
    names, rest = argument_names(module.forward)
    return f"{','.join(names)};{rest or ''}"


def _bind_positional(args: tuple[Any, ...], parameters: ArgumentNames) -> dict[str, Any]:
    """Bind positional arguments by name; arguments without a parameter are numbered: `arg2`."""
    names, rest = parameters
    bound = dict(zip(names, args, strict=False))
    if len(args) > len(names):
        if rest is not None:
            bound[rest] = args[len(names) :]
        else:
            # A decorated forward may take more arguments than its signature says, and the signature
            # may have an `arg2`.
            for k in range(len(names), len(args)):
                bound[_make_distinct(f"arg{k}", "*", bound)] = args[k]
    return bound


def _distinct_keyword_names(kwargs: dict[str, Any], taken: dict[str, Any]) -> dict[str, str]:
    """Return a name for each keyword argument.

    `f(x, /, *rest, **kw)` may be called with `x=` and `rest=`. These are named `**x` and `**rest`.
    """
    used = {*taken, *kwargs}
    names = {}
    for name in kwargs:
        names[name] = _make_distinct(name, "**", used) if name in taken else name
        used.add(names[name])
    return names


def _make_distinct(name: str, mark: str, used: Collection[str]) -> str:
    while name in used:
        name = mark + name
    return name
