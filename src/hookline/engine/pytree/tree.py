"""Tensors inside nested values.

A value is a tensor, or a tuple, list, dict, set, named tuple, dataclass, `ModelOutput` or other
object that holds values, to any depth. A leaf is addressed by the keys that lead to it: `(0,
"keys")` for `value[0].keys`. torch's own pytrees are not used, because they take caches and
unregistered dataclasses for leaves.

Some objects do not let their parts be replaced: iterators, partial functions, classes that say
themselves how they are copied. `opaque` finds the tensors in them.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MappingView, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.pytree.identity_map import IdentityMap
from hookline.engine.torch_private.dynamo import OLD_DYNAMO
from hookline.errors import warn

Key = str | int
Leaf = tuple[Key, ...]

# fmt: off
ATOMS = (
    str, bytes, int, float, complex, bool, type(None), type, types.FunctionType, types.MethodType,
    types.ModuleType, types.BuiltinFunctionType, torch.Size, torch.dtype, torch.device,
    torch.Generator, nn.Module, slice, range,
)
# fmt: on
_SETS = (set, frozenset)
_OTHERS: Any = (*_SETS, UserList, MappingView)  # a view of a dict shows it, and has no copy
PLAIN_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_COPYING = ("__reduce__", "__reduce_ex__")
_DEEPEST = 150  # levels of nesting; Python's own limit is near, and nobody means it


def items(value: Any) -> list[tuple[Key, Any]] | None:
    """The parts of a value, as (key, part) in order; None if it has none (a tensor, a number)."""
    if isinstance(value, (Tensor, *ATOMS)):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list | deque):
        return list(enumerate(value))
    if isinstance(value, _OTHERS):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return _attributes(value) if _is_plain(type(value)) else None


def _is_plain(kind: type) -> bool:
    """Tell whether objects of a class are no more than their attributes, to be walked and copied.

    Not those of the standard library (a logger would drag its whole tree along), nor those that
    say themselves how they are copied.
    """
    if kind is types.SimpleNamespace:
        return True
    return (
        str(kind.__module__).partition(".")[0] not in sys.stdlib_module_names
        and all(getattr(kind, name) is getattr(object, name) for name in _COPYING)
        and not hasattr(kind, "__copy__")
    )


def _attributes(value: Any) -> list[tuple[Key, Any]] | None:
    found = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return list(found.items()) if found else None


def rebuild(value: Any, parts: list[Any]) -> Any:
    """A new value of the same type whose parts, in the order of `items`, are these."""
    if isinstance(value, tuple):
        if not hasattr(value, "_make"):
            return tuple(parts) if type(value) is tuple else type(value)(parts)
        if OLD_DYNAMO and is_dynamo_compiling():
            return type(value)(*parts)
        return tuple.__new__(type(value), parts)  # not by its own, which may want anything
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return dict(zip((key for key, _ in items(value) or ()), parts, strict=True))
    if isinstance(value, frozenset):
        return type(value)(parts)
    new = _shell(value)
    _fill(new, [key for key, _ in items(value) or ()], parts)
    return new


def _shell(value: Any) -> Any:
    """A shallow copy, to be filled.

    Raises:
        TypeError: the copy is the value itself; to fill it would change what was seen.
    """
    if type(value) is list or isinstance(value, MappingView):
        return [part for _, part in items(value) or ()]
    if type(value) is dict:
        return {**value}
    if is_dynamo_compiling() and dataclasses.is_dataclass(value):
        return object.__new__(type(value))  # no graph can hold copy.copy; all fields are filled
    new = copy.copy(value)
    if new is value:
        raise TypeError(f"{type(value).__name__} does not let itself be copied")
    return new


def _fill(new: Any, keys: list[Key], parts: list[Any]) -> None:
    if isinstance(new, list):
        new[:] = parts
    elif isinstance(new, deque):
        new.clear()
        new.extend(parts)
    elif isinstance(new, set):
        new.clear()
        new.update(parts)
    elif isinstance(new, UserList):
        new.data = [*parts]  # a copy made by a class of its own may share the list
    elif isinstance(new, MutableMapping):
        for key, part in zip(keys, parts, strict=True):
            new[key] = part
    else:
        # Not setattr: a frozen dataclass would refuse, and a property could run code.
        for key, part in zip(keys, parts, strict=True):
            object.__setattr__(new, str(key), part)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """The value with every tensor changed; containers and plain objects are copied.

    Copied, because a cache goes on growing after it was recorded, even one that was still empty.
    """
    return _map(change, value, IdentityMap(), 0)


def _map(change: Callable[[Tensor], Any], value: Any, seen: IdentityMap[Any], depth: int) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in PLAIN_ATOMS:
        return value
    parts = items(value)
    if parts is None:
        return value.copy() if isinstance(value, (np.ndarray, bytearray)) else value
    if value in seen:  # shared, or an object that holds itself
        return seen.get(value)
    if depth > _DEEPEST:
        warn(f"a value is nested deeper than {_DEEPEST} levels; what is below is kept as it is.")
        return value
    if isinstance(value, (tuple, frozenset)):
        mapped = [_map(change, part, seen, depth + 1) for _, part in parts]
        new = seen[value] = rebuild(value, mapped)
        return new
    if is_dynamo_compiling() and isinstance(value, dict) and dataclasses.is_dataclass(value):
        # transformers' ModelOutput: no graph can hold one that is made and then filled.
        fields = {str(key): _map(change, part, seen, depth + 1) for key, part in parts}
        new = seen[value] = type(value)(**fields)
        return new
    return _map_filled(change, value, parts, seen, depth)


def _map_filled(
    change: Callable[[Tensor], Any], value: Any, parts: Any, seen: IdentityMap[Any], depth: int
) -> Any:
    """Map a value whose copy is made first and filled then."""
    try:
        is_fixed = isinstance(value, Mapping) and not isinstance(value, MutableMapping)
        shell = dict(parts) if is_fixed else _shell(value)
        # The copy is known before its parts are, so that a value that holds itself comes out so.
        seen[value] = shell
        _fill(
            shell,
            [key for key, _ in parts],
            [_map(change, part, seen, depth + 1) for _, part in parts],
        )
    except Exception as error:
        seen[value] = value
        if any(isinstance(part, Tensor) for _, part in parts):
            warn(
                f"a {type(value).__name__} cannot be copied ({error}): it is recorded as it is, and"
                " what changes it later changes the record."
            )
        return value
    return shell


def tensors(value: Any) -> Iterator[tuple[Leaf, Tensor]]:
    """Every tensor in a value, with the keys that lead to it; what is shared is walked once.

    Those in objects that do not show their parts are left out.
    """
    for leaf, part in walk(value):
        if isinstance(part, Tensor):
            yield leaf, part


def distinct(value: Any) -> list[Tensor]:
    """List the tensors in a value, each once. Not for code that is being compiled."""
    return list({id(tensor): tensor for _, tensor in tensors(value)}.values())


def walk(value: Any) -> Iterator[tuple[Leaf, Any]]:
    """Every tensor in a value, every object without parts, and mappings of which a key may hold
    tensors: with the keys that lead there."""
    stack: list[tuple[Leaf, Any]] = [((), value)]
    seen: IdentityMap[None] = IdentityMap()
    while stack:
        leaf, part = stack.pop()
        if isinstance(part, Tensor):
            yield leaf, part
            continue
        if type(part) in PLAIN_ATOMS or part in seen:
            continue
        parts = items(part)
        if parts is not None:
            seen[part] = None
            stack += [((*leaf, key), inner) for key, inner in reversed(parts)]
        if parts is None or (isinstance(part, Mapping) and not _is_plainly_keyed(part)):
            yield leaf, part


def _is_plainly_keyed(mapping: Mapping[Any, Any]) -> bool:
    return all(type(key) in PLAIN_ATOMS for key in mapping)


def replace_tensors(value: Any, new: IdentityMap[Tensor], *, fixed_only: bool) -> Any:
    """The value with these tensors replaced; what holds none of them is left alone.

    With `fixed_only`, only tuples are looked into: a list, a dict or an object may be written to
    later by whoever else holds it, so a copy could not take its place.
    """
    if isinstance(value, Tensor):
        found = new.get(value)
        return value if found is None else found
    is_open = isinstance(value, tuple) or not (fixed_only or isinstance(value, nn.Module))
    parts = items(value) if is_open and is_container(value) else None
    if parts is None:
        return value
    changed = [replace_tensors(part, new, fixed_only=fixed_only) for _, part in parts]
    if all(one is part for one, (_, part) in zip(changed, parts, strict=True)):
        return value
    return rebuild(value, changed)


def is_container(value: Any) -> bool:
    """Tell whether a value is a plain container: not a cache, nor any other object."""
    if type(value) in PLAIN_ATOMS:
        return False
    known = (tuple, list, Mapping, *_SETS, UserList)
    return isinstance(value, known) or dataclasses.is_dataclass(value)
