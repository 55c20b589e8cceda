"""Tests of paths that accept any text a user may type."""

from __future__ import annotations

import os
from pathlib import Path


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file; False for names that no file can have.

    >>> is_file("x" * 300), is_file("a\\0b"), is_file("/dev/null")
    (False, False, False)
    """
    return os.path.isfile(path)  # Path.is_file raises for a name that is too long


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a folder; False for names that no folder can have."""
    return os.path.isdir(path)


def is_special(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a pipe, a socket or a device: reading one may never end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def why_no_file(path: str | os.PathLike[str]) -> str:
    """Say why no regular file can be read at a path."""
    if is_folder(path):
        return "is a folder, not a file"
    return "is a pipe, a socket or a device, not a file" if is_special(path) else "is not there"


def printable(path: str | os.PathLike[str], n_shown: int = 100) -> str:
    """Format a path for a message: escape bytes that are not UTF-8, cut out the middle.

    >>> printable("x" * 300, 9)
    'xxxx...xxxx'
    """
    text = os.fspath(path).encode("utf-8", "backslashreplace").decode()
    text = text.replace("\0", "\\0")
    half = n_shown // 2
    return text if len(text) <= n_shown else f"{text[:half]}...{text[-half:]}"


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder; an empty list if it cannot be listed."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (OSError, ValueError):
        return []
