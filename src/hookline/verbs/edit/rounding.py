"""Round values to a dtype or to a number of bits: how sensitive is a model to it?"""

from __future__ import annotations

import torch
from torch import Tensor

from hookline.errors import AttachError, StructureError
from hookline.verbs.edit.operands import Edit, explain_errors

_MOST_BITS = 16


def round_to(precision: torch.dtype | int) -> Edit:
    """Round the value as a dtype or a number of bits would, and keep its own dtype.

        >>> hl.edits.round_to(torch.bfloat16)(torch.tensor([1.0, 1.001])).tolist()
        [1.0, 1.0]
        >>> hl.edits.round_to(3)(torch.tensor([0.9, -2.0, 3.0])).tolist()
        [1.0, -2.0, 3.0]

    Args:
        precision: a floating-point dtype, such as `torch.bfloat16` or `torch.float8_e4m3fn`: the
            value is cast to it and back. A number outside its range becomes what torch's cast makes
            of it. Or a number of bits from 2 to 16: the numbers are rounded to equal steps, of
            which the largest finite magnitude of the tensor is the last, as in symmetric
            quantisation with one scale. NaN and infinities stay.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device. Gradients flow through as if it were not there.

    Raises:
        AttachError: `precision` is neither such a dtype nor such a number.
        StructureError: (when the function is called) the value is no tensor of floating-point
            numbers.
    """
    if isinstance(precision, torch.dtype) and precision.is_floating_point:

        def rounded(value: Tensor) -> Tensor:
            return value.to(precision).to(value.dtype)

    elif (
        isinstance(precision, int)
        and not isinstance(precision, bool)
        and 2 <= precision <= _MOST_BITS
    ):
        n_steps = 2 ** (precision - 1) - 1

        def rounded(value: Tensor) -> Tensor:
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            finite = wide.isfinite()  # masked scores hold -inf
            step = wide.where(finite, 0).abs().amax() / n_steps if wide.numel() else wide.sum()
            is_rounded = finite & (step > 0)
            return torch.where(is_rounded, (wide / step).round() * step, wide).to(value.dtype)

    else:
        raise AttachError(
            "precision must be a floating-point dtype or a number of bits from 2 to"
            f" {_MOST_BITS}, got {precision!r}."
            "\nWrite hl.edits.round_to(torch.bfloat16) or hl.edits.round_to(8)."
        )

    def change(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            raise StructureError(
                f"hl.edits.round_to must be given floating-point values, got {value.dtype}."
                "\nSelect a site with such values."
            )
        new = rounded(value.detach())
        if not value.requires_grad:
            return new
        # The difference is 0 and carries the gradient; of infinities, it would be NaN.
        carried = new + (value - value.detach())
        return torch.where(value.isfinite(), carried, new + value)

    return explain_errors("round_to", change)
