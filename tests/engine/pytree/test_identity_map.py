"""Things found again by what they are."""

from __future__ import annotations

import pytest
import torch

from hookline.engine.pytree.identity_map import IdentityMap


def shared_in(tensors, lists):
    """How often each thing came, of things of which some are equal and some the same."""
    counts = IdentityMap()
    for thing in (*tensors, *lists):
        counts[thing] = (counts.get(thing) or 0) + 1
    return counts, [counts.get(thing) for thing in counts.key_list()]


def test_equal_things_are_told_apart_and_the_same_one_is_found():
    a, b = torch.ones(2), torch.ones(2)
    first, second = [1], [1]
    counts, found = shared_in((a, b, a), (first, second, second))
    assert found == [2, 1, 1, 2]
    expected = a, b, first, second
    assert all(one is other for one, other in zip(counts.key_list(), expected, strict=True))
    assert (a in counts, torch.ones(2) in counts, [1] in counts) == (True, False, False)
    assert counts.get([1]) is None


def test_what_was_kept_is_held_so_no_other_thing_gets_its_id():
    seen = IdentityMap()
    for k in range(100):
        thing = [k]
        assert thing not in seen
        seen[thing] = k
    assert [seen.get(thing) for thing in seen.key_list()] == list(range(100))


@pytest.mark.parametrize("n_same", [1, 3])
@pytest.mark.compiles
def test_code_that_is_compiled_finds_the_same_tensors(n_same):
    def by_number(x):
        made = [x + 1, x + 1]
        counts, found = shared_in((made[0], *made[1:] * n_same), ())
        return x + found[0] + 10 * found[1] + 100 * (x in counts)

    x = torch.zeros(2)
    compiled = torch.compile(by_number, backend="eager", fullgraph=True)
    assert compiled(x).tolist() == by_number(x).tolist() == [1 + 10.0 * n_same] * 2
