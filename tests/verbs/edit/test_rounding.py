"""hl.edits.round_to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hookline as hl


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_dtype_rounds_as_a_cast_does(dtype):
    value = torch.randn(3, 4)
    rounded = hl.edits.round_to(dtype)(value)
    assert rounded.dtype is torch.float32
    assert torch.equal(rounded, value.to(dtype).float())


@given(st.integers(2, 16), st.integers(0, 20))
def test_bits_round_to_equal_steps_of_the_largest_magnitude(bits, seed):
    value = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    rounded = hl.edits.round_to(bits)(value)
    step = value.abs().max() / (2 ** (bits - 1) - 1)
    assert (rounded - value).abs().max() <= step * 0.501
    assert len(rounded.unique()) <= 2**bits - 1
    steps = rounded / step
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-2)
    torch.testing.assert_close(rounded.abs().max(), value.abs().max())


def test_zeros_and_nothing_stay():
    assert hl.edits.round_to(4)(torch.zeros(3)).tolist() == [0, 0, 0]
    assert hl.edits.round_to(4)(torch.zeros(0, 3)).shape == (0, 3)
    assert hl.edits.round_to(4)(torch.ones(2, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("has_gradient", [True, False])
def test_numbers_that_are_not_finite_stay_and_have_no_part(odd, has_gradient):
    value = torch.tensor([0.9, odd, -2.0, 3.0], requires_grad=has_gradient)
    rounded = hl.edits.round_to(3)(value)
    expected = torch.tensor([1.0, odd, -2.0, 3.0])
    torch.testing.assert_close(rounded.detach(), expected, equal_nan=True)
    if has_gradient:
        rounded.backward(torch.ones(4))
        assert value.grad.tolist() == [1.0] * 4


def test_masked_scores_are_rounded_beside_their_infinities():
    scores = torch.randn(4, 4, requires_grad=True)
    masked = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    hl.edits.round_to(8)(masked).softmax(-1).square().sum().backward()
    assert scores.grad.isfinite().all()
    assert scores.grad.any()


@pytest.mark.parametrize("precision", [torch.bfloat16, 4])
def test_gradients_flow_through(precision):
    model = nn.Linear(2, 2)
    with hl.edit(model, "(root)", hl.edits.round_to(precision)):
        model(torch.randn(3, 2)).sum().backward()
    assert model.bias.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("precision", [1, 17, True, 8.0, torch.int8, "int8", None])
def test_no_precision_is_refused(precision):
    with pytest.raises(hl.AttachError, match=r"precision must be a floating-point dtype or a numb"):
        hl.edits.round_to(precision)


def test_integers_are_refused():
    with pytest.raises(hl.StructureError, match=r"floating-point values, got torch.int64"):
        hl.edits.round_to(8)(torch.ones(2).long())
