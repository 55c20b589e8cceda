"""Fingerprints of values, arrays and files: equal content has an equal fingerprint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_128

from hookline.files.safetensors_file import to_byte_array

# Up to here all bytes are read. A larger array or file is sampled.
WHOLE_BYTES = 64 * 1024**2
N_SAMPLES = 1024
_BLOCK_BYTES = WHOLE_BYTES // N_SAMPLES


def fingerprint(value: Any) -> str:
    """Return a fingerprint of a nested value: its structure, and the bytes of its tensors.

        >>> fingerprint((torch.ones(2), {"mask": None})) == fingerprint((torch.ones(2), {}))
        False

    Args:
        value: tensors, arrays, numbers, texts and None, in tuples, lists and mappings. Any other
            object counts by its type alone.
    """
    digest = xxh3_128()
    for part in _bytes_to_hash(value):
        # The length keeps two neighbours apart: ("ab", "c") is not ("a", "bc").
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _bytes_to_hash(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key, part in value.items():
            yield repr(key).encode()
            yield from _bytes_to_hash(part)
    elif isinstance(value, tuple | list):
        yield f"{'list' if isinstance(value, list) else 'tuple'} {len(value)}".encode()
        for part in value:
            yield from _bytes_to_hash(part)
    elif isinstance(value, Tensor) and value.is_nested:
        yield from _bytes_to_hash(("nested", *value.unbind()))
    elif isinstance(value, Tensor):
        value = value if value.layout is torch.strided else value.to_dense()
        yield f"tensor {value.dtype} {list(value.shape)}".encode()
        yield to_byte_array(value).data
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"array {value.dtype} {list(value.shape)}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield f"{type(value).__name__} {value!r}".encode("utf-8", "backslashreplace")
    else:
        yield f"object {type(value).__qualname__}".encode()


def spread_indices(length: int, most: int) -> list[int]:
    """Return at most so many indices below `length`, spread evenly, with the first and the last.

    >>> spread_indices(10, 4), spread_indices(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    if length <= most:
        return list(range(length))
    return [index * (length - 1) // (most - 1) for index in range(most)]


def content_fingerprint(paths: Sequence[Path]) -> str:
    """Return the fingerprint of files: of all bytes, or of 1,024 blocks of large ones."""
    sizes = [os.stat(path).st_size for path in paths]
    digest = xxh3_128(str(sizes).encode())
    is_whole = sum(sizes) <= WHOLE_BYTES
    for path, size in zip(paths, sizes, strict=True):
        n_blocks = -(-size // _BLOCK_BYTES)
        most = n_blocks if is_whole else max(N_SAMPLES // len(paths), 2)
        with path.open("rb") as file:
            for block in spread_indices(n_blocks, most):
                file.seek(block * _BLOCK_BYTES)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
