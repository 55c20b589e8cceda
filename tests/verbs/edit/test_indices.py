"""The numbers of at= and steps=."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hookline as hl
from hookline.verbs.edit.indices import parse_indices

ENDS = st.none() | st.integers(-9, 9)
FORMS = st.one_of(
    st.integers(-9, 9),
    st.lists(st.integers(-9, 9), min_size=1, max_size=3),
    st.builds(slice, ENDS, ENDS, st.none() | st.integers(1, 3)),
)


@given(FORMS, st.integers(0, 8))
def test_positions_are_chosen_as_python_indexes_a_list(given_form, length):
    whole = list(range(length))
    if isinstance(given_form, slice):
        expected = whole[given_form]
    else:
        numbers = [given_form] if isinstance(given_form, int) else given_form
        expected = sorted({whole[n] for n in numbers if -length <= n < length})
    positions = torch.arange(length)[None]
    chosen = parse_indices("at", given_form, allows_negative=True).match_tokens(
        positions, torch.full_like(positions, length)
    )
    assert positions[chosen].tolist() == expected


def test_what_has_not_occurred_is_written():
    at = parse_indices("at", [1, 7, -9], allows_negative=True)
    positions = torch.arange(3)[None]
    at.match_tokens(positions, torch.full_like(positions, 3))
    assert at.unmet_text() == "at=7, -9"
    at.match_tokens(torch.tensor([[7]]), torch.tensor([[9]]))
    assert at.unmet_text() == "at=-9"
    steps = parse_indices("steps", slice(2, None), allows_negative=False)
    assert [steps.match_step(step) for step in (0, 1)] == [False, False]
    assert steps.unmet_text() == "steps=slice(2, None)"
    assert steps.match_step(2)
    assert not steps.unmet_text()


@pytest.mark.parametrize(
    "given_form",
    [
        *["1", 1.5, True, [True], [None], {"x": 1}, [[1]]],
        *[torch.tensor([True, False]), [torch.tensor(True)], np.array([True]), np.ones(2)],
    ],
)
def test_other_forms_are_refused(given_form):
    with pytest.raises(hl.AttachError, match=r"^at must be an integer, a slice or a list"):
        parse_indices("at", given_form, allows_negative=True)


def test_numbers_that_cannot_be_are_refused():
    with pytest.raises(hl.AttachError, match=r"steps must not be negative.*got -1\.\nCount"):
        parse_indices("steps", -1, allows_negative=False)
    with pytest.raises(hl.AttachError, match=r"steps must not be negative"):
        parse_indices("steps", slice(None, -1), allows_negative=False)
    with pytest.raises(hl.AttachError, match=r"at must be a slice with a positive step"):
        parse_indices("at", slice(None, None, -1), allows_negative=True)
    with pytest.raises(hl.AttachError, match=r"at must name at least one number, got \[\]"):
        parse_indices("at", [], allows_negative=True)


def test_tensors_and_ranges_are_lists():
    assert parse_indices("at", torch.tensor([2, 3]), allows_negative=True).numbers == (2, 3)
    assert parse_indices("at", torch.tensor(2), allows_negative=True).numbers == (2,)
    assert parse_indices("at", np.int64(2), allows_negative=True).numbers == (2,)
    assert parse_indices("at", [np.int64(2), torch.tensor(3)], allows_negative=True).numbers == (
        2,
        3,
    )
    assert parse_indices("steps", range(3), allows_negative=False).numbers == (0, 1, 2)
