"""The manifest of a recording's folder: JSON that carries its own checksum.

Checksums are XXH3 of 64 bits: they find damage, and prove nothing about who wrote the folder.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from hookline.engine import Site
from hookline.errors import FolderError

FORMAT = "hookline-recording"
VERSION = 2
MANIFEST = "manifest.json"

# What reading a manifest that nobody should trust can raise.
DAMAGE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError,
    RuntimeError, UnicodeError,
)  # fmt: skip

# What to do about bytes that changed.
REMEDY = "Copy the folder again from a whole one, or record it again."

_BLANK = b"0" * 16
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{16})"')
_HEAD_BYTES = 200  # the checksum lies in the first ones


def checksum(data: Any) -> str:
    """Compute the checksum of any contiguous buffer, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def write_manifest(folder: Path, body: Mapping[str, Any]) -> str:
    """Write a folder's manifest, down to the disk.

    Args:
        folder: the folder.
        body: what it says, besides what every manifest begins with.

    Returns:
        Its checksum.
    """
    head = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": _BLANK.decode(),
        "hookline": _version(),
        "torch": str(torch.__version__),
    }
    data = sealed({**head, **body})
    path = folder / MANIFEST
    path.write_bytes(data)
    sync(path)
    return _parted(data)[1].decode()


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Write a manifest as JSON, a line for each key, with the checksum of all of it.

    Raises:
        ValueError: there is no "checksum" among its first keys, to be filled in.
    """
    # Not json's own indentation, which takes three times as long.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    before, _, after = _parted(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return before + checksum(before + _BLANK + after).encode() + after


def _parted(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Take a manifest apart: what is before its checksum, the checksum, what comes after."""
    found = _CHECKSUM.search(data, 0, _HEAD_BYTES)
    if found is None:
        raise ValueError("it must have a checksum among its first keys")
    return data[: found.start(1)], found[1], data[found.end(1) :]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest, and check its checksum.

    Raises:
        FileNotFoundError, NotADirectoryError: there is none.
        FolderError: it is of another version, or damaged, or something else's.
    """
    path = folder / MANIFEST
    try:
        data = read_regular(path)
        manifest = json.loads(data, object_hook=_Sites().note)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (*DAMAGE, OSError) as error:
        raise FolderError(f"{path} cannot be read: {first_line(error)}.\n{REMEDY}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FolderError(f"{folder} is not a recording: its {MANIFEST} is something else's.")
    if manifest.get("version") != VERSION:
        raise FolderError(
            f"{folder} is a recording of version {manifest.get('version')}; this hookline reads"
            f" version {VERSION}.\nOpen it with the hookline that wrote it"
            f" ({manifest.get('hookline', 'unknown')}), or record it again."
        )
    try:
        before, said, after = _parted(data)
    except ValueError as error:
        raise FolderError(f"{path} is damaged: {error}.\n{REMEDY}") from error
    found = checksum(before + _BLANK + after)
    if found != said.decode():
        raise FolderError(
            f"{path} is damaged: its checksum must be {said.decode()}, got {found}.\n{REMEDY}"
        )
    return manifest


class _Sites:
    """The sites that a manifest has listed so far.

    They are looked at while it is read: a text of 300,000 times one site takes seconds to read.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def note(self, row: dict[str, Any]) -> dict[str, Any]:
        """Note the row of a site; other rows are left alone.

        Raises:
            ValueError: the site was listed before.
        """
        if "path" in row and "port" in row:
            leaf = tuple(row.get("leaf", ()))
            site = row["path"], row["port"], leaf, row.get("call")
            if site in self._known:
                raise ValueError(f"each site must be listed once, got {str(Site(*site))!r} twice")
            self._known.add(site)
        return row


def read_regular(path: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read. ValueError: it is a pipe, a device or a folder.
    """
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as file:
        return file.read()


def open_regular(path: Path) -> int:
    """Open a file for reading; what would wait for ever, such as a pipe, is refused.

    Raises:
        OSError: it cannot be opened. ValueError: it is a pipe, a device or a folder.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    kind = "folder" if stat.S_ISDIR(mode) else "pipe" if stat.S_ISFIFO(mode) else "device"
    raise ValueError(f"{path.name} must be a regular file, got a {kind}")


def sync(path: Path) -> None:
    """Push a file, or a folder's names, to the disk: the rename must not overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__).rstrip(".")


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:
        return "unknown"
