"""Edits along directions of the features: steer, project out."""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.compiler import is_dynamo_compiling

from hookline.engine import has_numbers, is_plain_eager
from hookline.engine.pytree import describe
from hookline.errors import AttachError, StructureError
from hookline.statistics.flat_numbers import to_float64
from hookline.verbs.edit.operands import Edit, Operand, explain_errors

# Directions whose singular value is below this many units of rounding count as dependent.
_N_ROUNDINGS = 8


def steer(direction: Tensor, strength: float | Tensor = 1.0) -> Edit:
    """Add a direction to the features of each token.

        >>> change = hl.edits.steer(torch.tensor([0.0, 1.0]), 2.0)
        >>> change(torch.zeros(1, 3, 2)).tolist()
        [[[0.0, 2.0], [0.0, 2.0], [0.0, 2.0]]]

    A strength of 0 changes no bit, unless it is trained. To steer only the tokens that `generate`
    writes, give `hl.edit` `steps=slice(1, None)`.

    Args:
        direction: a vector `(n_features,)`, the last dimension of the value. It is not normalised.
        strength: the factor of the direction: a number, or a tensor of one number.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device.

    Raises:
        AttachError: `direction` is not a vector of finite numbers, or is zero and not trained; or
            `strength` is not a number.
        StructureError: (when the function is called) the value is no tensor of floating-point
            numbers, or its last dimension has another size than the direction.
    """
    if not isinstance(direction, Tensor) or direction.dim() != 1:
        raise _directions_error("steer", "direction", "a vector of shape (n_features,)", direction)
    # Training may begin at zero, and under a transform or compilation no number is read.
    if not direction.requires_grad and has_numbers(direction) and is_plain_eager():
        _check_finite_nonzero(
            "direction", direction, to_float64(direction.detach()[None]).norm(dim=1)
        )
    factor = Operand(strength, "steer")
    is_zero = not isinstance(strength, Tensor) and strength == 0

    def change(value: Tensor) -> Tensor:
        _check_feature_size(value, direction, "steer")
        if is_zero and not is_dynamo_compiling():
            return value
        amount = factor.cast_like(value)
        steered = value + amount * direction.to(value.device, value.dtype)
        # -0.0 + 0.0 is 0.0, another bit. What stands in for it has no gradient of the amount.
        if isinstance(amount, Tensor) and not _needs_gradient(amount):
            return torch.where(amount.to(value.device) == 0, value, steered).to(value.dtype)
        return steered.to(value.dtype)

    return explain_errors("steer", change)


def _needs_gradient(amount: Tensor) -> bool:
    """Tell whether a gradient is taken with respect to an amount, backward or forward."""
    if amount.requires_grad:
        return torch.is_grad_enabled()
    dual = None if is_dynamo_compiling() else unpack_dual(amount)  # type: ignore[no-untyped-call]
    return dual is not None and dual.tangent is not None


def project_out(directions: Tensor) -> Edit:
    """Remove the component of the features along directions.

        >>> change = hl.edits.project_out(torch.tensor([0.0, 5.0]))
        >>> change(torch.tensor([[3.0, 4.0]])).tolist()
        [[3.0, 0.0]]

    All of the space that the directions span is removed, and nothing else: directions that repeat,
    or that are sums of others, remove no further direction.

    Args:
        directions: a vector `(n_features,)`, or several `(n_directions, n_features)`. Their lengths
            do not matter. They are read here, once; those that require gradients get them, and are
            read in each call.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device. It computes in float32 at least.

    Raises:
        AttachError: `directions` are not vectors of finite numbers, or all are zero.
        StructureError: (when the function is called) the value is no tensor of floating-point
            numbers, or its last dimension has another size than the directions.
    """
    is_tensor = isinstance(directions, Tensor) and directions.is_floating_point()
    if not is_tensor or directions.dim() not in (1, 2):
        wanted = "floating-point vectors of shape (n_directions, n_features)"
        raise _directions_error("project_out", "directions", wanted, directions)
    basis = _orthonormal_basis(directions)

    def change(value: Tensor) -> Tensor:
        _check_feature_size(value, basis, "project_out")
        dtype = torch.promote_types(value.dtype, torch.float32)
        lengths_along, rows = basis.T, basis
        if directions.requires_grad:
            # Of dependent directions, too, this has a gradient: that of singular vectors has none.
            rows = to_float64(directions.reshape(-1, directions.shape[-1]))
            rows = torch.nn.functional.normalize(rows, eps=sys.float_info.min)
            lengths_along = torch.linalg.pinv(rows, rtol=_rounding_tolerance(directions))
        wide = value.to(dtype)
        along = wide @ lengths_along.to(value.device, dtype)
        return (wide - along @ rows.to(value.device, dtype)).to(value.dtype)

    return explain_errors("project_out", change)


def _orthonormal_basis(directions: Tensor) -> Tensor:
    """Return orthonormal rows that span the directions.

    Raises:
        AttachError: a number is not finite, or all directions are zero.
    """
    vectors = to_float64(directions.detach().reshape(-1, directions.shape[-1]))
    lengths = vectors.norm(dim=1, keepdim=True)
    vectors = (vectors / lengths)[lengths.squeeze(1) > 0]
    _check_finite_nonzero("directions", directions, lengths)
    _, values, rows = torch.linalg.svd(vectors, full_matrices=False)
    basis: Tensor = rows[values > values[0] * _rounding_tolerance(directions)]
    return basis


def _rounding_tolerance(directions: Tensor) -> float:
    """Return how far a direction that is a sum of others differs from it in its dtype, at most."""
    n_directions = directions.numel() // directions.shape[-1]
    return torch.finfo(directions.dtype).eps * max(_N_ROUNDINGS, math.sqrt(n_directions))


def _check_finite_nonzero(name: str, directions: Tensor, lengths: Tensor) -> None:
    """Refuse directions of which one is not finite, or all are zero."""
    if not bool(lengths.isfinite().all()) or not bool(lengths.any()):
        raise AttachError(
            f"{name} must be finite and not all zero, got {describe.in_full(directions)} of"
            f" norms {lengths.flatten().tolist()[:4]}."
            "\nLeave out the directions that are zero, and look where NaN comes from."
        )


def _check_feature_size(value: Tensor, directions: Tensor, name: str) -> None:
    """Refuse a value whose features the directions do not fit."""
    is_fit = value.dim() > 0 and value.shape[-1] == directions.shape[-1]
    if is_fit and value.is_floating_point():
        return
    raise StructureError(
        f"hl.edits.{name} must be given floating-point values with {directions.shape[-1]} features"
        f" as last dimension, got shape {[*value.shape]} of {value.dtype}."
        "\nGive directions of the value's last dimension, or select another site."
    )


def _directions_error(name: str, argument: str, wanted: str, got: object) -> AttachError:
    text = describe.in_full(got) if isinstance(got, Tensor) else describe.in_words(got)
    return AttachError(
        f"{argument} must be {wanted}, got {text}."
        f"\nGive a tensor, such as the difference of two means: hl.edits.{name}(direction)."
    )
