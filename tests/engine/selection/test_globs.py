"""Globs on module paths: what each pattern matches, and what it does not."""

from __future__ import annotations

import pytest

import hookline as hl
from hookline.engine.selection.globs import glob

PATHS = ["", "a", "a.b", "a.b.c", "b", "ab", "a.1", "a.12", "layer4.1.conv2", "block2.fc"]

MATCHES = {
    "*": ["", "a", "b", "ab"],  # a selector leaves the root out
    "**": PATHS,
    "a": ["a"],
    "a.*": ["a.b", "a.1", "a.12"],
    "a.**": ["a.b", "a.b.c", "a.1", "a.12"],  # below a, not a itself
    "a.**.c": ["a.b.c"],
    "a.**.b": ["a.b"],  # at any depth, none included
    "**.b": ["a.b", "b"],
    "**.c": ["a.b.c"],
    "a**": ["a", "a.b", "a.b.c", "ab", "a.1", "a.12"],
    "a.?": ["a.b", "a.1"],
    "a.[0-9]": ["a.1"],
    "a.[!0-9]": ["a.b"],
    "a.[0-9]*": ["a.1", "a.12"],
    "{a,b}": ["a", "b"],
    "{a,layer4}.**": ["a.b", "a.b.c", "a.1", "a.12", "layer4.1.conv2"],
    "layer?.*.conv[12]": ["layer4.1.conv2"],
    "": [""],
}


@pytest.mark.parametrize("pattern", MATCHES)
def test_a_glob_matches_these_paths_and_no_others(pattern):
    regex = glob(pattern)
    assert [path for path in PATHS if regex.fullmatch(path)] == MATCHES[pattern]


@pytest.mark.parametrize("pattern", ["{a", "a}", "{a,{b}}"])
def test_braces_that_are_not_closed_or_nest_are_refused(pattern):
    with pytest.raises(hl.SelectionError, match="malformed glob"):
        glob(pattern)


def test_a_range_that_runs_downwards_is_refused():
    with pytest.raises(hl.SelectionError):
        glob("a.[9-0]")
