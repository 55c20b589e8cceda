"""Locks that a forked process finds free.

A process is forked by one of its threads; in the child the others are not there, and what they held
at that moment would be held for ever: a worker of a DataLoader would hang at its first line.
"""

from __future__ import annotations

import os
import threading
import weakref

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def fork_safe_lock() -> threading.RLock:
    """A lock that its own thread may take again, and that is free in a forked child."""
    new = threading.RLock()
    _locks.add(new)
    return new


def _free_all() -> None:
    for held in list(_locks):
        if held.acquire(blocking=False):
            held.release()  # free, or held by the thread that forked, which goes on holding it
        else:
            held._at_fork_reinit()  # type: ignore[attr-defined]  # as logging and threading do


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
