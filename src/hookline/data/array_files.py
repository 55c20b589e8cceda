"""Files of arrays; those of NumPy are mapped wherever their bytes lie as they are."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hookline.data.arrays import ArrayInFile, ArrayRows
from hookline.errors import InputError
from hookline.models.checkpoints import read_tensor_file
from hookline.models.packages import error_in_short

OF_NUMPY = (".npy", ".npz")
SUFFIXES = (*OF_NUMPY, ".pt", ".safetensors")
_LOCAL_HEADER_BYTES = 30  # of a member of a zip archive; then its name and extra fields
_ENDING = ".npy"
_ENCRYPTED = 1  # a flag of a member


def open_arrays(path: Path) -> Any:
    """Open a file of arrays, without unpickling.

    Args:
        path: `.npy`, `.npz`, `.pt` (anything that `torch.save` wrote) or `.safetensors`.

    Returns:
        An array, or a dict of several: of NumPy as rows that are read when they are needed, of
        torch as tensors. Of a `.pt` file what it holds.

    Raises:
        InputError: the file is broken, or needs unpickling.
    """
    content = open_named_arrays(path)
    is_lone = path.suffix.lower() in (".npz", ".safetensors") and len(content) == 1
    return next(iter(content.values())) if is_lone else content


def open_named_arrays(path: Path) -> Any:
    """Open a file of arrays as `open_arrays` does, and keep the name of a single one, too."""
    suffix = path.suffix.lower()
    if suffix == ".npy":
        with _convert_npy_errors(path), path.open("rb") as file:
            return ArrayRows(_locate_array(path, file))
    return _npz_members(path) if suffix == ".npz" else read_tensor_file(path, InputError)


def open_and_cast_arrays(path: Path, model: nn.Module) -> tuple[Any, bool]:
    """Open a file of arrays; float64 of NumPy becomes the float32 of a model's parameters.

    Returns:
        What `open_arrays` returns, and whether an array is converted.

    Raises:
        InputError: as in `open_arrays`.
    """
    content = open_arrays(path)
    floats = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
    if next(floats, None) is not torch.float32:
        return content, False
    if isinstance(content, dict):
        rows = {key: _float64_as_float32(value) for key, value in content.items()}
        return rows, any(rows[key] is not value for key, value in content.items())
    single = _float64_as_float32(content)
    return single, single is not content


def _float64_as_float32(value: Any) -> Any:
    if isinstance(value, ArrayRows) and np.dtype(value.dtype).newbyteorder("=") == np.float64:
        return value.to_dtype(torch.float32)
    return value


@contextmanager
def _convert_npy_errors(path: Path) -> Iterator[None]:
    """Tell what to do where a file of NumPy cannot be read."""
    try:
        yield
    except Exception as error:  # readers of broken files raise errors without a common base
        raise InputError(
            f"{path} must be a file that np.save or np.savez wrote, got {error_in_short(error)}."
            "\nWrite it anew, as numbers: np.save(FILE, array.astype('float32'))."
        ) from error


def _npz_members(path: Path) -> dict[str, ArrayRows]:
    with _convert_npy_errors(path), path.open("rb") as file, zipfile.ZipFile(file) as archive:
        return {
            info.filename.removesuffix(_ENDING): ArrayRows(_npz_member(path, file, archive, info))
            for info in archive.infolist()
        }


def _npz_member(path: Path, file: Any, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if not info.filename.endswith(_ENDING):
        raise ValueError(f"a member {info.filename}")
    if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & _ENCRYPTED:
        return _locate_array(path, file, _member_start(file, info))
    with archive.open(info) as member:
        _, shape, dtype = _read_npy_header(member)
    return CompressedArray(path, info.filename.removesuffix(_ENDING), shape, dtype)


def _member_start(file: Any, info: zipfile.ZipInfo) -> int:
    """Find the first byte of a member: its own header may differ from the one in the directory."""
    file.seek(info.header_offset)
    head = file.read(_LOCAL_HEADER_BYTES)
    name, extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    return info.header_offset + _LOCAL_HEADER_BYTES + name + extra


def _locate_array(path: Path, file: Any, start: int = 0) -> ArrayInFile:
    """Find the bytes of an array: in a `.npy` file, or further inside another file."""
    file.seek(start)
    is_fortran, shape, dtype = _read_npy_header(file)
    steps = [dtype.itemsize]
    for size in shape[:-1] if is_fortran else shape[:0:-1]:
        steps.append(steps[-1] * size)
    strides = tuple(steps if is_fortran else steps[::-1])[: len(shape)]
    part = ArrayInFile(path, file.tell(), dtype.str, shape, strides)
    n_bytes = file.seek(0, 2)
    if part.end > n_bytes:
        raise ValueError(f"{n_bytes} bytes for an array that ends at {part.end}")
    return part


def _read_npy_header(file: Any) -> tuple[bool, tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:  # version 3 is for names of fields outside latin-1
        raise ValueError("an array of records")
    shape, is_fortran, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("Python objects, which need unpickling")
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {shape}")
    return is_fortran, tuple(shape), dtype


@final
@dataclass(eq=False)
class CompressedArray:
    """An array in a compressed `.npz` file, read whole on first use. It pickles as its name."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _array: NDArray[Any] | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_array": None}

    def __getitem__(self, index: Any) -> Any:
        if self._array is None:
            with _convert_npy_errors(self.path), np.load(self.path, allow_pickle=False) as archive:
                self._array = archive[self.key]
        return self._array[index]
