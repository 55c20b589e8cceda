"""Tell the process that made an object from the children that it forks."""

from __future__ import annotations

import os
from typing import final


@final
class CreatingProcess:
    """The process in which it was made. A forked child inherits it, and is another process.

    >>> CreatingProcess().is_current
    True
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = os.getpid()

    @property
    def is_current(self) -> bool:
        """Tell whether the code runs in this process, and not in a forked child."""
        return os.getpid() == self._id
