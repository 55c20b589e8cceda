"""Write and read JSON with its own checksum.

Checksums are 64-bit XXH3. They detect damage; they do not authenticate the author.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from xxhash import xxh3_64_hexdigest

from hookline.errors import FolderError
from hookline.files.folder_or_url import Place
from hookline.util.version import VERSION

MANIFEST = "manifest.json"

_BLANK = b"0" * 16
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{16})"')
_HEAD_BYTES = 200  # the format and the checksum are within the first 200 bytes


@final
@dataclass(frozen=True)
class FolderFormat:
    """The format of a folder, which the first keys of its manifest name."""

    name: str  # the format
    version: int  # the version that is written and read
    kind: str  # what such a folder is, for messages: "a store"
    writer: str  # the call that writes one
    again: str  # how to make the folder again: "extract it again"

    def first_keys(self) -> dict[str, Any]:
        """Return the first keys of a manifest."""
        return {
            "format": self.name, "version": self.version, "checksum": _BLANK.decode(),
            "hookline": VERSION,
        }  # fmt: skip

    def is_format_of(self, place: Place) -> bool:
        """Tell whether the manifest of a place names this format among its first keys.

        Raises:
            FileNotFoundError: the place has no manifest.
        """
        head = place.read(MANIFEST, 0, min(_HEAD_BYTES, place.size(MANIFEST)))
        return f'"{self.name}"'.encode() in head

    def check_format(self, manifest: Any, place: object) -> None:
        """Refuse a manifest of another format or version."""
        if not isinstance(manifest, dict) or manifest.get("format") != self.name:
            raise FolderError(
                f"{place} is not {self.kind}: its {MANIFEST} was written by something else."
                f"\nGive the folder that {self.writer} wrote."
            )
        if manifest.get("version") != self.version:
            raise FolderError(
                f"{place} is {self.kind} of version {manifest.get('version')}; this hookline reads"
                f" version {self.version}.\nOpen it with the hookline that wrote it"
                f" ({manifest.get('hookline', 'unknown')}), or {self.again}."
            )


def checksum(data: Any) -> str:
    """Compute the checksum of any contiguous buffer, as 16 hexadecimal digits."""
    return xxh3_64_hexdigest(data)


def seal_json(manifest: Mapping[str, Any]) -> bytes:
    """Encode a manifest as JSON, one line a key, and fill in its checksum.

    Raises:
        ValueError: the first keys lack a "checksum" to fill in.
    """
    # json's own indentation takes three times as long.
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in manifest.items()]
    before, _, after = _split_at_checksum(("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return before + checksum(before + _BLANK + after).encode() + after


def verify_seal(data: bytes) -> None:
    """Compare a manifest with the checksum that `seal_json` filled in."""
    before, expected, after = _split_at_checksum(data)
    actual = checksum(before + _BLANK + after)
    if actual != expected.decode():
        raise ValueError(f"its checksum must be {expected.decode()}, got {actual}")


def stored_checksum(data: bytes) -> str:
    """Return the checksum that `seal_json` filled in."""
    return _split_at_checksum(data)[1].decode()


def _split_at_checksum(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Split a manifest into the bytes before its checksum, the checksum, and the bytes after."""
    match = _CHECKSUM.search(data, 0, _HEAD_BYTES)
    if match is None:
        raise ValueError("it must have a checksum among its first keys")
    return data[: match.start(1)], match[1], data[match.end(1) :]
