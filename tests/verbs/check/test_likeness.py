"""A repeated run counts only as far as its outputs are those of the first run."""

from __future__ import annotations

import math

import pytest
import torch

from hookline.verbs.check.finiteness import total
from hookline.verbs.check.likeness import Likeness

PATHS = ["", "a", "b"]


def likeness_of(*sums, measure=total):
    return Likeness([(number, torch.tensor(value), measure) for number, value in sums], PATHS)


def compared(likeness, *outputs):
    for count, (path, value) in enumerate(outputs):
        likeness.compare(path, torch.tensor([value]), count)
    likeness.end(set(PATHS))
    return likeness.difference


def test_equal_runs_are_alike():
    assert compared(likeness_of((1, 2.0), (0, 3.0)), ("a", 2.0), ("", 3.0)) is None
    nan = likeness_of((1, math.nan), (0, math.inf))
    assert compared(nan, ("a", math.nan), ("", math.inf)) is None


@pytest.mark.parametrize("again", [2.1, math.nan, math.inf, -2.0])
def test_the_first_output_that_differs_is_named(again):
    assert compared(likeness_of((1, 2.0), (2, 2.0)), ("a", 2.0), ("b", again)) == "b"
    assert compared(likeness_of((1, math.nan)), ("a", 2.0)) == "a"


def test_rounding_is_no_difference():
    assert compared(likeness_of((1, 2.0)), ("a", 2.000001)) is None


def test_calls_that_one_run_alone_makes_are_a_difference():
    assert compared(likeness_of((1, 2.0), (1, 2.0)), ("a", 2.0)) == "a#1"
    assert compared(likeness_of((1, 2.0)), ("a", 2.0), ("a", 2.0)) == "a#1"
    assert compared(likeness_of((1, 2.0)), ("b", 5.0), ("a", 2.0)) is None


def test_of_compiled_code_only_nan_is_compared():
    assert compared(likeness_of((1, 2.0), measure=None), ("a", 3.0)) is None
    assert compared(likeness_of((1, 2.0), measure=None), ("a", math.nan)) == "a"


def test_an_operation_counts_up_to_the_last_value_in_common():
    likeness = likeness_of((1, math.nan), (2, 1.0))
    compared(likeness, ("a", math.nan), ("b", 2.0))
    assert likeness.difference == "b"
    assert likeness.proves(0)
    assert not likeness.proves(1)
