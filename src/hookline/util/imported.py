"""Find a module that somebody else has imported, without importing it."""

from __future__ import annotations

import sys
from typing import Any


def imported(name: str) -> Any:
    """Return a module that has been imported; None without one.

    Also None while another thread is still importing it: the module then lacks some of its names.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module
