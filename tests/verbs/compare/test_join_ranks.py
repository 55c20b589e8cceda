"""Values of several ranks are joined as `dims` says, or refused with a guess."""

from __future__ import annotations

import pytest
import torch

import hookline as hl
from hookline.verbs.compare.join_ranks import UnjoinedValue, check_dims_match

X = torch.zeros


MORE = "with the dimension that they split or how to reduce them"


def unjoined(*parts, problem=""):
    return UnjoinedValue("x", dict(enumerate(parts)), problem)


@pytest.mark.parametrize(
    ("shapes", "whole", "guess"),
    [
        (
            [(2, 3), (2, 3)],
            (4, 3),
            "each of 2 ranks has its own [2, 3], of [4, 3]: give dims={'x': 0}",
        ),
        ([(4, 2), (4, 1)], (4, 3), "its own [4, 2] and [4, 1], of [4, 3]: give dims={'x': 1}"),
        ([(4, 3), (4, 3)], (4, 3), f"its own [4, 3], of [4, 3]: give dims={{'x': …}}, {MORE}"),
        (
            [(4,), (4, 3)],
            (4, 3),
            f"its own [4] and [4, 3], of [4, 3]: give dims={{'x': …}}, {MORE}",
        ),
    ],
)
def test_the_shapes_of_the_parts_give_the_guess(shapes, whole, guess):
    assert unjoined(*map(X, shapes)).why(X(whole)).endswith(guess)


def test_structures_and_errors_are_said():
    parts = [(X(2), X(3)), (X(2), X(3))]
    why = unjoined(*parts).why(parts[0])
    assert why == f"each of 2 ranks has its own: give dims={{'x': …}}, {MORE}"
    assert unjoined(*parts, problem="no such dim").why(None).endswith("has its own: no such dim")


@pytest.mark.parametrize(
    ("dims", "why"),
    [
        (1.5, "dims must be a dimension, a reduction or a dict of these, got 1.5"),
        ({"x": [0]}, "dims must be a dimension"),
        (True, "dims must be a dimension"),
        ({0: 0}, "the keys of dims must be globs of sites, got 0."),
        ("rows", "dims must be one of 'mean', 'sum', 'max', 'min', got 'rows'"),
    ],
)
def test_dims_of_another_form_are_refused(dims, why):
    with pytest.raises(hl.InputError) as caught:
        hl.compare({"x": X(1)}, {"x": X(1)}, dims=dims)
    assert str(caught.value).startswith(why)


def test_dims_that_mean_nothing_are_refused():
    sites = [("block.q", "output"), ("block.q", "input")]
    check_dims_match(None, [])
    check_dims_match({"**.q": -1, "block.q:input": 0}, sites)
    check_dims_match(0, sites)
    check_dims_match({"(root)": 0, "(root):input": 0}, [("", "output"), ("", "input")])
    with pytest.raises(hl.InputError, match=r"got 'q:output', which matches none(.|\n)*'block.q'"):
        check_dims_match({"q:output": 0}, sites)
    with pytest.raises(hl.InputError, match="must be left out where a and b are of one process"):
        hl.compare({"x": X(1)}, {"x": X(1)}, dims={"x": 0})
