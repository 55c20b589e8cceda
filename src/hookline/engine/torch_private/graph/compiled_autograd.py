"""Tell whether compiled autograd has been at work."""

from __future__ import annotations

import sys


def has_compiled_backward() -> bool:
    """Tell whether compiled autograd has compiled a backward in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["compiled_autograd"]["captures"])
