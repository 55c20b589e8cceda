"""Get one leaf of a nested value, or replace it."""

from __future__ import annotations

from collections.abc import MappingView
from operator import is_
from typing import Any

from torch.compiler import is_dynamo_compiling

from hookline.display.text import first_line
from hookline.engine.pytree.describe import in_words, leaf_text
from hookline.engine.pytree.tree import _SETS, Key, Leaf, items, rebuild
from hookline.errors import SiteError, StructureError


def get(value: Any, leaf: Leaf, where: str) -> Any:
    """Return the part of a value at a leaf; `where` names the site in the error.

    Raises:
        SiteError: the value has no such part; the message shows its parts.
    """
    part = value
    for depth, key in enumerate(leaf):
        parts = None if isinstance(part, _SETS) else items(part)  # a set has no order
        index = _index_of_key(parts, key) if parts is not None else None
        if parts is None or index is None:
            keys = f"with [{', '.join(repr(k) for k, _ in parts)}]" if parts else "without parts"
            remedy = "Select one of these, or the whole value." if parts else "Drop the leaf."
            missing = leaf_text(leaf[: depth + 1])
            raise SiteError(
                f"{where} has no leaf {missing}: {leaf_text(leaf[:depth]) or 'the value'} is"
                f" {in_words(part)}, {keys}.\n{remedy}"
            )
        part = parts[index][1]
    return part


def put(value: Any, leaf: Leaf, new: Any, where: str = "the value") -> Any:
    """Return a copy of the value in which the part at this (existing) leaf is `new`.

    Raises:
        StructureError: a container on the way cannot be made anew with its class and attributes;
            `where` names the site in the error.
    """
    if not leaf:
        return new
    parts = items(value)
    assert parts is not None
    position = _index_of_key(parts, leaf[0])
    assert position is not None
    changed = [part for _, part in parts]
    changed[position] = put(changed[position], leaf[1:], new, where)
    if type(value) in _PLAIN or is_dynamo_compiling():
        return rebuild(value, changed)
    try:
        container = rebuild(value, changed)
        if _has_same_parts(container, value, changed):
            return container
        error = None
    except Exception as raised:
        error = raised
    kind = type(value).__name__
    reason = first_line(error) if error else "its copy has another class, part or attribute"
    raise StructureError(
        f"{where} must be a part of a container that can be made anew, got one of class {kind}:"
        f" {reason}."
        f"\nSelect the {kind} as a whole, and return a new one; or use line.forward of hl.attach."
    ) from error


_PLAIN = (tuple, list, dict)


def _has_same_parts(container: Any, value: Any, parts: list[Any]) -> bool:
    """Tell whether a container is of the same class as another, with these parts."""
    if type(container) is not type(value):
        return False
    if isinstance(container, MappingView):  # its parts may be made at each look
        return True
    elements = [part for _, part in items(container) or ()]
    return (
        len(elements) == len(parts)
        and all(map(is_, elements, parts))
        and getattr(container, "__dict__", {}).keys() == getattr(value, "__dict__", {}).keys()
    )


def _index_of_key(parts: list[tuple[Key, Any]], key: Key) -> int | None:
    """Return the index of a key: by itself, or a number by order (as `ModelOutput` allows)."""
    for position, (name, _) in enumerate(parts):
        if name == key and type(name) is type(key):
            return position
    if isinstance(key, int) and -len(parts) <= key < len(parts):
        return key % len(parts)
    return None
