"""Weak: things are told by what they are, and are not kept alive."""

from __future__ import annotations

import gc

import pytest

from hookline.util.weak_map import WeakIdentityMap


class Thing:
    """Equal to all of its kind, and without a hash."""

    def __eq__(self, other):
        return isinstance(other, Thing)

    __hash__ = None


def test_equal_things_are_told_apart():
    a, b, known = Thing(), Thing(), WeakIdentityMap()
    known[a] = 1
    assert a in known
    assert b not in known
    assert known.get(b) is None
    known[b] = 2
    known[a] = 3
    assert [(thing is a, value) for thing, value in known.items()] == [(True, 3), (False, 2)]
    assert known.pop(a) == 3
    assert known.pop(a) is None
    assert len(known) == 1


def test_a_value_is_made_where_there_is_none():
    a, known = Thing(), WeakIdentityMap()
    assert known.get_or_add(a, lambda: None) is None
    assert known.get_or_add(a, pytest.fail) is None
    assert a in known


@pytest.mark.parametrize("is_in_cycle", [False, True])
def test_what_is_gone_is_forgotten_and_its_id_is_anothers(is_in_cycle):
    known = WeakIdentityMap()
    for number in range(100):  # ids are given again
        thing = Thing()
        assert known.get(thing) is None
        known[thing] = number
        if is_in_cycle:
            thing.itself = thing
        del thing
        if is_in_cycle:
            gc.collect()
    assert len(known) == 0
    assert known.items() == []


def test_a_thing_that_was_taken_out_and_put_in_again_stays():
    thing, known = Thing(), WeakIdentityMap()
    known[thing] = 1
    known.pop(thing)
    known[thing] = 2
    gc.collect()
    assert known.get(thing) == 2
