"""The mean and the deviation by deviations: those of `Moments`, without their loss of digits."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hookline.statistics.value_statistics import mean_and_std
from hookline.views import main_tensor_statistics
from thoroughness import examples

NUMBERS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=4), st.sampled_from([0.0, 1e9]))
def test_parts_give_the_mean_and_deviation_of_the_whole(parts, offset):
    parts = [torch.tensor(part, dtype=torch.float64) + offset for part in parts]
    whole = torch.cat(parts).tolist()
    mean, std = mean_and_std(parts)
    assert mean == pytest.approx(statistics.fmean(whole), rel=1e-12, abs=1e-9)
    assert std == pytest.approx(statistics.pstdev(whole), rel=1e-9, abs=1e-6)


def test_without_numbers_there_is_neither():
    assert all(math.isnan(one) for one in mean_and_std([]))
    mean, std = mean_and_std([torch.tensor([math.inf], dtype=torch.float64)])
    assert not math.isfinite(mean)
    assert math.isnan(std)


@pytest.mark.parametrize("offset", [1e9, -1e12])
def test_a_small_deviation_beside_a_large_mean_is_kept(offset):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x + offset
    x[3] = math.nan
    found = main_tensor_statistics(x)
    finite = x[x.isfinite()]
    assert found.mean == pytest.approx(finite.mean().item(), rel=1e-12)
    assert found.std == pytest.approx(finite.std(correction=0).item(), rel=1e-6)
