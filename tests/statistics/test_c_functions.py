"""The functions in C give what NumPy and torch give, which go on without them."""

from __future__ import annotations

import math
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hookline as hl
from hookline.statistics import c_functions, difference
from hookline.statistics.c_functions import compile_difference, compile_moments

PLAIN = hl.stats.moments(compile=False)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    if shutil.which("cc") is None:
        pytest.skip("has no C compiler")
    assert compile_moments() is not None
    assert compile_difference() is not None


def by_c():
    """A statistic that has measured enough for the function in C."""
    moments = hl.stats.moments()
    moments._meter.until_native = 0
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
    monkeypatch.setattr(c_functions, "compile_moments", None)
    moments = hl.stats.moments()
    assert (
        slots_of(moments, torch.ones(1000)).tolist() == slots_of(PLAIN, torch.ones(1000)).tolist()
    )


WIDTHS = st.sampled_from([(), (1,), (7,), (9, 1), (5, 3), (4, 129), (3, 2, 300), (2, 0), (1, 4099)])


def by_torch_and_c(monkeypatch, a, b):
    """The difference of two tensors by torch, and by the functions in C."""
    gaps = []
    for until in (math.inf, 0):
        monkeypatch.setattr(difference._METER, "until_native", until)
        gaps.append(difference.difference(a, b))
    return gaps


def assert_same_difference(monkeypatch, a, b):
    by_torch, by_c = by_torch_and_c(monkeypatch, a, b)
    assert (by_c.n_unequal, by_c.numel, by_c.problem) == (
        by_torch.n_unequal, by_torch.numel, by_torch.problem
    )  # fmt: skip
    for name in ("relative", "norm_ratio", "worst_row", "worst_element"):
        expected = getattr(by_torch, name)
        assert getattr(by_c, name) == pytest.approx(expected, rel=1e-11, nan_ok=True)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=WIDTHS,
    seed=st.integers(0, 99),
    dtypes=st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS)),
    special=st.lists(
        st.tuples(st.integers(0, 4098), st.sampled_from([*SPECIAL, -3.4028234663852886e38])),
        max_size=4,
    ),
)
def test_c_gives_the_difference_of_torch(monkeypatch, shape, seed, dtypes, special):
    generator = torch.Generator().manual_seed(seed)
    b = torch.randn(shape, generator=generator)
    a = b + 0.01 * torch.randn(shape, generator=generator)
    a, b = (x.clone().to(dtype) for x, dtype in zip((a, b), dtypes, strict=True))
    for at, number in special:
        if b.numel():
            b.view(-1)[at % b.numel()] = number
            a.view(-1)[(at // 2) % a.numel()] = number
    assert_same_difference(monkeypatch, a, b)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[1:, 3:],
        lambda x: x.expand(3, 40, 50),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.complex(x, x),
        lambda x: x.int(),
        lambda x: x * 1e300,
        lambda x: x * 1e-300,
        lambda x: x * 0,
    ],
)
def test_the_difference_of_other_layouts_and_sizes_is_the_same(monkeypatch, change):
    b = torch.randn(40, 50, dtype=torch.float64)
    a = b + 0.01
    assert_same_difference(monkeypatch, change(a), change(b))
    assert_same_difference(monkeypatch, change(a) + 1, change(b))


def test_worst_row_and_element_are_found_in_any_block(monkeypatch):
    b = torch.ones(700, 1000)
    a = b.clone()
    a[650] += 0.5
    a[3, 999] = 5.0
    for gap in by_torch_and_c(monkeypatch, a, b):
        assert (gap.row, gap.worst_row) == (650, pytest.approx(0.5))
        assert (gap.element, gap.worst_element) == ((3, 999), 4.0)


@pytest.mark.parametrize("exponent", range(31))
def test_c_reads_each_number_of_16_bits(monkeypatch, exponent):
    bits = torch.arange(exponent << 10, (exponent + 1) << 10, dtype=torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        b = bits.view(dtype)
        assert_same_difference(monkeypatch, -b.flip(0), b)


@pytest.mark.slow
def test_one_element_of_each_width_is_read_in_each_lane(monkeypatch):
    for width in range(1, 20):
        b = torch.ones(3, width)
        for number in range(b.numel()):
            a = b.clone()
            a.view(-1)[number] = 3.0
            _, by_c = by_torch_and_c(monkeypatch, a, b)
            assert by_c.element == divmod(number, width)
            assert (by_c.worst_element, by_c.n_unequal) == (2.0, 1)


def test_values_are_measured_where_they_lie(monkeypatch):
    seen = []
    rows = c_functions.RowPair
    monkeypatch.setattr(difference, "RowPair", lambda a, b: seen.append((a, b)) or rows(a, b))
    a, b = torch.randn(2, 600, 1000).bfloat16()
    by_torch_and_c(monkeypatch, a, b)
    pointers = [tensor.data_ptr() for pair in seen for tensor in pair]
    assert pointers == 2 * [a.data_ptr(), b.data_ptr()]


@pytest.mark.processes
@pytest.mark.parametrize("option", ["-mno-avx512f", "-mno-avx"])
def test_each_length_of_vectors_gives_the_same_bits(monkeypatch, option):
    monkeypatch.setenv("CC", f"{os.environ.get('CC') or 'cc'} {option}")
    other = compile_difference.__wrapped__()
    if other is None:
        pytest.skip(f"has no option {option}")
    for dtype in FLOATS:
        a, b = torch.randn(2, 30, 331).to(dtype)
        rows = c_functions.RowPair(a, b)
        assert other.reference_norms(rows) == compile_difference().reference_norms(rows)
        assert other.gaps(rows, 1.0, 1.0) == compile_difference().gaps(rows, 1.0, 1.0)


@pytest.mark.processes
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false", "true", " ", "cc '", "false -v"])
def test_without_a_compiler_there_is_no_function(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert compile_moments.__wrapped__() is None
    assert compile_difference.__wrapped__() is None


@pytest.mark.processes
def test_a_compiler_may_be_given_with_arguments(monkeypatch):
    compiler = os.environ.get("CC") or "cc"
    monkeypatch.setenv("CC", f"env {compiler} -g0")
    assert compile_moments.__wrapped__() is not None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "right", "wrong", "make"),
    [
        ("moments.c", "square * square", "square", compile_moments),
        ("difference.c", "ratio > to->worst_element", "ratio < 0", compile_difference),
        ("difference.c", "x[part] != y[part]", "x[part] == y[part]", compile_difference),
    ],
)
def test_a_function_that_is_wrong_is_not_used(monkeypatch, tmp_path, name, right, wrong, make):
    source = (c_functions._SOURCES / name).read_text()
    assert right in source
    (tmp_path / name).write_text(source.replace(right, wrong))
    monkeypatch.setattr(c_functions, "_SOURCES", tmp_path)
    assert make.__wrapped__() is None
