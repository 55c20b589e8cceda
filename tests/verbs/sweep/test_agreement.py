"""Two ways of running one change agree if only rounding tells them apart."""

from __future__ import annotations

import math

import pytest
import torch

from hookline.verbs.sweep.agreement import (
    is_same_number,
    may_be_rounding,
    numbers_agree,
    outputs_agree,
)

LOGITS = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
MOVED = LOGITS + torch.tensor([[0.1, 0.2, -0.1, 0.0]])


def test_a_number_is_itself_also_if_it_is_nan():
    assert is_same_number(math.nan, math.nan)
    assert is_same_number(math.inf, math.inf)
    assert not is_same_number(math.nan, 1.0)


@pytest.mark.parametrize(
    ("number", "agrees"),
    [(0.5, True), (0.50005, True), (0.5002, False), (math.nan, False), (math.inf, False)],
)
def test_metrics_agree_to_a_thousandth_of_the_effect(number, agrees):
    assert numbers_agree(number, 0.5, 0.4, LOGITS) is agrees


def test_metrics_agree_to_the_rounding_of_their_dtype():
    assert not numbers_agree(1.01, 1.0, 1.0, LOGITS)
    assert numbers_agree(1.01, 1.0, 1.0, LOGITS.bfloat16())
    assert numbers_agree(1.0, 1.0, 1.0, [])
    assert not numbers_agree(1.0 + 1e-9, 1.0, 1.0, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [-1e4, torch.finfo(torch.bfloat16).min, -math.inf])
def test_a_masked_class_allows_the_others_nothing(dtype, masked):
    last = torch.full((1, 1), masked)
    base, plain = (torch.cat([part, last], 1).to(dtype) for part in (LOGITS, 2 * MOVED))
    other = torch.cat([3 * MOVED, last], 1).to(dtype)
    assert outputs_agree(plain, plain, base)
    assert outputs_agree(plain * (1 + torch.finfo(dtype).eps), plain, base)
    assert not outputs_agree(other, plain, base)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_agrees_with_no_number(bad):
    assert not outputs_agree(torch.full_like(LOGITS, bad), MOVED, LOGITS)
    assert not outputs_agree(MOVED, torch.full_like(LOGITS, bad), LOGITS)
    masked, other = MOVED.clone(), 2 * MOVED
    masked[0, 0] = other[0, 0] = bad  # by the change, which allows the other classes nothing
    assert outputs_agree(masked.clone(), masked, LOGITS)
    assert not outputs_agree(other, masked, LOGITS)


def test_one_vector_of_many_that_differs_is_noticed():
    base, plain = torch.ones(1000, 4), torch.ones(1000, 4)
    plain[7] = torch.tensor([2.0, 1.0, 3.0, 1.0])
    other = plain.clone()
    other[7, 0] = 2.1
    assert outputs_agree(plain.clone(), plain, base)
    assert not outputs_agree(other, plain, base)


def test_outputs_of_other_shapes_or_without_floats_do_not_agree():
    assert not outputs_agree(MOVED[0], MOVED, LOGITS)
    assert not outputs_agree(torch.tensor([1]), torch.tensor([1]), torch.tensor([0]))
    assert outputs_agree(torch.tensor(2.0), torch.tensor(2.0), torch.tensor(1.0))


def test_the_usual_size_of_an_output_tells_what_is_rounding():
    output = torch.cat([LOGITS, torch.full((1, 1), -1e30)], 1)
    assert may_be_rounding(1.0, 1.00001, output)
    assert not may_be_rounding(1.0, 1.1, output)
    assert not may_be_rounding(1.0, 1.1, [])
    assert may_be_rounding(math.nan, math.nan, output)
