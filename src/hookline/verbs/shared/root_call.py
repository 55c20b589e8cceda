"""Read the arguments of the root's call from the frame in which a pass begins."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any, NamedTuple

from torch import nn

from hookline.engine import unwrap, unwrap_compiled


class RootCall(NamedTuple):
    """The root without wrappers such as DDP, and the arguments of its call."""

    root: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def root_call(frame: FrameType, root: nn.Module) -> RootCall | None:
    """Return the call of the root in this frame; None if a module around the root was called."""
    local = frame.f_locals
    owner = local[frame.f_code.co_varnames[0]]
    owner = owner() if isinstance(owner, weakref.ref) else owner
    inner = unwrap(unwrap_compiled(root))
    if not isinstance(owner, nn.Module) or unwrap(unwrap_compiled(owner)) is not inner:
        return None
    return RootCall(inner, local["args"], local["kwargs"])
