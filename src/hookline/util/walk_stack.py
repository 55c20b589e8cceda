"""Walk over the frames of the running code."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType


def walk_stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, then its caller, and so on.

    >>> import sys
    >>> def inner():
    ...     return [frame.f_code.co_name for frame in walk_stack(sys._getframe())][:2]
    >>> inner()
    ['inner', '<module>']
    """
    while frame is not None:
        yield frame
        frame = frame.f_back
