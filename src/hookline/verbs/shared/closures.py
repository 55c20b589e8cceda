"""The closure with which an optimizer's step computes the gradients itself.

torch's hooks before and after a step get the optimizer as the first of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure of an optimizer's step; None without one."""
    found: Callable[[], Any] | None
    found = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an optimizer's step with another closure."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
