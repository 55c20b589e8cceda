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

    def __setitem__(self, item: Any, value: V) -> None:
        self._entries[self._key(item)] = item, value

    def __contains__(self, item: Any) -> bool:
        return self._key(item) in self._entries

    def get(self, item: Any) -> V | None:
        """Return the value of a key; None without one."""
        key = self._key(item)
        return self._entries[key][1] if key in self._entries else None

    def key_list(self) -> list[Any]:
        """Return all keys, in order."""
        return [item for item, _ in self._entries.values()]

    def _key(self, item: Any) -> int:
        if not is_dynamo_compiling():
            return id(item)
        # The tensor's id would be guarded, and each batch has another id.
        if isinstance(item, Tensor):
            for key, (other, _) in self._entries.items():
                if isinstance(other, Tensor) and other is item:
                    return key
            return -1 - len(self._entries)
        return len(self._entries) if OLD_DYNAMO else id(item)
