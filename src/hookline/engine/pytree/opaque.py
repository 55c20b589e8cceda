"""Tensors in objects that do not show their parts: iterators, partial functions, keys of a dict.

A tensor in such an object cannot be replaced. The garbage collector can find it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hookline.engine.pytree import tree
from hookline.engine.pytree.identity_map import IdentityMap

_MOST = 1000  # the most objects searched inside one such object


def every(value: Any) -> list[Tensor]:
    """Return every tensor in a value, also in objects that do not show their parts."""
    if isinstance(value, Tensor):
        return [value]
    found = []
    for _, part in tree.walk(value):
        if isinstance(part, Tensor):
            found.append(part)
        else:
            found += _tensors_in(part)
    return found


def holder(value: Any) -> Any:
    """Return the first object in a value that holds a tensor without showing it; None without one.

    A copy of the value still holds that tensor itself.
    """
    if isinstance(value, Tensor):
        return None
    for _, part in tree.walk(value):
        if not isinstance(part, Tensor) and _tensors_in(part):
            return part
    return None


def _tensors_in(part: Any) -> list[Tensor]:
    found: list[Tensor] = []
    seen: IdentityMap[None] = IdentityMap()
    stack: list[Any] = [*part] if isinstance(part, Mapping) else [part]
    for _ in range(_MOST):
        if not stack:
            break
        one = stack.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif one not in seen and not isinstance(one, tree.ATOMS):
            seen[one] = None
            stack += gc.get_referents(one)
    return found
