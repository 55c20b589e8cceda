"""Get one leaf of a nested value, or replace it."""

from __future__ import annotations

from typing import Any

from hookline.engine.pytree.describe import in_words, leaf_text
from hookline.engine.pytree.tree import _SETS, Key, Leaf, items, rebuild
from hookline.errors import SiteError


def get(value: Any, leaf: Leaf, where: str) -> Any:
    """Return the part of a value at a leaf; `where` names the site in the error.

    Raises:
        SiteError: the value has no such part; the message shows its parts.
    """
    part = value
    for depth, key in enumerate(leaf):
        parts = None if isinstance(part, _SETS) else items(part)  # a set has no order
        found = _find(parts, key) if parts is not None else None
        if parts is None or found is None:
            there = f"with [{', '.join(repr(k) for k, _ in parts)}]" if parts else "without parts"
            remedy = "Select one of these, or the whole value." if parts else "Drop the leaf."
            asked = leaf_text(leaf[: depth + 1])
            raise SiteError(
                f"{where} has no leaf {asked}: {leaf_text(leaf[:depth]) or 'the value'} is"
                f" {in_words(part)}, {there}.\n{remedy}"
            )
        part = parts[found][1]
    return part


def put(value: Any, leaf: Leaf, new: Any) -> Any:
    """Return a copy of the value in which the part at this (existing) leaf is `new`."""
    if not leaf:
        return new
    parts = items(value)
    assert parts is not None
    found = _find(parts, leaf[0])
    assert found is not None
    replaced = [part for _, part in parts]
    replaced[found] = put(replaced[found], leaf[1:], new)
    return rebuild(value, replaced)


def _find(parts: list[tuple[Key, Any]], key: Key) -> int | None:
    """Return the index of a key: by itself, or a number by order (as `ModelOutput` allows)."""
    for position, (name, _) in enumerate(parts):
        if name == key and type(name) is type(key):
            return position
    if isinstance(key, int) and -len(parts) <= key < len(parts):
        return key % len(parts)
    return None
