"""Map a file into memory, to read parts of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import final

from hookline.files.open_regular import open_regular

FileState = tuple[int, ...]


@final
class MappedFile:
    """A memory-mapped file. What is written to the parts that are read never reaches the file."""

    __slots__ = ("_bytes", "_map", "_path", "name", "size", "state")

    def __init__(self, path: Path) -> None:
        handle = open_regular(path)
        try:
            self.state: FileState | None = file_state(os.fstat(handle))
            # A private mapping: a write to it does not reach the file.
            self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(handle)
        self._bytes = memoryview(self._map)
        self._path = path
        self.name: str = path.name
        self.size: int = len(self._map)

    def read_range(self, start: int, stop: int) -> memoryview:
        """Return a range of the mapping."""
        return self._bytes[start:stop]

    def is_current(self) -> bool:
        """Return whether the file is unchanged since it was opened."""
        try:
            return file_state(os.stat(self._path)) == self.state
        except OSError:  # moved or deleted: the mapping stays valid unless the file was truncated
            return self._map.size() == self.size


def file_state(status: os.stat_result) -> FileState:
    """Return a file's device, inode, size and modification time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
