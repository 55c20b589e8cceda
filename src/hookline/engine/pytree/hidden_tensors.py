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


def every_tensor(value: Any) -> list[Tensor]:
    """Return every tensor in a value, also in objects that do not show their parts."""
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    for _, part in tree.tensors_and_opaque_parts(value):
        if isinstance(part, Tensor):
            tensors.append(part)
        else:
            tensors += _hidden_tensors_in(part)
    return tensors


def hidden_tensor_holder(value: Any) -> Any:
    """Return the first object in a value that holds a tensor without showing it; None without one.

    A copy of the value still holds that tensor itself.
    """
    if isinstance(value, Tensor):
        return None
    for _, part in tree.tensors_and_opaque_parts(value):
        if not isinstance(part, Tensor) and _hidden_tensors_in(part):
            return part
    return None


def _hidden_tensors_in(part: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    visited: IdentityMap[None] = IdentityMap()
    stack: list[Any] = [*part] if isinstance(part, Mapping) else [part]
    for _ in range(_MOST):
        if not stack:
            break
        candidate = stack.pop()
        if isinstance(candidate, Tensor):
            tensors.append(candidate)
        elif candidate not in visited and not isinstance(candidate, tree.ATOMS):
            visited[candidate] = None
            stack += gc.get_referents(candidate)
    return tensors
