"""Walk, rebuild and copy nested values that contain tensors.

A value is a tensor, or a tuple, list, dict, set, named tuple, dataclass, `ModelOutput` or other
object that holds values, to any depth. A leaf is addressed by the keys that lead to it: `(0,
"keys")` for `value[0].keys`. torch's own pytrees are not used, because they treat caches and
unregistered dataclasses as leaves.

Some objects do not let their parts be replaced: iterators, partial functions, and classes with
their own copying protocol. `hidden_tensors` finds the tensors in them.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import types
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, MappingView, MutableMapping
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from hookline.engine.pytree.identity_map import IdentityMap
from hookline.engine.torch_private.distributed import local_part
from hookline.engine.torch_private.dynamo import OLD_DYNAMO, run_at_trace_time
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
_LISTS = (tuple, list)
_SETS = (set, frozenset)
_OTHERS: Any = (*_SETS, UserList, MappingView)  # a dict view shows its dict and cannot be copied
PLAIN_ATOMS = frozenset({str, bytes, int, float, complex, bool, type(None)})
_VALUES: type = type({}.values())
_ITEMS: type = type({}.items())
_UNSET: Any = object()  # the value of an attribute that is not set
_COPYING = ("__reduce__", "__reduce_ex__")
_DEEPEST = 150  # levels of nesting, near Python's own limit; deeper values are not intended


def items(value: Any) -> list[tuple[Key, Any]] | None:
    """Return the parts of a value as (key, part), in order; None for a tensor or a number."""
    if type(value) in _LISTS:
        # Not enumerate: dynamo traces each step of it.
        return list(zip(range(len(value)), value, strict=True))
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
    return attributes(value) if _consists_of_attributes(type(value)) else None


def _consists_of_attributes(kind: type) -> bool:
    """Tell whether objects of a class consist of their attributes, and so can be walked and copied.

    Classes of the standard library do not count (a logger would drag its whole tree along), nor do
    classes with their own copying protocol.
    """
    if kind is types.SimpleNamespace:
        return True
    return (
        str(kind.__module__).partition(".")[0] not in sys.stdlib_module_names
        and all(getattr(kind, name) is getattr(object, name) for name in _COPYING)
        and not hasattr(kind, "__copy__")
    )


def attributes(value: Any) -> list[tuple[Key, Any]] | None:
    """Return the attributes of an object, those in slots as well; None if it has none."""
    by_name = dict(getattr(value, "__dict__", ()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                by_name[name] = getattr(value, name)
    return list(by_name.items()) if by_name else None


def rebuild(value: Any, parts: list[Any], *, exact: bool = True) -> Any:
    """Make a value of the same type with these parts, in the order of `items`.

    Its attributes that are no parts are kept.

    Args:
        value: the value.
        parts: the new parts.
        exact: False makes a dict or a list of a mapping or view that cannot be made anew.

    Raises:
        TypeError: the value cannot be made anew with other parts.
    """
    if isinstance(value, tuple):
        return _with_attributes_of(value, _rebuild_tuple(value, parts))
    if isinstance(value, frozenset):
        return _with_attributes_of(value, type(value)(parts))
    if isinstance(value, MappingView) or _is_fixed_mapping(value):
        new = _rebuild_read_only(value, parts)
        if new is None and exact:
            raise TypeError("it is read-only")
        if new is None:
            keys = [key for key, _ in items(value) or ()]
            new = parts if isinstance(value, MappingView) else dict(zip(keys, parts, strict=True))
        return new
    new = _copy_to_fill(value)
    _fill_parts(new, [key for key, _ in items(value) or ()], parts)
    return new


def _rebuild_tuple(value: Any, parts: list[Any]) -> Any:
    if type(value) is tuple:
        return tuple(parts)
    if is_dynamo_compiling() and (OLD_DYNAMO or not hasattr(value, "_make")):
        return type(value)(*parts) if hasattr(value, "_make") else type(value)(parts)
    # torch's own named tuples, such as torch.return_types.topk, allow no other way.
    if hasattr(type(value), "n_sequence_fields"):
        return type(value)(parts)
    # Not by its own __new__, which may have any signature.
    return tuple.__new__(type(value), parts)


def _with_attributes_of(value: Any, new: Any) -> Any:
    """Give a new object the attributes of another that it lacks."""
    if OLD_DYNAMO and is_dynamo_compiling() and _holds_only_parts(type(value)):
        return new  # dynamo does not see the `__dict__` of what the graph makes
    attributes = getattr(value, "__dict__", None)
    if attributes and attributes.keys() != new.__dict__.keys():
        new.__dict__.update(attributes)
    return new


@run_at_trace_time
def _holds_only_parts(kind: Any) -> bool:
    """Tell whether all that a named tuple or dataclass holds are parts, which are filled in."""
    if not dataclasses.is_dataclass(kind):
        return issubclass(kind, tuple) and not kind.__dictoffset__
    made_by: Any = kind  # whose parameters typing does not know
    is_frozen = made_by.__dataclass_params__.frozen
    return not is_frozen and all(field.init for field in dataclasses.fields(made_by))


def _is_fixed_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) and not isinstance(value, MutableMapping)


def _rebuild_read_only(value: Any, parts: list[Any]) -> Any:
    """Make a read-only mapping or a view of a dict with other parts; None if that is impossible."""
    if isinstance(value, MappingView):
        if type(value) is _VALUES:
            view: Any = value
            return dict(zip(view.mapping, parts, strict=True)).values()
        if type(value) is _ITEMS:
            return dict(parts).items()
        return None
    keys = list(value)
    if type(value) is types.MappingProxyType:
        behind = {**value} if is_dynamo_compiling() else gc.get_referents(value)[0]
        return types.MappingProxyType(rebuild(behind, parts))
    new = copy.copy(value)
    behind = {
        name: content
        for name, content in getattr(value, "__dict__", {}).items()
        if isinstance(content, MutableMapping) and list(content) == keys
    }
    if new is value or len(behind) != 1:
        return None
    ((name, content),) = behind.items()
    new.__dict__[name] = rebuild(content, parts)
    is_same = list(new) == keys and all(map(is_, new.values(), parts))
    return new if is_same else None


def _copy_to_fill(value: Any) -> Any:
    """Make a shallow copy, to be filled.

    Raises:
        TypeError: the copy is the value itself, so filling it would change the recorded value.
    """
    if type(value) is list or isinstance(value, MappingView):
        return [part for _, part in items(value) or ()]
    if type(value) is dict:
        return {**value}
    if is_dynamo_compiling() and dataclasses.is_dataclass(value):
        # A graph cannot hold copy.copy; all fields are filled later.
        return _with_attributes_of(value, object.__new__(type(value)))
    new = _empty_model_output(value) if _is_model_output(value) else copy.copy(value)
    if new is value:
        raise TypeError(f"{type(value).__name__} does not let itself be copied")
    # The copy of a subclass of deque lacks its attributes.
    return _with_attributes_of(value, new) if isinstance(value, deque) else new


def _is_model_output(value: Any) -> bool:
    """Tell whether a value is a `ModelOutput` of transformers or a class like it."""
    return isinstance(value, OrderedDict) and dataclasses.is_dataclass(value)


def _empty_model_output(value: OrderedDict[Any, Any]) -> Any:
    """Return a `ModelOutput` with the attributes of another, without its slow checks."""
    new = OrderedDict.__new__(type(value))
    new.__dict__.update(value.__dict__)
    return new


def _fill_parts(new: Any, keys: list[Key], parts: list[Any]) -> None:
    if isinstance(new, list):
        new[:] = parts
    elif isinstance(new, deque):
        new.clear()
        new.extend(parts)
    elif isinstance(new, set):
        new.clear()
        new.update(parts)
    elif isinstance(new, UserList):
        new.data = [*parts]  # a class's own copy may share the list
    elif _is_model_output(new) and not is_dynamo_compiling():
        # Without its slow checks: each field is an item and an attribute.
        for key, part in zip(keys, parts, strict=True):
            OrderedDict.__setitem__(new, key, part)
            new.__dict__[str(key)] = part
    elif isinstance(new, MutableMapping):
        for key, part in zip(keys, parts, strict=True):
            if is_dynamo_compiling() or key not in new or new[key] is not part:
                new[key] = part
    else:
        # Not setattr: a frozen dataclass would refuse, and a property could run code.
        for key, part in zip(keys, parts, strict=True):
            # A part that is as it was may be the class's own, such as the default of a field.
            if is_dynamo_compiling() or getattr(new, str(key), _UNSET) is not part:
                object.__setattr__(new, str(key), part)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Return a value with every tensor changed; containers and plain objects are copied.

    They are copied because a cache goes on growing after it was recorded, even a cache that was
    empty.
    """
    return (
        change(value) if isinstance(value, Tensor) else _map_nested(change, value, IdentityMap(), 0)
    )


def _map_nested(
    change: Callable[[Tensor], Any], value: Any, seen: IdentityMap[Any], depth: int
) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in PLAIN_ATOMS:
        return value
    parts = items(value)
    if parts is None:
        return value.copy() if isinstance(value, (np.ndarray, bytearray)) else value
    if value in seen:  # shared, or an object that contains itself
        return seen.get(value)
    if depth > _DEEPEST:
        warn(f"a value is nested deeper than {_DEEPEST} levels; deeper parts are kept as they are.")
        return value
    if isinstance(value, (tuple, frozenset)):
        mapped = [_map_nested(change, part, seen, depth + 1) for _, part in parts]
        new = seen[value] = rebuild(value, mapped)
        return new
    if is_dynamo_compiling() and isinstance(value, dict) and dataclasses.is_dataclass(value):
        # transformers' ModelOutput: a graph cannot hold an instance that is made first and then
        # filled.
        fields = {str(key): _map_nested(change, part, seen, depth + 1) for key, part in parts}
        new = seen[value] = type(value)(**fields)
        return new
    return _map_filled(change, value, parts, seen, depth)


def _map_filled(
    change: Callable[[Tensor], Any], value: Any, parts: Any, seen: IdentityMap[Any], depth: int
) -> Any:
    """Map a value whose copy is made first and then filled."""
    try:
        shell = dict(parts) if _is_fixed_mapping(value) else _copy_to_fill(value)
    except Exception as error:
        return _keep_uncopied(value, parts, seen, error)
    # The copy exists before its parts, so that a value that contains itself is copied as such.
    seen[value] = shell
    mapped = [
        _map_nested(change, part, seen, depth + 1) for _, part in parts
    ]  # its errors are raised
    try:
        _fill_parts(shell, [key for key, _ in parts], mapped)
    except Exception as error:
        return _keep_uncopied(value, parts, seen, error)
    return shell


def _keep_uncopied(value: Any, parts: Any, seen: IdentityMap[Any], error: Exception) -> Any:
    """Return a value that cannot be copied itself, with a warning if it holds tensors."""
    seen[value] = value
    if any(isinstance(part, Tensor) for _, part in parts):
        warn(
            f"a {type(value).__name__} cannot be copied ({error}): it is recorded as it is, and"
            " later changes of it change the record."
        )
    return value


def tensors(value: Any) -> Iterator[tuple[Leaf, Tensor]]:
    """Yield every tensor in a value, with the keys that lead to it; shared parts are walked once.

    Tensors in objects that do not show their parts are left out.
    """
    if isinstance(value, Tensor):
        yield (), value
        return
    for leaf, part in tensors_and_opaque_parts(value):
        if isinstance(part, Tensor):
            yield leaf, part


def distinct_tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a value, each once. Not for code being compiled."""
    return list({id(tensor): tensor for _, tensor in tensors(value)}.values())


def tensors_and_opaque_parts(value: Any) -> Iterator[tuple[Leaf, Any]]:
    """Yield the tensors in a value and the objects in which further tensors may hide.

    The latter are objects without parts, and mappings whose keys may hold tensors. Each comes with
    the keys that lead to it.
    """
    if isinstance(value, Tensor):
        yield (), value
        return
    stack: list[tuple[Leaf, Any]] = [((), value)]
    visited: IdentityMap[None] = IdentityMap()
    while stack:
        leaf, part = stack.pop()
        if isinstance(part, Tensor):
            yield leaf, part
            continue
        if type(part) in PLAIN_ATOMS or part in visited:
            continue
        parts = items(part)
        if parts is not None:
            visited[part] = None
            stack += [((*leaf, key), inner) for key, inner in reversed(parts)]
        if parts is None or (isinstance(part, Mapping) and not _is_plainly_keyed(part)):
            yield leaf, part


def _is_plainly_keyed(mapping: Mapping[Any, Any]) -> bool:
    return all(type(key) in PLAIN_ATOMS for key in mapping)


def replace_tensors(value: Any, new: IdentityMap[Tensor], *, tuples_only: bool) -> Any:
    """Return the value with these tensors replaced; parts that hold none of them are kept.

    With `tuples_only`, only tuples are searched. Another holder may later write to a list, a dict
    or an object, so a copy could not take its place.
    """
    if isinstance(value, Tensor):
        tensor = new.get(value)
        return value if tensor is None else tensor
    is_open = isinstance(value, tuple) or not (tuples_only or isinstance(value, nn.Module))
    parts = items(value) if is_open and is_container(value) else None
    if parts is None:
        return value
    changed = [replace_tensors(part, new, tuples_only=tuples_only) for _, part in parts]
    if all(old is part for old, (_, part) in zip(changed, parts, strict=True)):
        return value
    return rebuild(value, changed)


def is_container(value: Any) -> bool:
    """Tell whether a value is a plain container: not a cache, nor any other object."""
    if type(value) in PLAIN_ATOMS:
        return False
    kinds = (tuple, list, Mapping, *_SETS, UserList)
    return isinstance(value, kinds) or dataclasses.is_dataclass(value)


def parts_of_wrapper(tensor: Tensor) -> list[Tensor]:
    """Return the tensors inside a wrapper, such as a weight of torchao; nothing for others."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return []
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor also lists its mesh


def local_shards(value: Any) -> Any:
    """Return a value with this rank's part in place of each DTensor.

    A value without DTensors is returned itself. Neither this function nor any computation on its
    result communicates with another rank.
    """
    if type(value) is Tensor or all(local_part(part) is part for _, part in tensors(value)):
        return value
    return map_tensors(local_part, value)
