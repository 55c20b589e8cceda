"""Locks that are free in a forked process.

Only the thread that forks exists in the child. A lock that another thread held at that moment would
never be released: a worker of a DataLoader would hang when it first acquires the lock.
"""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def fork_safe_lock() -> threading.RLock:
    """Create a reentrant lock that is free in a forked child."""
    new = threading.RLock()
    _locks.add(new)
    return new


def _free_all_in_child() -> None:
    for held in list(_locks):
        if held.acquire(blocking=False):
            held.release()  # it was free, or the forking thread holds it and keeps it
        else:
            held._at_fork_reinit()  # type: ignore[attr-defined]  # as logging and threading do


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all_in_child)
