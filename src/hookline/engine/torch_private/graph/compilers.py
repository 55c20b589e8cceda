"""Tell what torch's compilers have done, and what they were told."""

from __future__ import annotations

import sys
from typing import Any


def has_compiled_backward() -> bool:
    """Tell whether compiled autograd has compiled a backward in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["compiled_autograd"]["captures"])


def filters_guards(optimized: Any) -> bool:
    """Tell whether `torch.compile(module)` was given a function that leaves out guards."""
    hooks = getattr(getattr(optimized.dynamo_ctx, "callback", None), "hooks", None)
    return getattr(hooks, "guard_filter_fn", None) is not None
