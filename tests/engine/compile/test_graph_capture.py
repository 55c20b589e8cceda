"""What compiled code is given: a user's function, called with its own defaults."""

from __future__ import annotations

import functools

import pytest

from hookline.engine.compile.graph_capture import bind_own_defaults


def keyword_only(value, *, k=2):
    return value * k


def positional_only(value, k=2, /, extra=1):
    return value * k + extra


def several(module, args, output=None, k=2, extra=1):
    return output * k + extra


@pytest.mark.parametrize(
    ("function", "given", "named"),
    [
        (lambda value, k=2: value * k, (3,), {"k": 2}),
        (lambda value=1, k=2: value * k, (3,), {"k": 2}),
        (positional_only, (3,), {"extra": 1}),
        (several, (None, (), 3), {"k": 2, "extra": 1}),
    ],
)
def test_defaults_that_nobody_fills_are_given_by_name(function, given, named):
    bound = bind_own_defaults(function, len(given))
    assert bound.keywords == named
    assert bound(*given) == function(*given)


@pytest.mark.parametrize(
    "function", [keyword_only, abs, functools.partial(several, k=3), lambda value: value]
)
def test_a_function_without_such_defaults_is_left_alone(function):
    assert bind_own_defaults(function, 1) is function
    assert bind_own_defaults(several, 5) is several
