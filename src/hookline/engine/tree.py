"""Tensors inside nested values. Imports errors, compile_internals, identity.

A value is a tensor, or a tuple, list, dict, set, named tuple, dataclass, `ModelOutput` or other
object that holds values, to any depth. A leaf is addressed by the keys that lead to it:
`(0, "keys")` for `value[0].keys`. torch's own pytrees are not used, because they take caches and
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

from hookline.engine.compile_internals import OLD_DYNAMO
from hookline.engine.identity import ByIdentity
from hookline.errors import SiteError, warn

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
    """Whether objects of a class are merely their attributes, and may be walked and copied.

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
    return _map(change, value, ByIdentity(), 0)


def _map(change: Callable[[Tensor], Any], value: Any, seen: ByIdentity[Any], depth: int) -> Any:
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


def walk(value: Any) -> Iterator[tuple[Leaf, Any]]:
    """Every tensor in a value, every object without parts, and mappings of which a key may hold
    tensors: with the keys that lead there."""
    stack: list[tuple[Leaf, Any]] = [((), value)]
    seen: ByIdentity[None] = ByIdentity()
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


def swap(value: Any, new: ByIdentity[Tensor], *, fixed_only: bool) -> Any:
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
    changed = [swap(part, new, fixed_only=fixed_only) for _, part in parts]
    if all(one is part for one, (_, part) in zip(changed, parts, strict=True)):
        return value
    return rebuild(value, changed)


def is_container(value: Any) -> bool:
    """Whether a value is known to merely hold its parts: not a cache, nor any other object."""
    if type(value) in PLAIN_ATOMS:
        return False
    known = (tuple, list, Mapping, *_SETS, UserList)
    return isinstance(value, known) or dataclasses.is_dataclass(value)


def get(value: Any, leaf: Leaf, where: str) -> Any:
    """The part of a value at a leaf; `where` names the site in the error.

    Raises:
        SiteError: there is no such part; the message shows what there is.
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
                f" {describe(part)}, {there}.\n{remedy}"
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
    """How `new` differs from `old` in structure, shape, dtype, device, layout; None if not."""
    at = f" at {leaf_text(leaf)}" if leaf else ""
    if isinstance(old, Tensor):
        if not isinstance(new, Tensor):
            return f"expected {describe(old)}{at}, got {describe(new)}"
        if (_size(old), old.dtype, old.device) != (_size(new), new.dtype, new.device):
            return f"expected {full(old)}{at}, got {full(new)}"
        if old.layout is not new.layout:
            return f"expected the layout {old.layout}{at}, got {new.layout}"
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
    if isinstance(old, _SETS):  # without an order: those that are alike are compared
        parts, parts_new = _sorted(parts), _sorted(parts_new)
    for (key, part), (key_new, part_new) in zip(parts, parts_new, strict=True):
        if key != key_new:
            return f"expected the key {key!r}{at}, got {key_new!r}"
        found = difference(part, part_new, (*leaf, key))
        if found:
            return found
    return None


def _size(tensor: Tensor) -> Any:
    return shape(tensor) if tensor.is_nested else tensor.shape


def _sorted(parts: list[tuple[Key, Any]]) -> list[tuple[Key, Any]]:
    texts = [full(part) if isinstance(part, Tensor) else describe(part) for _, part in parts]
    order = sorted(range(len(parts)), key=texts.__getitem__)
    return [(place, parts[index][1]) for place, index in enumerate(order)]


def form(value: Any) -> str:
    """A value's structure for a table, where a lone tensor is its shape: `[2, 3]`."""
    return shape(value) if isinstance(value, Tensor) else describe(value)


def shape(tensor: Tensor) -> str:
    """A tensor's shape as text: `[2, 3]`; a nested tensor of torch's older kind has none."""
    try:  # of sizes that vary, dynamo makes no `str`
        return f"[{', '.join([f'{size}' for size in tensor.shape])}]"
    except RuntimeError:
        return "[nested]"


def n_bytes(value: Any) -> int:
    """The memory of a value's tensors; 0 for those that do not tell (sparse, nested)."""
    return sum(_n_bytes(tensor) for _, tensor in tensors(value))


def _n_bytes(tensor: Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that stands for others, as in torchao
        names, _ = tensor.__tensor_flatten__()
        return sum(_n_bytes(getattr(tensor, name)) for name in names)
    try:
        return tensor.nbytes
    except (RuntimeError, AttributeError):
        return 0


def full(tensor: Tensor) -> str:
    """A tensor's shape, dtype and device: `Tensor[2, 3] float32 on cpu`."""
    return f"{describe(tensor)} {str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def describe(value: Any, limit: int = 6, depth: int = 4) -> str:
    """A value's structure on one line: `tuple(Tensor[1, 4, 8], None)`."""
    if isinstance(value, Tensor):
        return f"Tensor{shape(value)}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    parts = items(value)
    if parts is None or not isinstance(value, (tuple, list, Mapping, *_SETS, UserList)):
        return type(value).__name__
    if not depth:
        return f"{type(value).__name__}(…)"
    named = isinstance(value, Mapping) or hasattr(value, "_fields")
    texts = [(key, describe(part, 3, depth - 1)) for key, part in parts[:limit]]
    shown = [f"{key}={text}" if named else text for key, text in texts]
    if len(parts) > limit:
        shown.append("…")
    return f"{type(value).__name__}({', '.join(shown)})"
