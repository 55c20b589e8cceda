"""The function in C gives the moments that NumPy gives, and NumPy goes on without it."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline.statistics import native
from hookline.statistics.native import native_moments

PLAIN = hl.stats.moments(compile=False)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if shutil.which("cc") is None:
        pytest.skip("has no C compiler")
    assert native_moments() is not None


def by_c():
    """A statistic that has measured enough for the function in C."""
    moments = hl.stats.moments()
    moments._until_native = 0
    return moments


def slots_of(statistic, value):
    return statistic.update(statistic.start(value), value).numpy()


def assert_same(value):
    found, expected = slots_of(by_c(), value), slots_of(PLAIN, value)
    np.testing.assert_array_equal(found[[0, 1, 2, 6, 7]], expected[[0, 1, 2, 6, 7]])
    np.testing.assert_allclose(found[3:6], expected[3:6], rtol=1e-12, atol=1e-300)


SPECIAL = [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 3e38, 1e-40, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(
    n=st.integers(1, 3000),
    seed=st.integers(0, 99),
    special=st.lists(st.tuples(st.integers(0, 2999), st.sampled_from(SPECIAL)), max_size=8),
)
def test_c_gives_the_moments_of_numpy(dtype, n, seed, special):
    value = torch.randn(n, generator=torch.Generator().manual_seed(seed)).abs().to(dtype)
    for at, number in special:
        value[at % n] = number
    assert_same(value)


def test_the_largest_numbers_do_not_make_others_non_finite():
    assert_same(torch.tensor([1e300, 2.0, float("nan")], dtype=torch.float64))


@pytest.mark.parametrize(
    "change",
    [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[1:, 3:], lambda x: x.expand(3, 40, 50)],
)
def test_views_are_measured_as_they_are(change):
    assert_same(change(torch.randn(40, 50)))


def test_slots_that_were_given_are_not_written_to():
    moments = by_c()
    slots = moments.update(moments.start(torch.ones(3)), torch.ones(3))
    before = slots.clone()
    moments.update(slots, torch.ones(5))
    assert torch.equal(slots, before)


def test_many_tensors_are_measured_together_as_each_alone():
    tensors = [torch.randn(n) for n in (1, 7, 8, 1024, 5000)]
    for tensor, slots in zip(tensors, by_c().measure_many(tensors), strict=True):
        assert slots.tolist() == slots_of(by_c(), tensor).tolist()


@pytest.mark.parametrize("other", [torch.ones(3).double(), torch.ones(4, 4).t()[:2], torch.ones(2)])
def test_tensors_of_another_kind_are_not_measured_together(other):
    moments = by_c() if other.dtype is not torch.float32 or other.dim() > 1 else PLAIN
    assert moments.measure_many([torch.ones(2), other]) is None


def test_little_is_measured_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "native_moments", None)
    moments = hl.stats.moments()
    assert (
        slots_of(moments, torch.ones(1000)).tolist() == slots_of(PLAIN, torch.ones(1000)).tolist()
    )


@pytest.mark.processes
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true", " ", "cc '", "false -v"])
def test_without_a_compiler_there_is_no_function(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert native_moments.__wrapped__() is None


@pytest.mark.processes
def test_a_compiler_may_be_given_with_arguments(monkeypatch):
    compiler = os.environ.get("CC") or "cc"
    monkeypatch.setenv("CC", f"env {compiler} -g0")
    assert native_moments.__wrapped__() is not None


@pytest.mark.processes
def test_a_function_that_is_wrong_is_not_used(monkeypatch, tmp_path):
    source = native._SOURCE.read_text().replace("square * square", "square")
    (tmp_path / "wrong.c").write_text(source)
    monkeypatch.setattr(native, "_SOURCE", tmp_path / "wrong.c")
    assert native_moments.__wrapped__() is None
