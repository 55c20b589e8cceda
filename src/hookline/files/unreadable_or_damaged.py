"""Tell a file that cannot be read now from a file whose bytes were read and are wrong.

Only the second kind may be removed. A full table of open files, a missing permission or a network
that is down for a moment says nothing of the bytes on the disk.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hookline.display.text import first_line
from hookline.errors import FolderError

# The errors that reading an untrusted manifest can raise.
DAMAGE = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError,
    RuntimeError, UnicodeError,
)  # fmt: skip

# torch's mapping of a file raises a RuntimeError that ends with the number in parentheses.
_NUMBER = re.compile(r"\((\d+)\)$")


class UnreadableError(FolderError):
    """Raised for a file that could not be read. Its bytes may be whole."""


class DamagedError(ValueError):
    """Raised for a file whose bytes were read, and are wrong."""


@contextmanager
def convert_read_errors(file: str) -> Iterator[None]:
    """Turn the errors of reading a file into an `UnreadableError`.

    A pipe or a folder in the place of a file stays a ValueError, and a missing file what it is.
    """
    try:
        yield
    except (FileNotFoundError, FolderError):
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        raise UnreadableError(
            f"{file} cannot be read: {first_line(error)}.\n{_read_remedy(error)} The file was not"
            " removed."
        ) from error


def _read_remedy(error: OSError | RuntimeError | MemoryError) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and (match := _NUMBER.search(first_line(error))):
        number = int(match[1])
    if number in (errno.EMFILE, errno.ENFILE):
        return "Close files, or raise `ulimit -n`, and start again."
    if number in (errno.EACCES, errno.EPERM):
        return "Give this user the permission to read it, and start again."
    if number == errno.ENOMEM or isinstance(error, MemoryError):
        return "Free memory, or raise `ulimit -v`, and start again."
    return "Start again when it can be read."
