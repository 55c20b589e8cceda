"""Encode nested values as JSON with tensors by name, and decode them.

Decoding executes nothing and imports no class that a file names. Named tuples come back as named
tuples of the same name and fields, dataclasses and `ModelOutput` as `Fields`.
"""

from __future__ import annotations

import functools
import keyword
from collections import OrderedDict, UserList, namedtuple
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import name_without_torch
from hookline.engine import is_dtensor, layout_json, local_part
from hookline.engine.pytree import describe, tree
from hookline.files.safetensors_file import DTYPE_NAMES
from hookline.recordings.join_dtensor_parts import DTensorLayout, Part

# The dtypes of the safetensors format; complex128 is stored as pairs of float64.
_STORABLE = frozenset({*DTYPE_NAMES, torch.complex128})

StoreTensor = Callable[[Tensor], str]
Lost = Callable[[str], None]

# The key of the layout of a tensor that was one rank's part of a DTensor.
SHARD = "shard"

# The most fields of a named tuple: Python takes minutes to create a class with very many.
MOST_FIELDS = 1000


@final
class Fields(dict[str, Any]):
    """The fields of a saved dataclass or `ModelOutput`, readable by attribute or by key."""

    type_name: str = ""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"{self.type_name or 'Fields'} has no field {name!r}; it has {', '.join(self)}."
            ) from None


@final
class NotSaved:
    """A placeholder for a part of a value that could not be saved; its repr describes the part."""

    def __init__(self, description: str, *, is_tensor: bool = False) -> None:
        self.what = description
        self.is_tensor = is_tensor

    def __repr__(self) -> str:
        return f"<not saved: {self.what}>"


def encode(value: Any, store_tensor: StoreTensor, lost: Lost) -> Any:
    """Encode a value as JSON.

    `store_tensor` stores a tensor and returns its name. `lost` is called with a description of each
    part that cannot be saved as it is.
    """
    if isinstance(value, Tensor):
        return _encode_tensor(value, store_tensor, lost)
    if value is None or isinstance(value, bool | int | str | float):
        return _encode_scalar_or_text(value, lost)
    if isinstance(value, NotSaved):
        return _encode_as_lost(value.what, lost, is_tensor=value.is_tensor)
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: name_without_torch(value)}
    return _encode_container(value, store_tensor, lost)


def _encode_scalar_or_text(value: bool | int | str | float | None, lost: Lost) -> Any:
    plain = value
    if isinstance(value, str):
        plain = str.__str__(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        plain = int(value) if isinstance(value, int) else float(value)
    if type(value) is not type(plain):  # such as an enum, or a number of NumPy
        lost(f"the class {_type_name(value)}, which became {type(plain).__name__}")
    # Exact, and JSON has no nan or inf.
    return {"float": plain.hex()} if isinstance(plain, float) else plain


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _encode_as_lost(description: str, lost: Lost, *, is_tensor: bool = False) -> dict[str, Any]:
    lost(description)
    return {"lost": description, **({"is_tensor": True} if is_tensor else {})}


def _encode_container(value: Any, store_tensor: StoreTensor, lost: Lost) -> Any:
    kind = _container_kind(value)
    type_name = value.type_name if isinstance(value, Fields) else _type_name(value)
    if kind is None:
        return _encode_as_lost(type_name, lost)
    if kind in ("set", "frozenset") and not all(map(_decodes_to_hashable, value)):
        why = "a member would come back as what a set cannot hold: use a tuple"
        return _encode_as_lost(f"{type_name} ({why})", lost)
    # Types that come back unchanged, or with another class of the same structure.
    usual = (dict, OrderedDict) if kind == "dict" else (_BASES.get(kind, type(value)),)
    if type(value) not in usual:
        lost(f"the class {type_name}, which became a {kind}")
    parts = tree.items(value) or []
    if kind == "namedtuple" and len(parts) > MOST_FIELDS:
        kind = "fields"
        lost(f"the named tuple {type_name} of {len(parts)} fields, which became Fields")
    keys = _encode_keys([key for key, _ in parts], lost)
    encoded = [
        [key, encode(part, store_tensor, lost)] for key, (_, part) in zip(keys, parts, strict=True)
    ]
    return {kind: encoded, "type": type_name}


def _container_kind(value: Any) -> str | None:
    """Return the kind of container that a value decodes to; None if it cannot be encoded."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple"
    for kind, base in _BASES.items():
        if isinstance(value, base):
            return kind
    if isinstance(value, Fields) or hasattr(type(value), "__dataclass_fields__"):
        return "fields"
    return "dict" if isinstance(value, Mapping) else None


_BASES: dict[str, type] = {
    "tuple": tuple, "list": list, "userlist": UserList, "set": set, "frozenset": frozenset,
}  # fmt: skip


def _encode_keys(keys: list[Any], lost: Lost) -> list[Any]:
    """Encode the keys of a value as distinct JSON keys; report keys that became text to `lost`."""
    encoded = []
    texts = {key for key in keys if isinstance(key, str)}
    for key in keys:
        if _decodes_to_equal(key):
            encoded.append(key if isinstance(key, str | int) else encode(key, _refuse_tensor, lost))
            continue
        text = repr(key)
        while text in texts:  # another key has the same text
            text += "'"
        texts.add(text)
        lost(f"the key {key!r}, which became the text {text!r}")
        encoded.append(text)
    return encoded


def _decodes_to_hashable(part: Any) -> bool:
    """Return whether a member of a set decodes to a hashable value; Fields and lists do not."""
    if isinstance(part, tuple | frozenset) and not hasattr(part, "_fields"):
        return all(map(_decodes_to_hashable, part))
    return isinstance(part, Tensor) or _decodes_to_equal(part)


def _decodes_to_equal(key: Any) -> bool:
    """Return whether a key of a dict decodes to an equal key."""
    if type(key) is tuple:
        return all(map(_decodes_to_equal, key))
    return key is None or isinstance(
        key, str | int | float | torch.dtype | torch.device | torch.Size
    )


def _refuse_tensor(tensor: Any) -> Any:
    raise TypeError("a tensor cannot be part of a key")


def _encode_tensor(value: Tensor, store_tensor: StoreTensor, lost: Lost) -> Any:
    # Decoded, a part is a plain tensor; only the layout says where it lies in the whole.
    of_shard = {SHARD: layout_json(value)} if is_dtensor(value) else {}
    value = local_part(value)
    if not _is_storable(value):
        text = f"{describe.in_full(value)}, {value.layout}"
        return _encode_as_lost(text, lost, is_tensor=True)
    tensor = value.detach()
    if tensor.is_conj() or tensor.is_neg():  # lazy views: their memory holds other numbers
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex128:
        return {"complex": store_tensor(torch.view_as_real(tensor)), **of_shard}
    return {"tensor": store_tensor(tensor), **of_shard}


def _is_storable(tensor: Tensor) -> bool:
    if tensor.dtype not in _STORABLE or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    if tensor.is_nested or tensor.is_quantized:
        return False
    if type(tensor) is not Tensor and any(
        kind.__name__ == "FakeTensor" for kind in type(tensor).__mro__
    ):
        return False  # a fake tensor has a shape but no data
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper around other tensors
        return False
    return True


def holds_shard(data: Any) -> bool:
    """Return whether an encoded value has a tensor that was one rank's part of a DTensor."""
    if isinstance(data, list):
        return any(map(holds_shard, data))
    return isinstance(data, dict) and (SHARD in data or any(map(holds_shard, data.values())))


def rename_tensors(data: Any, rename: Callable[[str], str]) -> Any:
    """Return an encoded value with other names of its tensors; layouts and types stay.

    Raises:
        ValueError: the data was not written by `encode`.
    """
    if not isinstance(data, dict) or not data:
        return data
    kind = next(iter(data))
    if kind in ("tensor", "complex"):
        return {**data, kind: rename(data[kind])}
    if kind in _OF_DATA or kind == "lost":
        return data
    return {**data, kind: [[key, rename_tensors(part, rename)] for key, part in data[kind]]}


def decode(
    data: Any, get_tensor: Callable[[str], Tensor], part_by_id: dict[int, Part] | None = None
) -> Any:
    """Decode a value.

    Args:
        data: the encoded value.
        get_tensor: returns a tensor by name.
        part_by_id: takes the tensors that were parts of DTensors, with their layouts, by `id()`.

    Raises:
        ValueError: the data was not written by `encode`.
    """
    if data is None or isinstance(data, bool | int | str):
        return data
    if not isinstance(data, dict) or not data:
        raise ValueError(f"not an encoded value: {data!r}")
    kind = next(iter(data))
    if kind in ("tensor", "complex"):
        tensor = get_tensor(data[kind])
        if kind == "complex":
            tensor = _view_as_complex(tensor)
        return _record_layout(tensor, data, part_by_id)
    if kind == "lost":
        return NotSaved(str(data[kind]), is_tensor=data.get("is_tensor") is True)
    if kind in _OF_DATA:
        return _OF_DATA[kind](data[kind])
    values = [decode(part, get_tensor, part_by_id) for _, part in data[kind]]
    if kind in _OF_PARTS:
        return _OF_PARTS[kind](values)
    keys = [decode(key, _refuse_tensor) for key, _ in data[kind]]
    name = str(data.get("type", "Fields")).rpartition(".")[2]
    if kind == "dict":
        return _refuse_repeated_keys(dict(zip(keys, values, strict=True)), keys)
    if kind == "namedtuple":
        return _make_named_tuple_class(name, tuple(map(str, keys)))(*values)
    if kind == "fields":
        fields = Fields(zip(map(str, keys), values, strict=True))
        fields.type_name = name
        return _refuse_repeated_keys(fields, keys)
    raise ValueError(f"not an encoded value: {kind!r}")


def _view_as_complex(pairs: Tensor) -> Tensor:
    """View pairs of numbers as complex ones.

    torch's functions of complex128 end the process where an address is no multiple of 16, as in a
    file, whose widest dtype otherwise has 8 bytes.
    """
    is_aligned = pairs.is_meta or pairs.data_ptr() % (2 * pairs.element_size()) == 0
    return torch.view_as_complex(pairs if is_aligned else pairs.clone())


def _record_layout(tensor: Tensor, data: Any, part_by_id: dict[int, Part] | None) -> Tensor:
    """Note the layout of a tensor, as a view of its own: two layouts may share a tensor."""
    layout = (
        None if part_by_id is None or SHARD not in data else DTensorLayout.from_json(data[SHARD])
    )
    if part_by_id is None or layout is None:
        return tensor
    view = tensor.view_as(tensor)
    part_by_id[id(view)] = layout, view
    return view


def _decode_dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"not a dtype: {name!r}")
    return dtype


# Kinds that hold no tensor.
_OF_DATA: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "size": torch.Size,
    "device": lambda name: torch.device(str(name)),
    "dtype": _decode_dtype,
}


def _decode_set(values: list[Any]) -> set[Any]:
    """Return the members as a set."""
    try:
        members: set[Any] = _refuse_repeated_keys(set(values), values)
    except TypeError as error:
        raise ValueError(f"not the members of a set: {error}") from None
    return members


# Containers without keys.
_OF_PARTS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "userlist": UserList,
    "set": _decode_set,
    "frozenset": lambda values: frozenset(_decode_set(values)),
}


def _refuse_repeated_keys(value: Any, keys: list[Any]) -> Any:
    if len(value) != len(keys):
        raise ValueError("a value must have each key once")
    return value


@functools.lru_cache(maxsize=256)
def _make_named_tuple_class(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    if len(fields) > MOST_FIELDS:
        raise ValueError(f"a named tuple must have at most {MOST_FIELDS} fields")
    legal = name.isidentifier() and not keyword.iskeyword(name)
    make: Any = namedtuple  # whose classes have no types that are known here
    made = make(name if legal else "Saved", fields, rename=True)

    def reduce(value: Any) -> tuple[Any, ...]:
        return _make_named_tuple, (name, fields, tuple(value))

    made.__reduce__ = reduce  # pickle finds no class by its name
    return made  # type: ignore[no-any-return]


def _make_named_tuple(name: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return _make_named_tuple_class(name, fields)(*values)
