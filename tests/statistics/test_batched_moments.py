"""The moments of many tensors, measured in the rows of one matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from counted_operations import CountedOperations
from hookline.statistics import batched_moments as module
from hookline.statistics.batched_moments import batched_moments

MOMENTS = hl.stats.moments(compile=False)


def assert_as_alone(tensors):
    for tensor, slots in zip(tensors, batched_moments(tensors), strict=True):
        expected = MOMENTS.update(MOMENTS.start(tensor), tensor)
        torch.testing.assert_close(slots, expected, rtol=1e-12, atol=1e-12)
        assert slots[[0, 1, 2, 6, 7]].tolist() == expected[[0, 1, 2, 6, 7]].tolist()


NUMELS = st.lists(st.sampled_from([0, 1, 7, 4095, 4096, 4097, 9000]), min_size=1, max_size=6)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@given(NUMELS, st.sampled_from(DTYPES), st.integers(0, 99))
def test_each_tensor_has_the_moments_that_it_has_alone(numels, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(numel, generator=generator).to(dtype) for numel in numels]
    for number, tensor in enumerate(tensors):
        tensor[::3] = [0.0, -0.0, math.nan, math.inf, -math.inf, 3.0][number % 6]
    assert_as_alone(tensors)


def test_views_and_other_orders_of_memory_count_as_they_are():
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert_as_alone([image, torch.randn(40, 50).t(), torch.randn(9, 9)[:, ::2], torch.tensor(3.0)])


def test_tensors_that_need_several_matrices_are_all_measured(monkeypatch):
    monkeypatch.setattr(module, "_BATCH_NUMEL", 3 * 4096)
    assert_as_alone([torch.randn(numel) for numel in (5000, 4000, 9000, 100, 12288, 1)])


def operations(n_tensors):
    tensors = [torch.randn(100) for _ in range(n_tensors)]
    batched_moments(tensors)  # once, for the layout that is kept
    with CountedOperations() as counted:
        batched_moments(tensors)
    return counted.count


def test_a_hundred_tensors_take_as_many_operations_as_one():
    assert operations(100) == operations(1) < 40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_changes_no_moment(dtype):
    tensors = [torch.rand(50), torch.rand(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_as_alone([tensor.to(dtype) for tensor in tensors])


def test_the_layouts_of_many_batches_in_turn_are_kept():
    tensor = torch.ones(3)

    def count():
        with CountedOperations() as counted:
            for n_tensors in range(1, 31):
                batched_moments([tensor] * n_tensors)
        return counted.count

    count()
    assert count() == 30 * operations(1)
