"""The private names of torch's process-wide hooks."""

from __future__ import annotations

import sys
from typing import Any

# The dictionary of each kind of process-wide hook, then the dictionaries of its flags.
_GLOBAL_HOOKS = {
    "forward_pre": ("_global_forward_pre_hooks",),
    "forward": ("_global_forward_hooks", "_global_forward_hooks_with_kwargs"),
    "after": ("_global_forward_hooks", "_global_forward_hooks_always_called"),
    "parameter": ("_global_parameter_registration_hooks",),
    "buffer": ("_global_buffer_registration_hooks",),
    "module": ("_global_module_registration_hooks",),
    "step_pre": ("_global_optimizer_pre_hooks",),
    "step_post": ("_global_optimizer_post_hooks",),
}


def global_hook_dicts(kind: str) -> list[Any]:
    """Return the dictionary of a kind of process-wide hook, then the dictionaries of its flags.

    They are written to directly. torch's own functions may be interrupted before they return a
    handle, and then leave the flag for kwargs behind.
    """
    name = "torch.optim.optimizer" if kind.startswith("step") else "torch.nn.modules.module"
    place = sys.modules[name]
    return [getattr(place, name) for name in _GLOBAL_HOOKS[kind]]
