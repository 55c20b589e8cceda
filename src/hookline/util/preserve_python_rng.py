"""Keep Python's random numbers where an import draws one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def preserve_python_rng() -> Iterator[None]:
    """Put the state of Python's random numbers back after the block.

    >>> import random
    >>> random.seed(0)
    >>> with preserve_python_rng():
    ...     first = random.random()
    >>> random.random() == first
    True
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
