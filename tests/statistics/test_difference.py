"""The four numbers of a difference: each sees a fault that the others miss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.statistics import difference as module
from hookline.statistics.difference import EQUAL, difference

F64 = torch.float64


@pytest.fixture
def reference():
    return torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


def test_a_scale_is_in_the_ratio_of_norms(reference):
    gap = difference(reference * 0.22, reference)
    assert gap.norm_ratio == pytest.approx(0.22)
    assert gap.relative == pytest.approx(0.78)


def test_permuted_channels_leave_the_norm(reference):
    gap = difference(reference[:, torch.randperm(256)], reference)
    assert gap.norm_ratio == pytest.approx(1.0)
    assert gap.relative > 1


def test_one_wrong_row_is_the_worst_row(reference):
    wrong = reference.clone()
    wrong[5] *= -1
    gap = difference(wrong, reference)
    assert gap.relative < 0.3
    assert (gap.worst_row, gap.row) == (pytest.approx(2.0), 5)
    assert gap.norm_ratio == pytest.approx(1.0)


def test_one_flipped_sign_is_the_worst_element(reference):
    wrong = reference.clone()
    wrong[3, 7] = -5.0
    gap = difference(
        wrong, reference.index_put((torch.tensor(3), torch.tensor(7)), torch.tensor(5.0))
    )
    assert gap.relative < 0.1
    assert gap.worst_row < 0.7
    assert (gap.worst_element, gap.element) == (pytest.approx(2.0), (3, 7))
    assert (gap.n_unequal, gap.numel) == (1, 64 * 256)


def test_small_rows_and_elements_are_measured_by_the_usual_ones():
    b = torch.ones(10, 8)
    b[3] = 1e-6
    gap = difference(torch.where(b < 1, 2e-6, b), b)
    assert gap.worst_row < 2e-6
    assert gap.worst_element < 2e-6


@pytest.mark.parametrize(
    ("a", "b", "relative"),
    [
        (torch.tensor([2e200], dtype=F64), torch.tensor([1e200], dtype=F64), 1.0),
        (torch.tensor([1.7e308], dtype=F64), torch.tensor([-1.7e308], dtype=F64), 2.0),
        (torch.tensor([1e-300], dtype=F64), torch.tensor([2e-300], dtype=F64), 0.5),
        (torch.tensor([1.0, 1e-300], dtype=F64), torch.tensor([1.0, 2e-300], dtype=F64), 0.0),
        (torch.tensor([2**62]), torch.tensor([2**62 + 1]), 0.0),
        (torch.tensor(1.0), torch.tensor(0.0), math.inf),
        (torch.ones(3, dtype=torch.complex64), torch.ones(3) * 1j, math.sqrt(2)),
    ],
)
def test_what_is_not_equal_is_never_called_equal(a, b, relative):
    gap = difference(a, b)
    assert gap.differs
    assert gap.relative == pytest.approx(relative, rel=1e-9, abs=1e-300)


def test_nan_in_both_is_equal_and_in_one_is_a_problem():
    x = torch.tensor([1.0, math.nan, math.inf])
    assert difference(x, x.clone()) == EQUAL
    assert difference(x, torch.ones(3)).problem == "2 elements NaN or infinite in one of the two"
    assert difference(torch.ones(3), x).differs
    assert difference(x, torch.tensor([1.0, math.nan, -math.inf])).problem


def test_equal_numbers_of_two_dtypes_are_equal():
    x = torch.tensor([0.5, -2.0, math.inf])
    assert not difference(x, x.to(torch.bfloat16)).differs


def test_the_least_number_of_a_dtype_is_minus_infinity():
    masks = [torch.tensor([0.0, torch.finfo(t).min], dtype=t) for t in (torch.float32, F64)]
    assert not difference(*masks).differs
    assert difference(masks[0], torch.zeros(2, dtype=F64)).differs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # said once a process
def test_other_shapes_and_layouts():
    assert difference(torch.ones(2, 3), torch.ones(3, 2)).problem == "shapes [2, 3] and [3, 2]"
    sparse = torch.eye(3).to_sparse()
    assert not difference(sparse, torch.eye(3)).differs
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert not difference(nested, nested.clone()).differs
    assert difference(nested, nested * 2).relative == pytest.approx(0.5)
    other = torch.nested.nested_tensor([torch.ones(4, 3), torch.ones(2, 3)])
    assert "nested" in difference(nested, other).problem
    assert not difference(torch.ones(0, 3), torch.ones(0, 3, dtype=F64)).differs


@given(
    shape=st.lists(st.integers(1, 6), min_size=0, max_size=4),
    numel=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_blocks_do_not_change_the_numbers(shape, numel, seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, dtype=F64) for _ in "ab")
    whole = difference(a, b)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK_NUMEL", max(numel, shape[-1] if shape else 1))
        parts = difference(a, b)
    assert (parts.row, parts.element, parts.n_unequal) == (whole.row, whole.element, a.numel())
    for name in ("relative", "norm_ratio", "worst_row", "worst_element"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
    assert whole.relative == pytest.approx(float((a - b).norm() / b.norm()))
    usual = max(float(b[whole.element].abs()), float(b.square().mean().sqrt()))
    assert float((a - b)[whole.element].abs()) == pytest.approx(whole.worst_element * usual)
