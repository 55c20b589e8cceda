"""A weak-keyed dict that compares keys with `is`.

Identity is needed because a module may define `==` and so become unhashable.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar, final

V = TypeVar("V")


@final
class WeakIdentityMap(Generic[V]):
    """A weak-keyed dict that compares keys with `is`; an entry is dropped with its key.

    >>> class Thing:
    ...     def __eq__(self, other):
    ...         return True
    >>> a, b = Thing(), Thing()
    >>> known = WeakIdentityMap()
    >>> known[a] = "first"
    >>> known.get(a), known.get(b)
    ('first', None)
    >>> del a
    >>> len(known)
    0
    """

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def __setitem__(self, thing: Any, value: V) -> None:
        key = id(thing)
        self._entries[key] = weakref.ref(thing, partial(_forget, self._entries, key)), value

    def __contains__(self, thing: Any) -> bool:
        return id(thing) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, thing: Any) -> V | None:
        """Return the value of a key, or None if the key is absent."""
        entry = self._entries.get(id(thing))
        return None if entry is None else entry[1]

    def get_or_add(self, thing: Any, make: Callable[[], V]) -> V:
        """Return the value of a key; if the key is absent, add the value that `make` returns."""
        entry = self._entries.get(id(thing))
        if entry is None:
            self[thing] = value = make()
            return value
        return entry[1]

    def pop(self, thing: Any) -> V | None:
        """Remove a key and return its value, or None if the key is absent."""
        entry = self._entries.pop(id(thing), None)
        return None if entry is None else entry[1]

    def items(self) -> list[tuple[Any, V]]:
        """List the pairs of key and value whose keys are still alive."""
        entries = list(self._entries.values())
        return [(thing, value) for ref, value in entries if (thing := ref()) is not None]


def _forget(entries: dict[int, Any], key: int, gone: weakref.ref[Any]) -> None:
    entry = entries.get(key)
    if entry is not None and entry[0] is gone:
        del entries[key]
