"""Which ranks hold copies: those of a tensor-parallel group whose slots have been equal so far."""

from __future__ import annotations

import numpy as np
import pytest

from hookline.curves import ABSENT, Entry, Layout
from hookline.verbs.monitor.rank_copies import RankCopies

LAYOUT = Layout((), (Entry("fc", 0, 2), Entry("fc", 1, 1), Entry("out", 0, 2)))


def slots(*rows):
    return np.array(rows, np.float64)


def test_the_first_of_equal_ranks_of_a_group_counts():
    copies = RankCopies([[0, 1], [0, 1], [2, 3], [2, 3]])
    row, other = [1, 2, 3, 4, 5], [1, 2, 3.5, 4, 5]
    assert copies.record_differences(LAYOUT, slots(row, other, row, row))
    assert copies.counting_ranks(("fc",), range(4)) == [0, 1, 2]
    assert copies.counting_ranks(("out",), range(4)) == [0, 2]
    assert copies.counting_ranks(("out",), [1, 3]) == [1, 3]


def test_ranks_that_once_differed_are_no_copies_any_more():
    copies = RankCopies([[0, 1]] * 2)
    zeros, row = [0.0] * 5, [1, 2, 3, 4, 5]
    assert not copies.record_differences(LAYOUT, slots(zeros, zeros))
    assert copies.counting_ranks(("fc",), range(2)) == [0]
    assert copies.record_differences(LAYOUT, slots(row, zeros))
    assert not copies.record_differences(LAYOUT, slots(zeros, zeros))
    assert copies.counting_ranks(("fc",), range(2)) == [0, 1]


def test_a_gradient_has_the_parts_of_its_value():
    copies = RankCopies([[0, 1]] * 2)
    copies.record_differences(LAYOUT, slots([1, 2, 3, 0, 0], [4, 5, 6, 0, 0]))
    assert copies.counting_ranks(("out", "fc"), range(2)) == [0, 1]
    assert copies.counting_ranks(("out",), range(2)) == [0]


def test_half_of_a_group_may_hold_copies_of_the_other():
    copies = RankCopies([[0, 1, 2, 3]] * 4)
    one, two = [1, 2, 3, ABSENT, ABSENT], [2, 2, 3, ABSENT, ABSENT]
    copies.record_differences(LAYOUT, slots(one, one, two, two))
    assert copies.counting_ranks(("fc",), range(4)) == [0, 2]
    assert copies.counting_ranks(("out",), range(4)) == [0]


@pytest.mark.parametrize("groups", [[], [[]] * 3, [[0], [1], [2]]])
def test_without_a_group_of_several_all_ranks_count(groups):
    copies = RankCopies(groups)
    assert not copies.record_differences(LAYOUT, slots(*[[1, 2, 3, 4, 5]] * 3))
    assert copies.counting_ranks(("fc",), range(3)) == [0, 1, 2]


def test_groups_that_share_a_rank_are_one():
    copies = RankCopies([[0, 1], [0, 1, 2], [1, 2], [3]])
    copies.record_differences(LAYOUT, slots(*[[1, 2, 3, 4, 5]] * 4))
    assert copies.counting_ranks(("fc",), range(4)) == [0, 3]
