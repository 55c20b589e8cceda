"""The tensor files of a recording's folder, and the values in them. Imports encoding, place.

Tensors are memory-mapped when they are looked up; their shapes and dtypes are in the files' heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hookline.engine.errors import FolderError
from hookline.recordings.encoding import decode
from hookline.recordings.place import first_line

# What reading a manifest that nobody should trust can raise.
DAMAGE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError,
    RuntimeError, UnicodeError,
)  # fmt: skip

# As the head of a safetensors file writes them.
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip


@final
class Files:
    """The tensor files of one folder, each opened once, when first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Files, (self.folder,)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor by the name that the manifest gives it."""
        file, key = self._place(name)
        tensor: Tensor = file.get_tensor(key)
        return tensor

    def outline(self, name: str) -> Tensor:
        """A tensor on the meta device, of the shape and dtype that the file's head says."""
        file, key = self._place(name)
        head = file.get_slice(key)
        dtype = _DTYPES.get(str(head.get_dtype()).upper())
        if dtype is None:
            raise ValueError(f"a dtype that this hookline does not know: {head.get_dtype()}")
        return torch.empty(head.get_shape(), dtype=dtype, device="meta")

    def release(self) -> None:
        """Close the files; the next look-up opens them again. Tensors that were read stay whole."""
        self._opened.clear()

    def _place(self, name: str) -> tuple[Any, str]:
        file, _, key = str(name).partition("/")
        if Path(file).name != file or file in ("", ".", ".."):
            raise ValueError(f"a tensor's file is outside the folder: {file!r}")
        opened = self._opened.get(file)
        if opened is None:
            path = self.folder / file
            if path.exists() and not path.is_file():  # opening a pipe would wait for ever
                raise ValueError(f"{file} is no file")
            opened = self._opened[file] = safe_open(path, framework="pt")
        return opened, key


@final
class Stored:
    """A value that lies in a folder; `load()` reads it, memory-mapped."""

    __slots__ = ("_data", "_files")

    def __init__(self, files: Files, data: Any) -> None:
        self._files = files
        self._data = data

    def load(self) -> Any:
        """Read the value.

        Raises:
            FolderError: the folder is gone or damaged.
        """
        return self._decode(self._files.tensor)

    def outline(self) -> Any:
        """The value with its tensors on the meta device; none of their data is read.

        Raises:
            FolderError: the folder is gone or damaged.
        """
        return self._decode(self._files.outline)

    def release(self) -> None:
        """Close the folder's files."""
        self._files.release()

    def _decode(self, get: Any) -> Any:
        try:
            return decode(self._data, get)
        except (*DAMAGE, OSError, SafetensorError) as error:
            raise FolderError(
                f"{self._files.folder} is damaged, gone, or replaced since it was opened:"
                f" {first_line(error)}.\nOpen it again, or record it again."
            ) from error
