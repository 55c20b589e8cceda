"""Write the files of a profile."""

from __future__ import annotations

from pathlib import Path

from hookline.errors import FolderError
from hookline.util.replace_text import replace_text


def path_of(file: str | Path) -> Path:
    """Convert the argument of a method that writes a file to a path.

    Raises:
        FolderError: the argument is not a path.
    """
    try:
        return Path(file)
    except TypeError:
        raise FolderError(
            f"the file must be a path, got {file!r}.\nGive its name, such as 'profile.html'."
        ) from None


def write_file(path: Path, text: str) -> Path:
    """Write a text file and return it; a file of this name stays as it was if that fails.

    Raises:
        FolderError: the file cannot be written.
    """
    try:
        replace_text(path, text)
    except OSError as error:
        raise FolderError(
            f"the file must be one that can be written, got {path}: {error.strerror or error}."
            "\nName a file in a writable folder, on a disk with free space."
        ) from error
    return path
