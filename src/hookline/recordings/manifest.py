"""Write and read the manifest of a recording's folder: JSON with its own checksum.

Checksums are 64-bit XXH3. They detect damage; they do not authenticate the folder's author.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from hookline.display.text import first_line
from hookline.engine import Site
from hookline.errors import FolderError
from hookline.recordings.reading import reading
from hookline.util.installed import package_version
from hookline.util.open_regular import open_regular

FORMAT = "hookline-recording"
VERSION = 2
MANIFEST = "manifest.json"

# The errors that reading an untrusted manifest can raise.
DAMAGE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError,
    RuntimeError, UnicodeError,
)  # fmt: skip

# The fix that errors about damage give.
REMEDY = "Copy the folder again from a whole one, or record it again."

_BLANK = b"0" * 16
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{16})"')
_HEAD_BYTES = 200  # the checksum is within the first 200 bytes


def checksum(data: Any) -> str:
    """Compute the checksum of any contiguous buffer, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def write_manifest(folder: Path, body: Mapping[str, Any]) -> str:
    """Write a folder's manifest and sync it to disk.

    Args:
        folder: the folder.
        body: the keys after those that every manifest begins with.

    Returns:
        The manifest's checksum.
    """
    head = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": _BLANK.decode(),
        "hookline": package_version(),
        "torch": str(torch.__version__),
    }
    data = sealed({**head, **body})
    path = folder / MANIFEST
    path.write_bytes(data)
    sync(path)
    return _parted(data)[1].decode()


def sealed(manifest: Mapping[str, Any]) -> bytes:
    """Encode a manifest as JSON, one line a key, and fill in its checksum.

    Raises:
        ValueError: the first keys lack a "checksum" to fill in.
    """
    # json's own indentation takes three times as long.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    before, _, after = _parted(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return before + checksum(before + _BLANK + after).encode() + after


def _parted(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Split a manifest into the bytes before its checksum, the checksum, and the bytes after."""
    found = _CHECKSUM.search(data, 0, _HEAD_BYTES)
    if found is None:
        raise ValueError("it must have a checksum among its first keys")
    return data[: found.start(1)], found[1], data[found.end(1) :]


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest and verify its checksum.

    Raises:
        FileNotFoundError, NotADirectoryError: the manifest does not exist.
        FolderError: it has another version, is damaged, cannot be read now, or belongs to another
            program.
    """
    path = folder / MANIFEST
    try:
        with reading(str(path), (FileNotFoundError, NotADirectoryError)):
            data = read_regular(path)
        manifest = json.loads(data, object_hook=_Sites().note)
    except DAMAGE as error:
        raise FolderError(f"{path} cannot be read: {first_line(error)}.\n{REMEDY}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise FolderError(
            f"{folder} is not a recording: its {MANIFEST} was not written by hookline."
            "\nGive the folder that run.save(...) wrote."
        )
    if manifest.get("version") != VERSION:
        raise FolderError(
            f"{folder} is a recording of version {manifest.get('version')}; this hookline reads"
            f" version {VERSION}.\nOpen it with the hookline that wrote it"
            f" ({manifest.get('hookline', 'unknown')}), or record it again."
        )
    try:
        unsealed(data)
    except ValueError as error:
        raise FolderError(f"{path} is damaged: {error}.\n{REMEDY}") from error
    return manifest


def unsealed(data: bytes) -> None:
    """Compare a manifest with the checksum that `sealed` filled in.

    Raises:
        ValueError: they differ, or the manifest has none.
    """
    before, said, after = _parted(data)
    found = checksum(before + _BLANK + after)
    if found != said.decode():
        raise ValueError(f"its checksum must be {said.decode()}, got {found}")


class _Sites:
    """The set of sites that a manifest has listed so far.

    Duplicates are refused while parsing: a file that repeats a site 300,000 times takes seconds.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def note(self, row: dict[str, Any]) -> dict[str, Any]:
        """Note the site of a JSON object; other objects are returned unchanged.

        Raises:
            ValueError: the site is listed twice.
        """
        if "path" in row and "port" in row:
            leaf = tuple(row.get("leaf", ()))
            site = row["path"], row["port"], leaf, row.get("call")
            if site in self._known:
                raise ValueError(f"each site must be listed once, got {str(Site(*site))!r} twice")
            self._known.add(site)
        return row


def read_regular(path: Path) -> bytes:
    """Read a regular file.

    Raises:
        OSError: the file cannot be read. ValueError: it is a pipe, a device or a folder.
    """
    handle = open_regular(path)
    with os.fdopen(handle, "rb") as file:
        return file.read()


def sync(path: Path) -> None:
    """Sync a file, or a folder's entries, to disk, so that a later rename cannot precede it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
