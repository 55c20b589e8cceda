"""Write and read one safetensors file, with a checksum of each tensor.

    8 bytes             the header's length, little-endian
    header              JSON: name -> dtype, shape and byte offsets; padded with spaces
    bytes               the tensors, one after the other, the widest dtypes first

The safetensors library reads the same files. It is not used here because it costs four times as
much a tensor and does not expose the bytes for checksums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.errors import OverwrittenError
from hookline.files.folder_or_url import OpenFile
from hookline.files.sealed_json import checksum
from hookline.util.view_as_array import view_as_array

# The names of dtypes in a file's header.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The real dtypes that NumPy has. Only their memoryviews can be cast to bytes.
IN_NUMPY = frozenset({
    torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool,
})  # fmt: skip


def encode_tensors(tensors: Sequence[Tensor]) -> tuple[Iterator[Any], list[str]]:
    """Make the bytes of a file of contiguous CPU tensors, which are named by their indices.

    Returns:
        The bytes as buffers; and the checksums of the header and of each tensor, which are
        computed as its bytes are taken.
    """
    # The widest dtype first, so that every tensor is aligned to its element size.
    order = sorted(range(len(tensors)), key=lambda number: -tensors[number].element_size())
    entries, end = [], 0
    for number in order:
        tensor, start = tensors[number], end
        end += tensor.nbytes
        entries.append(
            f'"{number}":{{"dtype":"{DTYPE_NAMES[tensor.dtype]}","shape":{list(tensor.shape)},'
            f'"data_offsets":[{start},{end}]}}'
        )
    head = length_prefixed_header("{" + ",".join(entries) + "}")
    sums = [checksum(head), *[""] * len(tensors)]

    def buffers() -> Iterator[Any]:
        yield head
        for number in order:
            data = _as_memoryview(tensors[number])
            sums[1 + number] = checksum(data)
            yield data

    return buffers(), sums


def length_prefixed_header(header: str) -> bytes:
    """Return a header as it begins a file: padded with spaces, behind the 8 bytes of its length."""
    text = header.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_end(first_bytes: Any) -> int:
    """Return where the header ends, from the first 8 bytes of a file."""
    return 8 + int.from_bytes(first_bytes[:8], "little")


def view_as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as its bytes, in one dimension.

    >>> view_as_bytes(torch.tensor([[1, 256]], dtype=torch.int16)).tolist()
    [1, 0, 0, 1]
    """
    # A dimension of one element may have any stride and counts as contiguous: `view` refuses it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def to_byte_array(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of a dense tensor, copied where they are not contiguous on the CPU."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data: NDArray[np.uint8] = view_as_array(view_as_bytes(plain))
    return data


def _as_memoryview(tensor: Tensor) -> memoryview:
    if tensor.dtype not in IN_NUMPY:
        tensor = view_as_bytes(tensor)
    return view_as_array(tensor).data


@final
class TensorFile:
    """The tensors of an open file. The header is verified here, each tensor on first read.

    Args:
        file: the file.
        sums: the checksums that `encode_tensors` returned.

    Raises:
        ValueError: the file is damaged. UnreadableError: it cannot be downloaded now.
    """

    __slots__ = ("_head", "_start", "_sums", "_tensors", "file", "verified")

    def __init__(self, file: OpenFile, sums: Sequence[str]) -> None:
        self.file, self._sums = file, sums
        self._start = header_end(file.read_range(0, 8))
        if self._start > file.size:
            raise ValueError(f"{file.name} must be as long as its header says")
        head = file.read_range(0, self._start)
        self._verify_checksum(head, sums[0])
        self._head: dict[str, Any] = json.loads(bytes(head[8:]))
        self._tensors: dict[str, tuple[Tensor, int]] = {}
        self.verified: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        """Read a tensor, verified on first read; repeated calls return the same tensor.

        Raises:
            KeyError, ValueError: the tensor is missing or damaged.
            OverwrittenError: the tensor was changed in place after it was read.
        """
        entry = self._tensors.get(name)
        if entry is None:
            dtype, shape, _, _ = self._parse_entry(name)
            tensor = _bytes_to_tensor(self.read_verified_bytes(name), dtype, shape)
            # setdefault: if another thread has read it too, both get the same tensor.
            entry = self._tensors.setdefault(name, (tensor, tensor._version))
        tensor, version = entry
        if tensor._version != version:
            raise OverwrittenError(f"{name} was changed in place")
        return tensor

    def meta_tensor(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype in the header."""
        dtype, shape, _, _ = self._parse_entry(name)
        return torch.empty(shape, dtype=dtype, device="meta")

    def read_verified_bytes(self, name: str) -> Any:
        """Compare a tensor's bytes with their checksum, once per file, and return the bytes.

        Raises:
            KeyError, ValueError: the tensor is missing or damaged.
        """
        _, _, start, stop = self._parse_entry(name)
        data = self.file.read_range(start, stop)
        if name not in self.verified or self.file.state is None:
            self._verify_checksum(data, self._sums[1 + int(name)])
            self.verified.add(name)
        return data

    def _verify_checksum(self, data: Any, expected: str) -> None:
        actual = checksum(data)
        if actual != expected:
            raise ValueError(
                f"{self.file.name} is damaged: a checksum must be {expected}, got {actual}"
            )

    def _parse_entry(self, name: str) -> tuple[torch.dtype, list[int], int, int]:
        """Return a tensor's dtype, shape, and first and last byte offset in the file."""
        entry = self._head[name]
        dtype, shape = DTYPES[entry["dtype"]], entry["shape"]
        start, end = (self._start + offset for offset in entry["data_offsets"])
        size = math.prod(shape, start=dtype.itemsize)
        is_sound = (
            all(type(number) is int and number >= 0 for number in (*shape, start, end))
            and self._start <= start
            and start % dtype.itemsize == 0
            and end == start + size <= self.file.size
        )
        if not is_sound:
            raise ValueError(f"{self.file.name} must hold {name!r} where its header says")
        return dtype, shape, start, end


def _bytes_to_tensor(data: Any, dtype: torch.dtype, shape: list[int]) -> Tensor:
    if torch.is_inference_mode_enabled():
        # An inference tensor has no version counter, so writes could not be detected.
        with torch.inference_mode(False):
            return _bytes_to_tensor(data, dtype, shape)
    if not len(data):
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype).view(shape)
