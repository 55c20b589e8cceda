"""Keep Python's garbage collection out of a stretch of code."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Let Python collect no garbage inside.

    A collection may come at any line of Python, and up to Python 3.11 inside functions of C, too.
    It calls finalizers, and that of a line that nobody references removes its hooks.

        >>> with without_gc():
        ...     gc.isenabled()
        False
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
