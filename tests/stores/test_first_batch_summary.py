"""First batches of one model are told from those of another, whatever the rounding."""

from __future__ import annotations

import json

import pytest
import torch

from hookline.stores.first_batch_summary import (
    ComputePrecision,
    compare_summaries,
    summarize_columns,
)

CPU = ComputePrecision("cpu", 0.0, False)
VALUES = torch.randn(8, 5, 7, generator=torch.Generator().manual_seed(0))


def summary(values, computing=CPU):
    about = summarize_columns({"fc": values}, computing)
    return json.loads(json.dumps(about))  # as a manifest holds it


def kind_of(was, now, *, is_same_place=True, computing=CPU):
    """Whether two values are "equal", or their difference is "near" or "far"."""
    differences = compare_summaries(
        summary(was, computing), summary(now, computing), is_same_setup=is_same_place
    )
    return "far" if differences.far else "near" if differences.near else "equal"


@pytest.mark.parametrize("is_same_place", [False, True])
def test_equal_values_are_equal_anywhere(is_same_place):
    assert kind_of(VALUES, VALUES.clone(), is_same_place=is_same_place) == "equal"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_half_of_the_digits_must_agree_on_another_machine(dtype):
    values = VALUES.to(dtype)
    eps = torch.finfo(dtype).eps
    for factor, expected in ((1 + 2 * eps, "near"), (1 + 2 * eps**0.5, "far")):
        assert kind_of(values, values * factor, is_same_place=False) == expected


def test_in_the_same_place_less_may_differ():
    assert kind_of(VALUES, VALUES * (1 + 1e-5), is_same_place=False) == "near"
    assert kind_of(VALUES, VALUES * (1 + 1e-5)) == "far"
    assert kind_of(VALUES, VALUES * (1 + 2e-7)) == "near"


@pytest.mark.parametrize("at", [(0, 0, 0), (3, 2, 1), (7, 4, 6)])
def test_one_number_that_changes_is_far(at):
    changed = VALUES.clone()
    changed[at] = 9
    assert kind_of(VALUES, changed, is_same_place=False) == "far"


def test_a_unit_and_a_row_that_are_zeroed_are_far():
    for place in [(slice(None), 2), (3,), (slice(None), slice(None), 1)]:
        changed = VALUES.clone()
        changed[place] = 0
        assert kind_of(VALUES, changed, is_same_place=False) == "far"


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"device": "cuda"}, "near"),  # begun elsewhere
        ({"is_split": True}, "near"),  # tensor parallelism adds in another order
        ({}, "far"),
    ],
)
def test_another_device_or_order_may_differ_more(now, expected):
    before, after = summary(VALUES), summary(VALUES * (1 + 1e-4), CPU._replace(**now))
    differences = compare_summaries(before, after, is_same_setup=True)
    assert bool(differences.far) == (expected == "far")
    assert bool(differences.near) == (expected == "near")


def test_values_of_a_model_in_half_precision_may_differ_more():
    coarse = ComputePrecision.from_dtypes("cpu", [torch.float32, torch.bfloat16], is_split=False)
    changed = VALUES * (1 + 1e-3)
    assert kind_of(VALUES, changed, is_same_place=False) == "far"
    assert kind_of(VALUES, changed, is_same_place=False, computing=coarse) == "near"


def test_a_lower_precision_of_products_may_differ_more():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        coarse = ComputePrecision.from_dtypes("cpu", [torch.float32], is_split=False)
    finally:
        torch.set_float32_matmul_precision(before)
    assert coarse.rounding == 2.0**-10
    assert ComputePrecision.from_dtypes("cpu", [], is_split=False).rounding == 0
    assert ComputePrecision.from_dtypes("cuda", [], is_split=False).rounding == 2.0**-10


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(40).reshape(8, 5),
        VALUES > 0,
        torch.complex(VALUES, -VALUES),
        VALUES.to(torch.float8_e4m3fn),
        torch.tensor([1.0, float("nan"), float("inf")]),
        torch.empty(0, 3),
        torch.zeros(4),
    ],
    ids=["integers", "booleans", "complex", "float8", "not finite", "empty", "zeros"],
)
def test_any_dtype_has_a_summary(values):
    assert kind_of(values, values.clone()) == "equal"
    if values.numel():
        changed = values.clone()
        changed.view(-1)[0] = ~changed.view(-1)[0] if values.dtype == torch.bool else 100
        assert kind_of(values, changed) == "far"


def test_numbers_that_become_nan_are_far_anywhere():
    changed = VALUES.clone()
    changed[2, 3, 4] = torch.nan
    assert kind_of(VALUES, changed, is_same_place=False) == "far"


def test_few_integers_may_flip_on_another_machine():
    ids = torch.arange(64) % 7
    flipped = ids.clone()
    flipped[3] += 1
    assert kind_of(ids, flipped) == "far"
    assert kind_of(ids, flipped, is_same_place=False) == "near"
    assert kind_of(ids, 6 - ids, is_same_place=False) == "far"


def test_a_difference_names_the_column_and_its_size():
    differences = compare_summaries(summary(VALUES), summary(VALUES * 0), is_same_setup=True)
    assert differences.far[0].startswith("fc: values differ by about ")
    assert differences.far[0].endswith(" of their norm")
