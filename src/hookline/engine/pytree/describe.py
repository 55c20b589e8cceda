"""Describe a value in words: its shape, its structure, its difference from another value."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.display.text import plural
from hookline.engine.pytree.tree import _SETS, Key, Leaf, items, parts_of_wrapper, tensors
from hookline.engine.torch_private.modules import parts_of_sparse


def leaf_text(leaf: Leaf) -> str:
    """Write a leaf as it follows a site: `[0].last_hidden_state`."""
    return "".join(f"[{key}]" if isinstance(key, int) else _key_text(key) for key in leaf)


def _key_text(key: str) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def difference(old: Any, new: Any, leaf: Leaf = ()) -> str | None:
    """Describe how `new` differs from `old` in structure, shape, dtype, device or layout.

    Returns:
        The description; None if they do not differ.
    """
    at = f" at {leaf_text(leaf)}" if leaf else ""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return _tensor_difference(old, new, at)
    parts = None if isinstance(old, Tensor) else items(old)
    if parts is None:
        if isinstance(old, Tensor) or isinstance(new, Tensor) or (old is None) != (new is None):
            return f"expected {in_words(old)}{at}, got {in_words(new)}"
        return None
    if not is_dynamo_compiling() and old is new:  # dynamo knows no identity of containers
        return None
    parts_new = items(new)
    if type(old) is not type(new) or parts_new is None or len(parts_new) != len(parts):
        return _container_difference(old, new, at)
    if isinstance(old, deque) and old.maxlen != new.maxlen:
        return f"expected deque(maxlen={old.maxlen}){at}, got deque(maxlen={new.maxlen})"
    if isinstance(old, _SETS):  # sets have no order, so sorted parts are compared
        parts, parts_new = _sorted_parts(parts), _sorted_parts(parts_new)
    return _difference_of_parts(parts, parts_new, leaf, at)


def _difference_of_parts(parts: Any, parts_new: Any, leaf: Leaf, at: str) -> str | None:
    """Describe the first difference between parts."""
    for (key, part), (key_new, part_new) in zip(parts, parts_new, strict=True):
        if key != key_new:
            return f"expected the key {key!r}{at}, got {key_new!r}"
        text = difference(part, part_new, (*leaf, key))
        if text:
            return text
    return None


def _container_difference(old: Any, new: Any, at: str) -> str:
    """Describe how two containers of different types or numbers of parts differ."""
    texts = in_words(old), in_words(new)
    if texts[0] != texts[1]:
        return f"expected {texts[0]}{at}, got {texts[1]}"
    name = type(old).__name__
    if type(old) is not type(new):
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in (type(old), type(new))]
        return f"expected an object of {kinds[0]}{at}, got one of {kinds[1]}"
    keys, keys_new = ([key for key, _ in items(value) or ()] for value in (old, new))
    lost, added = ([k for k in a if k not in b] for a, b in ((keys, keys_new), (keys_new, keys)))
    if all(isinstance(key, int) for key in (*lost, *added)):
        return f"expected {plural(len(keys), 'part')} in the {name}{at}, got {len(keys_new)}"
    changes = [f"without {key!r}" for key in lost] + [f"with {key!r}" for key in added]
    return f"expected the same keys in the {name}{at}, got them {' and '.join(changes[:4])}"


def _tensor_difference(old: Tensor, new: Tensor, at: str) -> str | None:
    if (_shape_to_compare(old), old.dtype, old.device) != (
        _shape_to_compare(new),
        new.dtype,
        new.device,
    ):
        return f"expected {in_full(old)}{at}, got {in_full(new)}"
    if old.layout is not new.layout:
        return f"expected the layout {old.layout}{at}, got {new.layout}"
    return None


def _shape_to_compare(tensor: Tensor) -> Any:
    is_strided = tensor.is_nested and tensor.layout is torch.strided
    return shape(tensor) if is_strided else tensor.shape


def _sorted_parts(parts: list[tuple[Key, Any]]) -> list[tuple[Key, Any]]:
    texts = [in_full(part) if isinstance(part, Tensor) else in_words(part) for _, part in parts]
    order = sorted(range(len(parts)), key=texts.__getitem__)
    return [(place, parts[index][1]) for place, index in enumerate(order)]


def shape_or_structure(value: Any) -> str:
    """Write a value's structure for a table; a lone tensor's structure is its shape: `[2, 3]`."""
    return shape(value) if isinstance(value, Tensor) else in_words(value)


def shape(tensor: Any) -> str:
    """Write a tensor's shape: `[2, 3]`; a strided nested tensor has no shape."""
    try:  # an f-string, because dynamo cannot call `str` on a dynamic size
        return f"[{', '.join([f'{size}' for size in tensor.shape])}]"
    except RuntimeError:
        return "[nested]"


def n_bytes(value: Any) -> int:
    """Sum the bytes of a value's tensors; nested tensors count as 0."""
    return sum(_n_bytes(tensor) for _, tensor in tensors(value))


def _n_bytes(tensor: Any) -> int:
    if parts := parts_of_wrapper(tensor):
        return sum(map(_n_bytes, parts))
    if tensor.layout is not torch.strided and (parts := parts_of_sparse(tensor)):
        return sum(part.nbytes for part in parts)
    try:
        return int(tensor.nbytes)
    except (RuntimeError, AttributeError):
        return 0


def in_full(tensor: Tensor) -> str:
    """Write a tensor's shape, dtype and device: `Tensor[2, 3] float32 on cpu`."""
    return f"{in_words(tensor)} {dtype_and_device(tensor)}"


def dtype_and_device(tensor: Tensor) -> str:
    """Write a tensor's dtype and device: `float32 on cpu`."""
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}"


def in_words(value: Any, limit: int = 6, depth: int = 4) -> str:
    """Write a value's structure on one line: `tuple(Tensor[1, 4, 8], None)`."""
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
    texts = [(key, in_words(part, 3, depth - 1)) for key, part in parts[:limit]]
    entries = [f"{key}={text}" if named else text for key, text in texts]
    if len(parts) > limit:
        entries.append("…")
    return f"{type(value).__name__}({', '.join(entries)})"
