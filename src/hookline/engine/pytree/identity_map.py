"""A map that compares keys by identity (`is`), not by equality.

The map uses the ids of its keys. In code being compiled, a tensor's id would be guarded, so tensors
are searched for instead. Dynamo before torch 2.13 has few ids of other objects, so each container
counts as a new key there.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine.torch_private.dynamo import OLD_DYNAMO

V = TypeVar("V")


class IdentityMap(Generic[V]):
    """A mapping by identity. It holds its keys, because the id of a freed key would be reused.

    >>> a, b = [1], [1]
    >>> seen = IdentityMap()
    >>> seen[a] = "first"
    >>> seen.get(a), seen.get(b)
    ('first', None)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, V]] = {}

    def __setitem__(self, thing: Any, value: V) -> None:
        self._entries[self._key(thing)] = thing, value

    def __contains__(self, thing: Any) -> bool:
        return self._key(thing) in self._entries

    def get(self, thing: Any) -> V | None:
        """Return the value of a key; None without one."""
        key = self._key(thing)
        return self._entries[key][1] if key in self._entries else None

    def things(self) -> list[Any]:
        """Return all keys, in order."""
        return [thing for thing, _ in self._entries.values()]

    def _key(self, thing: Any) -> int:
        if not is_dynamo_compiling():
            return id(thing)
        # The tensor's id would be guarded, and each batch has another id.
        if isinstance(thing, Tensor):
            for key, (other, _) in self._entries.items():
                if isinstance(other, Tensor) and other is thing:
                    return key
            return -1 - len(self._entries)
        return len(self._entries) if OLD_DYNAMO else id(thing)
