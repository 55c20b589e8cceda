"""Write and read one safetensors file, with a checksum of each tensor.

    8 bytes             the header's length, little-endian
    header              JSON: name -> dtype, shape and byte offsets; padded with spaces
    bytes               the tensors, one after the other, the widest dtypes first

The safetensors library reads the same files. It is not used here because it costs four times as
much a tensor and does not expose the bytes for checksums.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from hookline.errors import OverwrittenError
from hookline.recordings.manifest import checksum
from hookline.util.open_regular import open_regular

# The names of dtypes in a file's header.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The dtypes that NumPy also has; the bytes of others are read through a uint8 view.
_IN_NUMPY = frozenset({
    torch.float64, torch.float32, torch.float16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
_BUFFER_BYTES = 1024**2


def write_tensors(path: Path, tensors: Sequence[Tensor]) -> list[str]:
    """Write tensors to a new file, named by their indices, and sync it to disk.

    Args:
        path: a new file.
        tensors: contiguous tensors on the CPU.

    Returns:
        The checksums of the header and of each tensor.
    """
    # The widest dtype first, so that every tensor is aligned to its element size.
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
    entries, end = [], 0
    for number in order:
        tensor, start = tensors[number], end
        end += tensor.nbytes
        entries.append(
            f'"{number}":{{"dtype":"{_NAMES[tensor.dtype]}","shape":{list(tensor.shape)},'
            f'"data_offsets":[{start},{end}]}}'
        )
    text = ("{" + ",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    sums = [checksum(head), *[""] * len(tensors)]
    with path.open("xb", buffering=_BUFFER_BYTES) as file:
        file.write(head)
        for number in order:
            data = _bytes_of(tensors[number])
            sums[1 + number] = checksum(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return sums


def flat_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes, in one dimension.

    >>> flat_bytes(torch.tensor([[1, 256]], dtype=torch.int16)).tolist()
    [1, 0, 0, 1]
    """
    # A dimension of one element may have any stride and counts as contiguous: `view` refuses it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.dtype not in _IN_NUMPY:
        tensor = flat_bytes(tensor)
    return tensor.numpy().data


@final
class TensorFile:
    """A memory-mapped file of tensors. The header is verified here, each tensor on first read.

    Args:
        path: the file.
        sums: the checksums that `write_tensors` returned.

    Raises:
        OSError: the file cannot be read. ValueError: the file is damaged.
    """

    __slots__ = (
        "_bytes",
        "_head",
        "_map",
        "_path",
        "_start",
        "_state",
        "_sums",
        "_tensors",
        "verified",
    )

    def __init__(self, path: Path, sums: Sequence[str]) -> None:
        handle = open_regular(path)
        try:
            self._state = _state(os.fstat(handle))
            # A private mapping: a write to a tensor does not reach the file.
            self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
        self._bytes = memoryview(self._map)
        self._path, self._sums = path, sums
        self._start = 8 + int.from_bytes(self._map[:8], "little")
        if self._start > len(self._map):
            raise ValueError(f"{path.name} must be as long as its header says")
        self._check(self._bytes[: self._start], sums[0])
        self._head: dict[str, Any] = json.loads(self._map[8 : self._start])
        self._tensors: dict[str, tuple[Tensor, int]] = {}
        self.verified: set[str] = set()

    @property
    def state(self) -> tuple[int, ...]:
        """The file's device, inode, size and modification time when it was opened."""
        return self._state

    def is_current(self) -> bool:
        """Return whether the file is unchanged since it was opened."""
        try:
            return _state(os.stat(self._path)) == self._state
        except OSError:  # moved or deleted: the mapping stays valid unless the file was truncated
            return self._map.size() == len(self._map)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, verified on first read; repeated calls return the same tensor.

        Raises:
            KeyError, ValueError: the tensor is missing or damaged.
            OverwrittenError: the tensor was changed in place after it was read.
        """
        kept = self._tensors.get(name)
        if kept is None:
            self.verify(name)
            tensor = self._read(*self._entry(name))
            # setdefault: if another thread has read it too, both get the same tensor.
            kept = self._tensors.setdefault(name, (tensor, tensor._version))
        tensor, version = kept
        if tensor._version != version:
            raise OverwrittenError(f"{name} was changed in place")
        return tensor

    def outline(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype in the header."""
        dtype, shape, _, _ = self._entry(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def verify(self, name: str) -> None:
        """Compare a tensor's bytes with their checksum, once per file.

        Raises:
            KeyError, ValueError: the tensor is missing or damaged.
        """
        if name not in self.verified:
            _, _, start, end = self._entry(name)
            self._check(self._bytes[start:end], self._sums[1 + int(name)])
            self.verified.add(name)

    def _check(self, data: Any, expected: str) -> None:
        found = checksum(data)
        if found != expected:
            raise ValueError(
                f"{self._path.name} is damaged: a checksum must be {expected}, got {found}"
            )

    def _entry(self, name: str) -> tuple[torch.dtype, list[int], int, int]:
        """Return a tensor's dtype, shape, and first and last byte offset in the file."""
        entry = self._head[name]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        start, end = (self._start + offset for offset in entry["data_offsets"])
        size = dtype.itemsize
        for length in shape:
            size *= length
        is_sound = (
            all(type(number) is int and number >= 0 for number in (*shape, start, end))
            and self._start <= start
            and start % dtype.itemsize == 0
            and end == start + size <= len(self._map)
        )
        if not is_sound:
            raise ValueError(f"{self._path.name} must hold {name!r} where its header says")
        return dtype, shape, start, end

    def _read(self, dtype: torch.dtype, shape: list[int], start: int, end: int) -> Tensor:
        if torch.is_inference_mode_enabled():
            # An inference tensor has no version counter, so writes could not be detected.
            with torch.inference_mode(False):
                return self._read(dtype, shape, start, end)
        if start == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        count = (end - start) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
