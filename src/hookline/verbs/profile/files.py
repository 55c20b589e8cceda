"""Write the files of a profile: whole, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hookline.errors import FolderError


def write_file(path: Path, text: str) -> Path:
    """Write a text file and return it; a file of this name stays as it was if that fails.

    Raises:
        FolderError: the file cannot be written.
    """
    is_plain = path.is_file() or not path.exists()  # not a device or a pipe
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part") if is_plain else path
    try:
        try:
            part.write_text(text, "utf-8", "backslashreplace", newline="\n")
            if is_plain:
                os.replace(part, path)
        finally:
            if is_plain:
                part.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(
            f"the file must be one that can be written, got {path}: {error.strerror or error}."
            "\nName a file in a writable folder, on a disk with free space."
        ) from error
    return path
