"""Write a text file whole, or not at all."""

from __future__ import annotations

import secrets
from pathlib import Path

from hookline.errors import FolderError
from hookline.files.local_files import replace_file


def write_atomically(path: Path, text: str) -> None:
    """Write a text file; an older file of this name stays as it was if that fails.

    Raises:
        OSError: the file cannot be written.
    """
    # Names may have lone surrogates, which strict UTF-8 refuses.
    write = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_text(text, **write)
        return
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(text, **write)
        replace_file(part, path)
    finally:
        part.unlink(missing_ok=True)


def as_path(file: str | Path) -> Path:
    """Convert the argument of a method that writes a file to a path."""
    try:
        return Path(file)
    except TypeError:
        raise FolderError(
            f"the file must be a path, got {file!r}.\nGive its name, such as 'profile.html'."
        ) from None


def write_text_file(path: Path, text: str) -> Path:
    """Write a text file and return it; a file of this name stays as it was if that fails."""
    try:
        write_atomically(path, text)
    except OSError as error:
        raise FolderError(
            f"the file must be one that can be written, got {path}: {error.strerror or error}."
            "\nName a file in a writable folder, on a disk with free space."
        ) from error
    return path
