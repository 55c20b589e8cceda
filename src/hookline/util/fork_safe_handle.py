"""Open file descriptors for one process: a forked child closes its copies.

A lock by `flock` lasts until the last copy of its descriptor is closed. Workers of a DataLoader
outlive a killed process by seconds, or for ever, and would keep its locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import final

_opening = threading.RLock()  # held while a process forks: no descriptor is opened unnoticed
_handles: weakref.WeakSet[ForkSafeHandle] = weakref.WeakSet()


@final
class ForkSafeHandle:
    """Hold a file descriptor that a forked child closes as its first act.

    >>> handle = ForkSafeHandle(Path("/dev/null"), os.O_RDONLY)
    >>> handle.close()
    >>> handle.is_open
    False

    Raises:
        OSError: the file cannot be opened.
    """

    _number = -1  # until it is opened

    def __init__(self, path: Path, flags: int) -> None:
        with _opening:
            self._number = os.open(path, flags, 0o666)
            _handles.add(self)

    @property
    def is_open(self) -> bool:
        """Tell whether the descriptor is open in this process."""
        return self._number >= 0

    def fileno(self) -> int:
        """Return the descriptor; -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        number, self._number = self._number, -1
        if number >= 0:  # Ctrl-C is not handled in between
            os.close(number)
        _handles.discard(self)

    __del__ = close  # of a descriptor that nobody holds, such as one whose closing Ctrl-C stopped


def _close_all() -> None:
    for handle in list(_handles):
        handle.close()
    _opening.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_all
    )
