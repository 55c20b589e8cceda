"""Tensors inside nested values. Imports only torch and errors.

A value is a tensor, or a tuple, list, dict, named tuple, dataclass, `ModelOutput` or other object
that holds values, to any depth. A leaf is addressed by the keys that lead to it: `(0, "keys")` for
`value[0].keys`. torch's own pytrees are not used, because they take caches and unregistered
dataclasses for leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from hookline.engine.errors import SiteError

Key = str | int
Leaf = tuple[Key, ...]

_ATOMS = (
    str, bytes, int, float, complex, bool, type(None), type, types.FunctionType, types.MethodType,
    types.ModuleType, types.BuiltinFunctionType, torch.Size, torch.dtype, torch.device,
    torch.Generator, nn.Module, slice, range,
)  # fmt: skip


def items(value: Any) -> list[tuple[Key, Any]] | None:
    """The parts of a value, as (key, part) in order; None if it has none (a tensor, a number)."""
    if isinstance(value, (Tensor, *_ATOMS)):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    attributes = getattr(value, "__dict__", None)
    return list(attributes.items()) if attributes else None


def rebuild(value: Any, parts: list[Any]) -> Any:
    """A new value of the same type whose parts, in the order of `items`, are these."""
    if isinstance(value, tuple):
        if type(value) is tuple:
            return tuple(parts)
        # Named tuples take their fields one by one; torch's own (`torch.max`) take one sequence.
        return type(value)(*parts) if hasattr(value, "_make") else type(value)(parts)
    if type(value) is list:
        return list(parts)
    new = copy.copy(value)
    if new is value:
        raise TypeError(f"{type(value).__name__} does not let itself be copied")
    if isinstance(value, list):
        new[:] = parts
        return new
    keys = [key for key, _ in items(value) or ()]
    if isinstance(value, MutableMapping):
        for key, part in zip(keys, parts, strict=True):
            new[key] = part
    else:
        # Not setattr: a frozen dataclass would refuse, and a property could run code.
        for key, part in zip(keys, parts, strict=True):
            object.__setattr__(new, str(key), part)
    return new


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with every tensor changed; containers are copied, so that it no longer grows.

    A cache that keeps growing after it was recorded is the reason for the copy.
    """
    return _map(change, value, {})


def _map(change: Callable[[Tensor], Any], value: Any, seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    parts = items(value)
    if parts is None:
        return value
    if id(value) in seen:  # an object that holds itself
        return seen[id(value)]
    seen[id(value)] = value
    # An object that holds but numbers and names is kept as it is; one that holds tensors or
    # containers may have them replaced later, as a cache's layers do, and is copied.
    is_container = isinstance(value, tuple | list | Mapping)
    if not is_container and not any(_holds(part) for _, part in parts):
        return value
    new = [_map(change, part, seen) for _, part in parts]
    try:
        seen[id(value)] = rebuilt = rebuild(value, new)
    except Exception:
        # An object that refuses to be copied is kept as it is: better than no record at all.
        return value
    return rebuilt


def _holds(value: Any) -> bool:
    return isinstance(value, Tensor) or items(value) is not None


def tensors(value: Any) -> Iterator[tuple[Leaf, Tensor]]:
    """Every tensor in a value, with the keys that lead to it."""
    yield from _tensors(value, (), set())


def _tensors(value: Any, leaf: Leaf, seen: set[int]) -> Iterator[tuple[Leaf, Tensor]]:
    if isinstance(value, Tensor):
        yield leaf, value
        return
    parts = items(value)
    if parts is None or id(value) in seen:
        return
    seen.add(id(value))
    for key, part in parts:
        yield from _tensors(part, (*leaf, key), seen)
    seen.discard(id(value))


def get(value: Any, leaf: Leaf, where: str) -> Any:
    """The part of a value at a leaf; `where` names the site in the error.

    Raises:
        SiteError: there is no such part; the message shows what there is.
    """
    part = value
    for depth, key in enumerate(leaf):
        parts = items(part)
        found = _find(parts, key) if parts is not None else None
        if parts is None or found is None:
            there = f"[{', '.join(repr(k) for k, _ in parts)}]" if parts else "no parts"
            asked = leaf_text(leaf[: depth + 1])
            raise SiteError(
                f"{where} has no leaf {asked}: {leaf_text(leaf[:depth]) or 'the value'} is"
                f" {describe(part)}, with {there}.\nSelect one of these, or the whole value."
            )
        part = parts[found][1]
    return part


def put(value: Any, leaf: Leaf, new: Any) -> Any:
    """A copy of the value in which the part at this (existing) leaf is `new`."""
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
    """The position of a key: by itself, or, for a number, by order (as `ModelOutput` allows)."""
    for position, (name, _) in enumerate(parts):
        if name == key and type(name) is type(key):
            return position
    if isinstance(key, int) and -len(parts) <= key < len(parts):
        return key % len(parts)
    return None


def leaf_text(leaf: Leaf) -> str:
    """A leaf as it is written behind a site: `[0].last_hidden_state`."""
    return "".join(f"[{key}]" if isinstance(key, int) else _name_text(key) for key in leaf)


def _name_text(key: str) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def difference(old: Any, new: Any, leaf: Leaf = ()) -> str | None:
    """How `new` differs from `old` in structure, shape, dtype or device; None if it does not."""
    at = f" at {leaf_text(leaf)}" if leaf else ""
    if isinstance(old, Tensor):
        if not isinstance(new, Tensor):
            return f"expected {describe(old)}{at}, got {describe(new)}"
        if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
            return f"expected {full(old)}{at}, got {full(new)}"
        return None
    parts = items(old)
    if parts is None:
        if isinstance(new, Tensor) or (old is None) != (new is None):
            return f"expected {describe(old)}{at}, got {describe(new)}"
        return None
    if old is new:
        return None
    parts_new = items(new)
    if type(old) is not type(new) or parts_new is None or len(parts_new) != len(parts):
        return f"expected {describe(old)}{at}, got {describe(new)}"
    for (key, part), (key_new, part_new) in zip(parts, parts_new, strict=True):
        if key != key_new:
            return f"expected the key {key!r}{at}, got {key_new!r}"
        found = difference(part, part_new, (*leaf, key))
        if found:
            return found
    return None


def form(value: Any) -> str:
    """A value's structure for a table, where a lone tensor is its shape: `[2, 3]`."""
    return str(list(value.shape)) if isinstance(value, Tensor) else describe(value)


def full(tensor: Tensor) -> str:
    """A tensor's shape, dtype and device: `Tensor[2, 3] float32 on cpu`."""
    return f"{describe(tensor)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def describe(value: Any, limit: int = 6) -> str:
    """A value's structure on one line: `tuple(Tensor[1, 4, 8], None)`."""
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    parts = items(value)
    if parts is None or not isinstance(value, tuple | list | Mapping):
        return type(value).__name__
    named = isinstance(value, Mapping) or hasattr(value, "_fields")
    shown = [
        f"{key}={describe(part, 3)}" if named else describe(part, 3) for key, part in parts[:limit]
    ]
    if len(parts) > limit:
        shown.append("…")
    return f"{type(value).__name__}({', '.join(shown)})"
