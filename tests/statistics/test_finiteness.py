"""Numbers of a value that are not finite: the quick look, and the counts."""

from __future__ import annotations

import math

import pytest
import torch

from float32_device import Float32Device
from hookline.statistics import finiteness
from hookline.statistics.finiteness import (
    NonFinite,
    count_nan_and_inf,
    non_finite_kinds,
    probe_nan,
    probe_sum,
    probe_sum_of_each,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_total_is_finite_where_all_numbers_are(bad, dtype):
    value = {"a": torch.ones(3, dtype=dtype), "b": [torch.zeros(2)]}
    assert torch.isfinite(probe_sum(value))
    value["a"][1] = bad
    assert not torch.isfinite(probe_sum(value))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_many_tensors_are_probed_by_one_call(monkeypatch, bad):
    monkeypatch.setattr(
        finiteness, "_can_sum_in_one_call", lambda t: t.dim() == 1 and t.dtype.is_floating_point
    )
    tensors = [torch.full((300,), 1e38), torch.full((9,), 6e4, dtype=torch.float16)]
    tensors += [torch.ones(2, 2), torch.ones(3).bfloat16(), torch.zeros(0), torch.arange(4)]
    assert [bool(probe.isfinite()) for probe in probe_sum_of_each(tensors[1:5])] == [True] * 4
    for number in (1, 2, 3):
        tensors[number].view(-1)[-1] = bad
    finite = [bool(probe.isfinite()) for probe in probe_sum_of_each(tensors)]
    # The first sum overflows, so that it is looked at again; integers have no probe.
    assert finite == [False, False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_where_infinities_are_meant_only_a_nan_counts(dtype):
    value = (torch.tensor([1, INF, -INF], dtype=dtype), torch.ones(2))
    assert torch.isfinite(probe_nan(value))
    value[1][0] = NAN
    assert not torch.isfinite(probe_nan(value))


def test_a_value_without_numbers_has_no_total():
    for value in (None, torch.arange(3), [torch.empty(2, device="meta")]):
        assert probe_sum(value) is None
        assert probe_nan(value) is None


def test_kinds_and_counts():
    tensor = torch.tensor([NAN, INF, -INF, 1.0, NAN])
    assert non_finite_kinds(tensor) == NonFinite.NAN | NonFinite.INF | NonFinite.MINUS_INF
    assert non_finite_kinds(tensor[3:4]) == NonFinite.NONE
    assert count_nan_and_inf(tensor) == (2, 2)


def test_numbers_of_mkldnn_tensors_are_read():
    assert non_finite_kinds(torch.tensor([NAN]).to_mkldnn()) == NonFinite.NAN


def test_half_numbers_are_measured_on_a_device_without_float64():
    numbers = torch.tensor([1.0, torch.nan, 3.0], dtype=torch.float16)
    with Float32Device():
        moments = finiteness.measure_local_moments(numbers)
    assert (moments.non_finite, moments.sum, moments.max) == (1, 4.0, 3.0)
