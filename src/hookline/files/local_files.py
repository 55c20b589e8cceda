"""Open and map files only if they are regular, and sync folders to disk."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from pathlib import Path
from typing import final

FileState = tuple[int, ...]
# Windows renames no file that a program has open, such as one that scans what is new.
_PAUSES_S = (0.01, 0.05, 0.2, 0.5, 1.0) if os.name == "nt" else ()
_WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # as of some network shares


def open_regular(path: Path) -> int:
    """Open a regular file for reading; refuse a pipe, which could block for ever.

    Raises:
        OSError: the file cannot be opened. ValueError: it is a pipe, a device or a folder.
    """
    binary = getattr(os, "O_BINARY", 0)
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | binary)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    kind = "folder" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device"
    raise ValueError(f"{path.name} must be a regular file, got a {kind}")


def replace_file(source: Path, target: Path) -> None:
    """Rename a file, and replace an older one; wait a little on Windows while one is open.

    Raises:
        OSError: it cannot be renamed.
    """
    for pause in _PAUSES_S:
        try:
            source.replace(target)
        except PermissionError:
            time.sleep(pause)
        else:
            return
    source.replace(target)


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk, so that a later rename cannot precede an earlier one.

    It does nothing where folders cannot be opened, as on Windows, or not be synced.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _WITHOUT_SYNC:
            raise
    finally:
        os.close(handle)


def is_deleted(file: int) -> bool:
    """Tell whether no folder has an open file any more. A file that was moved is not deleted."""
    return os.fstat(file).st_nlink == 0


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

    def is_unchanged(self) -> bool:
        """Return whether the file is unchanged since it was opened."""
        try:
            return file_state(os.stat(self._path)) == self.state
        except OSError:  # moved or deleted: the mapping stays valid unless the file was truncated
            return self._map.size() == self.size


def file_state(status: os.stat_result) -> FileState:
    """Return a file's device, inode, size and modification time."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
