"""Many tensors by one call, as the optimizers of torch use them: on a GPU each call counts."""

from __future__ import annotations

import torch
from torch import Tensor


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Write tensors to others of their shapes."""
    if _are_plain(targets):
        torch._foreach_copy_(targets, sources)
    else:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


def subtract_from_all(minuends: list[Tensor], tensors: list[Tensor]) -> None:
    """Write `minuend - tensor` to each tensor, as `torch.sub` rounds it."""
    if _are_plain(tensors):
        torch._foreach_neg_(tensors)
        torch._foreach_add_(tensors, minuends)
    else:
        for minuend, tensor in zip(minuends, tensors, strict=True):
            torch.sub(minuend, tensor, out=tensor)


def norms_of_each(
    tensors: list[Tensor], norm_type: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of each tensor, in its own type or a wider one."""
    return list(torch._foreach_norm(tensors, norm_type, dtype=dtype)) if tensors else []


def _are_plain(tensors: list[Tensor]) -> bool:
    """Tell whether there are tensors, of no subclass: it may not know calls with lists."""
    return bool(tensors) and all(type(tensor) is Tensor for tensor in tensors)
