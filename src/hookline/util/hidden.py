"""Leave out of completion what one part of hookline needs of another, and users do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type[Any])


def hides(*names: str) -> Callable[[Class], Class]:
    """Leave names of a class out of `dir()`, and so out of what an editor completes.

        >>> @hides("inner")
        ... class Thing:
        ...     inner, outer = 1, 2
        >>> [name for name in dir(Thing()) if not name.startswith("_")]
        ['outer']

    Args:
        *names: attributes and methods of instances, which no user is meant to read or call.

    Returns:
        A decorator, which returns the class itself. Subclasses hide these names too.
    """

    def decorate(kind: Class) -> Class:
        of_any: Any = kind  # type checkers take a class's own `__dir__` for that of its type
        listed = of_any.__dir__

        def shown(self: Any) -> list[str]:
            return sorted({*listed(self)}.difference(names))

        of_any.__dir__ = shown
        return kind

    return decorate
