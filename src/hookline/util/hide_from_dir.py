"""Hide attributes that are internal to hookline from `dir()` and from completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


def hide_from_dir(*names: str) -> Callable[[Class], Class]:
    """Leave names of a class out of `dir()`, so that editors do not complete them.

        >>> @hide_from_dir("inner")
        ... class Thing:
        ...     inner, outer = 1, 2
        >>> [name for name in dir(Thing()) if not name.startswith("_")]
        ['outer']

    Args:
        *names: attributes and methods of instances that users are not meant to read or call.

    Returns:
        A decorator that returns the class itself. Subclasses hide these names too.
    """

    def decorate(kind: Class) -> Class:
        of_any: Any = kind  # type checkers confuse a class's `__dir__` with its metaclass's
        listed = of_any.__dir__

        def shown(self: Any) -> list[str]:
            return sorted({*listed(self)}.difference(names))

        of_any.__dir__ = shown
        return kind

    return decorate
