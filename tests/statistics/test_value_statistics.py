from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from hookline.statistics import flat_numbers
from hookline.statistics.value_statistics import histogram_and_statistics
from hookline.views import main_tensor_statistics

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def test_it_measures_a_tensor_as_torch_does():
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))
    x[0] = 0
    found = main_tensor_statistics(x)
    assert found.mean == pytest.approx(x.mean().item(), abs=1e-7)
    assert found.std == pytest.approx(x.std(correction=0).item())
    assert (found.min, found.max) == (x.min().item(), x.max().item())
    assert found.zeros == pytest.approx(1 / 3)
    assert (found.non_finite, found.numel) == (0, 105)
    assert (found.shape, found.dtype) == ("[3, 5, 7]", "float32")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_elements_are_counted_and_left_out(bad):
    found = main_tensor_statistics(torch.tensor([1.0, bad, 3.0, 0.0]))
    assert found.non_finite == 1
    assert (found.mean, found.min, found.max) == (pytest.approx(4 / 3), 0, 3)
    assert found.zeros == 0.25


def test_a_tensor_of_nan_alone_has_no_mean():
    found = main_tensor_statistics(torch.full((4,), math.nan))
    assert found.mean is found.std is found.min is found.max is None
    assert (found.non_finite, found.zeros) == (4, 0)


def test_an_empty_tensor_has_no_numbers_and_gives_no_warning():
    found = main_tensor_statistics(torch.empty(0, 3))
    assert (found.mean, found.std, found.min, found.max, found.zeros) == (None,) * 5
    assert (found.numel, found.non_finite, found.shape) == (0, 0, "[0, 3]")


def test_one_element_has_a_deviation_of_zero():
    assert main_tensor_statistics(torch.tensor(7.0)).std == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, *FP8])
def test_narrow_dtypes_do_not_overflow(dtype):
    largest = torch.finfo(dtype).max
    x = torch.full((1000,), largest, dtype=torch.float32).to(dtype)
    found = main_tensor_statistics(x)
    assert found.mean == pytest.approx(largest)
    assert found.std == pytest.approx(0, abs=1e-6 * largest)
    assert found.dtype == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("scale", [1e300, 1e-300])
def test_squares_neither_overflow_nor_vanish(scale):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64) * scale
    found = main_tensor_statistics(x)
    assert found.mean == pytest.approx(2.5 * scale, rel=1e-12, abs=0)
    assert found.std == pytest.approx(math.sqrt(1.25) * scale, rel=1e-12, abs=0)


def test_complex_numbers_are_measured_by_magnitude():
    found = main_tensor_statistics(torch.tensor([3 + 4j, 0j]))
    assert (found.mean, found.max, found.zeros, found.dtype) == (2.5, 5.0, 0.5, "complex64")


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_whole_numbers_are_measured(dtype):
    found = main_tensor_statistics(torch.tensor([0, 1, 1, 1]).to(dtype))
    assert (found.mean, found.min, found.max, found.zeros) == (0.75, 0, 1, 0.25)


def test_of_a_structure_the_first_floating_tensor_counts():
    ids, hidden = torch.arange(3), torch.ones(2)
    assert main_tensor_statistics({"ids": ids, "hidden": (None, hidden)}).shape == "[2]"
    assert main_tensor_statistics([None, ids]).dtype == "int64"


@pytest.mark.parametrize("value", [None, 3.5, "text", [], torch.empty(3, device="meta")])
def test_without_a_tensor_that_has_data_there_is_nothing(value):
    assert main_tensor_statistics(value) is None


def test_pieces_of_a_large_tensor_give_what_the_whole_gives(monkeypatch):
    x = torch.randn(2, 31, 17, generator=torch.Generator().manual_seed(0)) * 3 + 100
    x[0, 3, 4] = math.inf
    whole = main_tensor_statistics(x)
    monkeypatch.setattr(flat_numbers, "CHUNK_NUMEL", 50)
    pieces = main_tensor_statistics(x.transpose(0, 2))
    assert pieces.mean == pytest.approx(whole.mean, rel=1e-12)
    assert pieces.std == pytest.approx(whole.std, rel=1e-12)
    assert (pieces.min, pieces.max, pieces.non_finite) == (whole.min, whole.max, 1)


def test_a_tensor_that_requires_a_gradient_is_read_without_one():
    parameter = nn.Parameter(torch.ones(3))
    assert main_tensor_statistics(parameter).mean == 1
    assert parameter.grad_fn is None


def test_the_imaginary_part_of_a_conjugate_has_a_histogram():
    part = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128).conj().imag
    counts, _, found = histogram_and_statistics(part, 2)
    assert (counts.tolist(), found.min, found.max) == ([1, 1], -2, 4)


def test_what_a_sparse_tensor_leaves_out_is_zero():
    x = torch.eye(4).to_sparse()
    assert main_tensor_statistics(x).zeros == 0.75


def test_a_nested_tensor_is_measured_by_its_parts():
    x = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    found = main_tensor_statistics(x)
    assert (found.numel, found.mean) == (5, pytest.approx(0.4))


@pytest.mark.parametrize(
    "values", [[-1.7e308, 0.0, 1.7e308], [1e16, 1e16 + 2, 1e16 + 4], [5.0, 5.0]]
)
def test_a_histogram_of_the_widest_or_narrowest_range_is_whole(values):
    counts, edges, _ = histogram_and_statistics(torch.tensor(values, dtype=torch.float64), 48)
    assert counts.sum() == len(values)
    assert len(counts) == 48
    assert bool((edges[1:] >= edges[:-1]).all())


@pytest.mark.parametrize("width", [1e-289, 1e-291, 1e-306, 1e-308, 1e-310, 3e-322, 5e-324])
@pytest.mark.parametrize("low", [0.0, -1.0])
def test_a_histogram_of_numbers_as_small_as_float64_has(width, low):
    tensor = torch.linspace(low, 1, 1001, dtype=torch.float64) * width
    counts, edges, _ = histogram_and_statistics(tensor, 48)
    large = tensor.numpy() * 2.0**200
    expected, _ = np.histogram(large, np.linspace(large.min(), large.max(), 49))
    np.testing.assert_array_equal(counts, expected)
    assert edges[0] == tensor.min()
    assert edges[-1] == tensor.max()
