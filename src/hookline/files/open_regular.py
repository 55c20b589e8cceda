"""Open files for reading only if they are regular, and sync them to disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path


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


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk, so that a later rename cannot precede it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_deleted(file: int) -> bool:
    """Tell whether no folder has an open file any more. A file that was moved is not deleted."""
    return os.fstat(file).st_nlink == 0
