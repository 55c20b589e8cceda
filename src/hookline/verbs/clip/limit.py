"""A bound on gradients: measure a gradient, and clip it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import gather_full, gather_stacked, local_part, run_at_trace_time
from hookline.errors import AttachError

EPSILON = 1e-6  # what clip_grad_norm_ adds to a norm before it divides by it


@final
class Limit:
    """A bound on a gradient.

    Args:
        kind: "value", "norm" or "total_norm".
        bound: the largest absolute element, or the largest norm.
        norm_type: the p of the norm.

    Attributes:
        is_split: whether gradients may be split over ranks, so that computing a norm is a
            collective.
    """

    __slots__ = ("_tensor", "bound", "is_split", "kind", "norm_type")

    def __init__(self, kind: str, bound: float, norm_type: float) -> None:
        self.kind: str = kind
        self.bound: float = bound
        self.norm_type: float = norm_type
        self.is_split: bool = False
        # For compiled code, which would be recompiled for each Python number.
        self._tensor = torch.tensor(bound, dtype=torch.float64, device="cpu")

    def norm_or_largest(self, grad: Tensor) -> Tensor:
        """Compute the number to compare with the bound: the largest element, or the norm.

        The norm is in float32, or in float64 for a float64 gradient.
        """
        if grad.is_nested:
            grad = _nested_elements(grad)
        if self.kind == "value":
            return largest_element(grad)
        wide = grad.abs() if grad.is_complex() else grad
        wide = wide if wide.dtype is torch.float64 else wide.float()
        if abs(self.norm_type) == math.inf and not wide.numel():
            return wide.new_zeros(())
        norm: Tensor = torch.linalg.vector_norm(wide, self.norm_type)
        return gather_full(norm)

    def norm_over_ranks(self, size: Tensor, groups: Iterable[Any]) -> Tensor:
        """Compute the size of a gradient from the size of this rank's part: a collective."""
        if self.kind == "value":
            return size
        for group in groups:
            norms = gather_stacked(size, group)
            size = norms.sum() if not self.norm_type else norms.norm(self.norm_type)
        return size

    def clip(self, grad: Tensor, size: Tensor) -> Tensor:
        """Clip a gradient, given its size."""
        if self.kind == "value":
            return grad.clamp(-self.bound, self.bound)
        return _scale_to_norm(grad, self.bound, size)

    def clip_in_graph(self, grad: Tensor) -> Tensor:
        """Clip a gradient in compiled code."""
        if self.is_split:
            refuse_compilation_of_split_norm()
        if self.kind == "value" and grad.is_nested:  # torch clamps these by numbers only
            return self.clip(grad, grad)
        if self.kind == "value":
            bound = self._tensor.to(grad.device, grad.dtype)
            return grad.clamp(-bound, bound)
        norm = self.norm_or_largest(grad)
        return _scale_to_norm(grad, self._tensor.to(norm.device, norm.dtype), norm)


@run_at_trace_time
def refuse_compilation_of_split_norm() -> None:
    """Refuse the compilation of code that clips by a norm over ranks.

    Raises:
        AttachError: always.
    """
    raise AttachError(
        "hl.clip by a norm between modules must run outside of compiled code in a model that"
        " tensor parallelism splits, got a compiled one.\nRun it without: with"
        " torch.compiler.set_stance('force_eager'): ..."
    )


def largest_element(grad: Any) -> Tensor:
    """Compute the largest absolute element of this rank's part of a gradient."""
    sizes: Tensor = local_part(grad.detach()).abs()
    size: Tensor = sizes.amax() if sizes.numel() else sizes.new_zeros(())
    return size


def _scale_to_norm(grad: Tensor, bound: float | Tensor, norm: Tensor) -> Tensor:
    factor = (bound / (norm + EPSILON)).clamp(max=1.0)
    if grad.dtype.itemsize < 4:  # in 16 bits, a small factor would become 0
        return (grad.float() * factor).to(grad.dtype)
    clipped: Tensor = grad * factor.to(grad.dtype)
    return clipped


def _nested_elements(grad: Any) -> Tensor:
    """Return the elements of a nested tensor, without the gaps between its parts."""
    if grad.lengths() is None:
        values: Tensor = grad.values()
        return values
    return torch.cat([part.reshape(-1) for part in grad.unbind()])
