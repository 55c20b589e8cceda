"""Find the part of a model, of data or of a function that cannot be pickled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

_DEEPEST = 12  # parts within parts


def find_unpicklable(
    parts: Mapping[str, Any], dumps: Callable[[Any], Any]
) -> tuple[str, Exception] | None:
    """Find the innermost part that cannot be pickled.

        >>> import pickle
        >>> find_unpicklable({"data": [1, {"open": print, "act": lambda: 0}]}, pickle.dumps)[0]
        "data[1]['act']"

    Args:
        parts: what is pickled, by name.
        dumps: pickles an object, or raises.

    Returns:
        The name of the part, and the error that its pickling raises; None if all can be pickled.
    """
    return _find_in_parts(parts.items(), dumps, (), _DEEPEST)


def _find_in_parts(
    parts: Any, dumps: Callable[[Any], Any], outer: tuple[int, ...], depth: int
) -> tuple[str, Exception] | None:
    for name, value in parts:
        if id(value) in outer:
            continue
        error = _pickling_error(value, dumps)
        if error is not None:
            inner = depth and _find_in_parts(
                _named_parts(name, value), dumps, (*outer, id(value)), depth - 1
            )
            return inner or (name, error)
    return None


def _pickling_error(value: Any, dumps: Callable[[Any], Any]) -> Exception | None:
    try:
        dumps(value)
    except Exception as error:
        return error
    return None


def _named_parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with its name."""
    if isinstance(value, Tensor | type):
        return
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value)
        for scope in (variables.nonlocals, variables.globals):
            yield from ((f"the variable {key} of {name}", part) for key, part in scope.items())
    elif inspect.ismethod(value):
        yield f"{name}.__self__", value.__self__
    elif hasattr(value, "__dict__"):
        if isinstance(value, nn.Module):
            yield from ((f"{name}.{key}", part) for key, part in value.named_children())
        yield from ((f"{name}.{key}", part) for key, part in vars(value).items())
