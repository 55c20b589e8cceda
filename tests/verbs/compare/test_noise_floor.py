"""Noise floors: in multiples of eps, as measured, and of few elements."""

from __future__ import annotations

import math

import pytest
import torch

from hookline.statistics.difference import Difference
from hookline.verbs.compare.noise_floor import Floor, eps_of, estimate_floor, measured_floor

BF16, FP32 = 2.0**-7, 2.0**-23


def test_the_coarsest_dtype_counts_and_integers_have_no_noise():
    assert eps_of([torch.float32, torch.bfloat16, torch.int64]) == BF16
    assert eps_of([torch.float64]) < FP32
    assert eps_of([torch.int64, torch.bool]) == eps_of([]) == 0
    assert estimate_floor(0.0, "output") == estimate_floor(0.0, "stored") == Floor()
    assert eps_of([torch.float4_e2m1fn_x2]) == 0.5


@pytest.mark.parametrize("eps", [FP32, BF16])
def test_what_is_rounded_once_has_the_lowest_floor(eps):
    floors = [estimate_floor(eps, kind) for kind in ("stored", "output", "gradient")]
    assert floors[0] == Floor(eps, eps, eps, eps)
    relatives = [floor.relative for floor in floors]
    assert relatives == sorted(relatives)


def test_floors_grow_with_the_depth_and_end_below_one():
    shallow, deep = estimate_floor(FP32, "output", 256), estimate_floor(FP32, "output", 1024)
    assert shallow == estimate_floor(FP32, "output")
    assert deep.relative == pytest.approx(2 * shallow.relative)
    assert estimate_floor(0.5, "output", 10_000).relative < 1
    assert estimate_floor(0.5, "gradient", 10_000).norm_ratio < 1


@pytest.mark.parametrize(
    ("gap", "name"),
    [
        (Difference(1e-5, 1.0, 1e-5, 1e-5, numel=64), "relative"),
        (Difference(1e-6, 1.0002, 1e-6, 1e-6, numel=10**6), "norm_ratio"),
        (Difference(1e-6, 1.0, 0.3, 1e-6, numel=64), "worst_row"),
        (Difference(1e-6, 1.0, 1e-6, 0.3, numel=64), "worst_element"),
        (Difference(1e-6, math.nan, 1e-6, 1e-6, numel=64), "norm_ratio"),
    ],
)
def test_each_number_can_exceed_the_floor_alone(gap, name):
    assert estimate_floor(FP32, "output").exceeded_by(gap) == [name]


def test_the_norm_of_few_elements_may_be_off_as_far_as_these():
    floor = estimate_floor(FP32, "output")
    gap = Difference(5e-6, 1 + 5e-6, 5e-6, 5e-6, numel=1)
    assert floor.exceeded_by(gap) == []
    many = Difference(5e-6, 1 + 5e-6, 5e-6, 5e-6, numel=10**6)
    assert floor.exceeded_by(many) == ["norm_ratio"]


def test_what_was_measured_is_noise_four_times_over():
    floor = measured_floor(Difference(1e-6, 1 - 1e-7, 2e-6, 3e-6))
    assert floor.relative == pytest.approx(4e-6)
    assert floor.norm_ratio == pytest.approx(4e-7)
    assert (floor.worst_row, floor.worst_element) == pytest.approx((8e-6, 12e-6))
