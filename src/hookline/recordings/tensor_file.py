"""One file of tensors, in the format of safetensors, with a checksum of each.

    8 bytes             the head's length, little-endian
    head                JSON: name -> dtype, shape and where its bytes lie; padded with spaces
    bytes               the tensors, one after the other, the widest dtypes first

Written and read here and not by that library, which reads the same files: its own way costs four
times as much a tensor, and gives no look at the bytes to check them.
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
from hookline.recordings.manifest import checksum, open_regular

# As the head of a file writes them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Those whose bytes NumPy shows as they are; of the others they are looked at as integers.
_IN_NUMPY = frozenset({
    torch.float64, torch.float32, torch.float16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
})  # fmt: skip
_BUFFER_BYTES = 1024**2


def write_tensors(path: Path, tensors: Sequence[Tensor]) -> list[str]:
    """Write tensors under their numbers, down to the disk.

    Args:
        path: a new file.
        tensors: contiguous and on the CPU.

    Returns:
        The checksums: of the head, and of each tensor.
    """
    # By width, so that each lies at a multiple of its own; `sorted` keeps the order otherwise.
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


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.dtype not in _IN_NUMPY:
        tensor = tensor.reshape(-1).view(torch.uint8)
    return tensor.numpy().data


@final
class TensorFile:
    """One file of tensors, memory-mapped: its head is checked here, each tensor when it is read.

    Args:
        path: the file.
        sums: the checksums that were noted when it was written.

    Raises:
        OSError: it cannot be read. ValueError: it is not what was written.
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
            # Private: who writes to a tensor does not write to the file.
            self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
        self._bytes = memoryview(self._map)
        self._path, self._sums = path, sums
        self._start = 8 + int.from_bytes(self._map[:8], "little")
        if self._start > len(self._map):
            raise ValueError(f"{path.name} must be as long as its head says")
        self._check(self._bytes[: self._start], sums[0])
        self._head: dict[str, Any] = json.loads(self._map[8 : self._start])
        self._tensors: dict[str, tuple[Tensor, int]] = {}
        self.verified: set[str] = set()

    @property
    def state(self) -> tuple[int, ...]:
        """Which file it is and when it was last written to, as it was when it was opened."""
        return self._state

    def is_current(self) -> bool:
        """Whether the file is still as it was when it was opened."""
        try:
            return _state(os.stat(self._path)) == self._state
        except OSError:  # moved, or deleted: what is mapped stays, unless it is cut off
            return self._map.size() == len(self._map)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor: checked at the first time, the same one at every other.

        Raises:
            KeyError, ValueError: it is not there, or not what was written.
            OverwrittenError: somebody wrote to it since it was read.
        """
        kept = self._tensors.get(name)
        if kept is None:
            self.verify(name)
            tensor = self._read(*self._entry(name))
            # Another thread may have read it meanwhile: there is but one.
            kept = self._tensors.setdefault(name, (tensor, tensor._version))
        tensor, version = kept
        if tensor._version != version:
            raise OverwrittenError(f"{name} was changed in place")
        return tensor

    def outline(self, name: str) -> Tensor:
        """A tensor on the meta device, of the shape and dtype that the head says."""
        dtype, shape, _, _ = self._entry(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def verify(self, name: str) -> None:
        """Compare a tensor's bytes with their checksum, once.

        Raises:
            KeyError, ValueError: it is not there, or not what was written.
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
        """A tensor's dtype and shape, and where its bytes begin and end in the file."""
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
            raise ValueError(f"{self._path.name} must hold {name!r} where its head says")
        return dtype, shape, start, end

    def _read(self, dtype: torch.dtype, shape: list[int], start: int, end: int) -> Tensor:
        if torch.is_inference_mode_enabled():
            # An inference tensor would not tell whether it was written to.
            with torch.inference_mode(False):
                return self._read(dtype, shape, start, end)
        if start == end:
            return torch.empty(shape, dtype=dtype, device="cpu")
        count = (end - start) // dtype.itemsize
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start).view(shape)


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
