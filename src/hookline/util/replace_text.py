"""Write a text file whole, or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
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
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
