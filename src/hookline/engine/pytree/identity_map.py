"""A map that compares keys by what they are (`is`), not by what they equal.

By their ids. In code that is being compiled a tensor's id would be guarded, so tensors are searched
for there; torch before 2.13 has few ids of others, so each container is taken for another one.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine.torch_private.dynamo import OLD_DYNAMO

V = TypeVar("V")


class IdentityMap(Generic[V]):
    """A mapping from things. They are held as well: a freed one's id would be given to another.

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
        """All that were kept, in order."""
        return [thing for thing, _ in self._entries.values()]

    def _key(self, thing: Any) -> int:
        if not is_dynamo_compiling():
            return id(thing)
        if isinstance(thing, Tensor):  # its id would be guarded: of each batch another one
            for key, (other, _) in self._entries.items():
                if isinstance(other, Tensor) and other is thing:
                    return key
            return -1 - len(self._entries)
        return len(self._entries) if OLD_DYNAMO else id(thing)
