"""Files of arrays: `.npy` and `.npz`, mapped wherever their bytes lie as they are."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from hookline.errors import InputError
from hookline.models.packages import in_short
from hookline.verbs.extract.inputs.arrays import ArrayItems, ArrayPart, ArrayRows

_LOCAL_HEADER_BYTES = 30  # of a member of a zip archive; then its name and extra fields
_ENDING = ".npy"


def array_file_items(path: Path) -> ArrayItems:
    """Return the rows of a `.npy` or `.npz` file as items. Several arrays are keyword arguments.

    Raises:
        InputError: the file is broken, needs unpickling, or its arrays do not fit together.
    """
    try:
        arrays: Any
        if path.suffix.lower() == ".npy":
            with path.open("rb") as file:
                arrays = ArrayRows(_part(path, file))
        else:
            arrays = _members(path)
            arrays = next(iter(arrays.values())) if len(arrays) == 1 else arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} must be a file that np.save or np.savez wrote, got {in_short(error)}."
            "\nWrite it anew, as numbers: np.save(FILE, array.astype('float32'))."
        ) from error
    if arrays == {}:
        raise InputError(
            f"{path} must hold at least one array, got an empty archive."
            "\nWrite it anew: np.savez(FILE, x=array)."
        )
    return ArrayItems(arrays, str(path))


def _members(path: Path) -> dict[str, ArrayRows]:
    found = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if not info.filename.endswith(_ENDING):
                raise ValueError(f"a member {info.filename}")
            key = info.filename.removesuffix(_ENDING)
            if info.compress_type == zipfile.ZIP_STORED:
                found[key] = ArrayRows(_part(path, file, _start(file, info)))
            else:
                with archive.open(info) as member:
                    _, shape, dtype = _header(member)
                found[key] = ArrayRows(Compressed(path, key, shape, dtype))
    return found


def _start(file: Any, info: zipfile.ZipInfo) -> int:
    """Find the first byte of a member: its own header may differ from the one in the directory."""
    file.seek(info.header_offset)
    head = file.read(_LOCAL_HEADER_BYTES)
    name, extra = (int.from_bytes(head[at : at + 2], "little") for at in (26, 28))
    return info.header_offset + _LOCAL_HEADER_BYTES + name + extra


def _part(path: Path, file: Any, start: int = 0) -> ArrayPart:
    """Find the bytes of an array: in a `.npy` file, or further inside another file."""
    file.seek(start)
    is_fortran, shape, dtype = _header(file)
    steps = [dtype.itemsize]
    for size in shape[:-1] if is_fortran else shape[:0:-1]:
        steps.append(steps[-1] * size)
    strides = tuple(steps if is_fortran else steps[::-1])[: len(shape)]
    return ArrayPart(path, file.tell(), dtype.str, shape, strides)


def _header(file: Any) -> tuple[bool, tuple[int, ...], np.dtype[Any]]:
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
    return is_fortran, tuple(shape), dtype


@final
class Compressed:
    """An array in a compressed `.npz` file. It is read whole on first use, and pickles as its name.

    Args:
        path: the file.
        key: the name of the array.
        shape: its shape.
        dtype: its dtype.
    """

    def __init__(self, path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._path = path
        self._key = key
        self.shape = shape
        self.dtype = dtype
        self._array: NDArray[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_array": None}

    def __getitem__(self, index: Any) -> Any:
        if self._array is None:
            with np.load(self._path, allow_pickle=False) as archive:
                self._array = archive[self._key]
        return self._array[index]
