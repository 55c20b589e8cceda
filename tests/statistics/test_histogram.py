"""Histograms and quantiles: exact counts between fixed edges, and quantiles within their bound."""

from __future__ import annotations

import io
import itertools
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hookline as hl
from thoroughness import examples

NUMBERS = st.lists(st.floats(width=32), min_size=1, max_size=40)


def result_of(statistic, *values):
    slots = statistic.start(values[0])
    for value in values:
        slots = statistic.update(slots, value)
    return statistic.result(slots)


@settings(max_examples=examples(100), deadline=None)
@given(NUMBERS, st.sampled_from([1, 2, 16]))
def test_a_histogram_counts_between_its_edges(numbers, per_octave):
    found = result_of(
        hl.stats.histogram(low=1e-3, high=1e3, per_octave=per_octave), torch.tensor(numbers)
    )
    finite = [x for x in numbers if math.isfinite(x)]
    for count, (low, high) in zip(found.counts, itertools.pairwise(found.edges), strict=True):
        inside = [x for x in finite if (low <= x < high if high > 0 else low < x <= high)]
        assert count == len([x for x in inside if x])
    assert found.zeros == finite.count(0)
    assert found.non_finite == len(numbers) - len(finite)
    assert found.count == len(numbers)
    assert (found.min, found.max) == (min(finite, default=math.inf), max(finite, default=-math.inf))


def test_the_edges_are_powers_of_two_and_equal_steps_between():
    found = result_of(hl.stats.histogram(low=0.4, high=3, per_octave=2), torch.zeros(1))
    half = (0.25, 0.375, 0.5, 0.75, 1, 1.5, 2, 3, 4, math.inf)
    assert found.edges == (*(-edge for edge in reversed(half)), 0, *half)


@pytest.mark.parametrize("x", [0.25, 0.375, 0.374, 3.0, -0.5, -0.49, 1e-30, 1e30])
def test_a_number_has_one_bin_in_every_dtype(x):
    histogram = hl.stats.histogram(low=0.25, high=4, per_octave=2)
    single = torch.tensor([x], dtype=torch.float32)
    assert result_of(histogram, single.double()) == result_of(histogram, single)


def test_a_histogram_prints_its_range_and_its_bars():
    found = result_of(hl.stats.histogram(), torch.tensor([0.0, math.nan, *[1.0] * 7, 3.0]))
    assert str(found) == "10 elements, 1 zeros, 1 non-finite\n1 █▂ 4"
    assert str(result_of(hl.stats.histogram(), torch.zeros(2))) == (
        "2 elements, 2 zeros, 0 non-finite"
    )


def test_a_wide_histogram_still_fits_a_line():
    x = torch.logspace(-8, 8, 1000)
    _, bars = str(result_of(hl.stats.histogram(per_octave=16), x, -x)).splitlines()
    assert 60 < len(bars) < 90


QS = (0.0, 0.01, 0.3, 0.5, 0.9, 1.0)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(-1e9, -1e-9), st.just(0.0), st.floats(1e-9, 1e9)), min_size=1,
        max_size=60,
    ),
    st.sampled_from([0.2, 0.01, 0.001]),
)  # fmt: skip
def test_a_quantile_is_within_its_error(numbers, error):
    found = result_of(
        hl.stats.quantiles(QS, error=error), torch.tensor(numbers, dtype=torch.float64)
    )
    assert found.error <= error
    ordered = sorted(numbers)
    for q in QS:
        exact = ordered[math.floor(q * (len(numbers) - 1))]
        assert abs(found[q] - exact) <= found.error * abs(exact) * (1 + 1e-12)


def test_quantiles_of_a_large_tensor_are_within_their_error():
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).exp()
    found = result_of(hl.stats.quantiles(QS), *x.split(30_000))
    exact = x.sort().values
    for q in QS:
        expected = exact[math.floor(q * (len(x) - 1))].item()
        assert found[q] == pytest.approx(expected, rel=0.01)


def test_a_quantile_beyond_the_range_is_nan_an_extreme_exact():
    found = result_of(
        hl.stats.quantiles((0, 0.3, 0.5, 1), low=1, high=2), torch.tensor([-9.0, 0.1, 5, 6, 7])
    )
    assert found.values[:2] == (-9.0, 0.0)
    assert math.isnan(found[0.5])
    assert found[1] == 7


def test_without_finite_numbers_quantiles_are_nan():
    for value in (torch.empty(0), torch.tensor([math.nan, math.inf])):
        found = result_of(hl.stats.quantiles(), value)
        assert all(math.isnan(one) for one in found.values)
        assert found.count == found.non_finite == value.numel()


def test_quantiles_print_and_tell_which_they_are():
    found = result_of(hl.stats.quantiles((0, 0.5)), torch.tensor([1.0, 1.0, 4.0]))
    assert str(found) == "3 elements, 0 non-finite\nwithin 0.78 %: 0 % 1, 50 % 1.008"
    with pytest.raises(KeyError, match=r"one of 0.0, 0.5, got 0.9"):
        found[0.9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hl.stats.histogram(low=2, high=1), "low < high.*got 2 and 1"),
        (lambda: hl.stats.histogram(low=0), "2\\*\\*-126 <= low.*got 0"),
        (lambda: hl.stats.histogram(per_octave=3), "power of two.*got 3"),
        (lambda: hl.stats.quantiles((0.5, 2)), "from 0 to 1, got \\(0.5, 2\\)"),
        (lambda: hl.stats.quantiles(error=0), "at least 0.00025.*got 0"),
        (lambda: hl.stats.histogram(low="a"), "low < high.*got 'a'"),
        (lambda: hl.stats.quantiles(0.5), "from 0 to 1, got 0.5"),
        (lambda: hl.stats.quantiles(("a",)), "from 0 to 1, got \\('a',\\)"),
        (lambda: hl.stats.quantiles(error="a"), "at least 0.00025.*got 'a'"),
        (lambda: hl.stats.moments(compile="yes"), "None, True or False, got 'yes'"),
    ],
)
def test_an_argument_out_of_range_is_refused(make, message):
    with pytest.raises(hl.InputError, match=message):
        make()


def test_bars_are_of_ascii_where_stdout_lacks_the_others(monkeypatch):
    statistic = hl.stats.histogram()
    values = torch.tensor([1.0, 2.0, 2.0])
    result = statistic.result(statistic.update(statistic.start(values), values))
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="cp1252"))
        text = str(result)
    assert text.encode("cp1252").count(b"#") == 1
    assert str(result).count("█") == 1
