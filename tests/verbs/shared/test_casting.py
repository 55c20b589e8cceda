"""Models and values in another dtype: complex numbers stay complex."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hookline.verbs.shared.casting import cast_model, dtype_after_cast


@pytest.mark.parametrize(
    ("of", "to", "expected"),
    [
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.int64, torch.float64, torch.int64),
        (torch.bool, torch.bfloat16, torch.bool),
        (torch.complex64, torch.float64, torch.complex128),
        (torch.complex64, torch.bfloat16, torch.complex64),
        (torch.complex128, torch.float32, torch.complex64),
    ],
)
def test_a_tensor_keeps_its_kind(of, to, expected):
    assert dtype_after_cast(torch.zeros(1, dtype=of), to) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_cast_model_keeps_its_imaginary_parts(dtype):
    model = nn.Linear(2, 2)
    number = torch.tensor([1 + 2j])
    model.w, model.again = nn.Parameter(number.clone()), model.bias
    model.register_buffer("phase", number.clone())
    model.register_buffer("steps", torch.tensor(3))
    cast = cast_model(model, dtype)
    wide = torch.complex128 if dtype is torch.float64 else torch.complex64
    assert cast is model
    assert cast.weight.dtype == cast.bias.dtype == dtype
    assert cast.again is cast.bias
    assert cast.w.dtype == cast.phase.dtype == wide
    assert cast.w.item() == cast.phase.item() == 1 + 2j
    assert cast.w.requires_grad
    assert cast.steps.dtype == torch.int64
