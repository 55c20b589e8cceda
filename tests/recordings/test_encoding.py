"""Values as JSON: exact, each key kept, and nothing that takes for ever."""

from __future__ import annotations

import copy
import enum
import json
import math
import pickle
from collections import OrderedDict, UserDict, UserList, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hookline.recordings.encoding import MOST_FIELDS, Fields, decode, encode


def there_and_back(value):
    """The value, and what was said to be lost."""
    lost, tensors = [], []

    def put(tensor):
        tensors.append(tensor)
        return str(len(tensors) - 1)

    data = json.loads(json.dumps(encode(value, put, lost.append)))
    return decode(data, lambda name: tensors[int(name)]), lost


@given(st.floats())
def test_every_float_comes_back_to_the_last_bit(number):
    back, lost = there_and_back({"x": number})
    assert math.isnan(back["x"]) if math.isnan(number) else back["x"].hex() == number.hex()
    assert lost == []


class Mode(enum.StrEnum):
    SUM = "sum"


class Level(enum.IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    ("value", "plain"), [(Mode.SUM, "sum"), (Level.HIGH, 3), (np.float64(0.1), 0.1)]
)
def test_a_class_of_a_plain_value_is_said_to_be_lost(value, plain):
    back, lost = there_and_back([value])
    assert back == [plain]
    assert type(back[0]) is type(plain)
    assert lost == [
        f"the class {type(value).__module__}.{type(value).__qualname__}, which became"
        f" {type(plain).__name__}"
    ]


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
KEYS = st.recursive(PLAIN, lambda keys: st.lists(keys, max_size=3).map(tuple), max_leaves=4)


@pytest.mark.slow
@given(st.dictionaries(KEYS, st.integers()))
def test_every_key_of_plain_parts_comes_back_as_it_was(value):
    back, lost = there_and_back(value)
    assert back == value
    assert [*map(repr, back)] == [*map(repr, value)]
    assert lost == []


@given(st.dictionaries(KEYS, st.integers(), min_size=1))
def test_a_dict_and_the_texts_of_its_keys_are_all_kept(value):
    both = {**{repr(key): -1 for key in value}, **value}
    assert there_and_back(both)[0] == both


class Odd:
    """A key that can only be written as text, and reads as another does."""

    def __repr__(self):
        return "(0, 1)"


def test_keys_that_become_text_stay_apart_and_are_named():
    value = {(0, 1): "a", "(0, 1)": "b", Odd(): "c", Odd(): "d", "(0, 1)'": "e"}
    back, lost = there_and_back(value)
    assert list(back.values()) == list("abcde")
    assert list(back)[:2] == [(0, 1), "(0, 1)"]
    assert len(lost) == 2
    assert all(
        f"which became the text {key!r}" in line
        for key, line in zip([*back][2:4], lost, strict=True)
    )


def test_a_named_tuple_of_very_many_fields_comes_back_as_fields():
    names = [f"f{k}" for k in range(MOST_FIELDS + 1)]
    most = namedtuple("Most", names[:-1])(*range(MOST_FIELDS))
    back, lost = there_and_back(most)
    assert back == most
    assert type(back).__name__ == "Most"
    assert lost == []
    back, lost = there_and_back(namedtuple("Wide", names)(*range(MOST_FIELDS + 1)))
    assert isinstance(back, Fields)
    assert back.f1000 == 1000
    assert lost == [f"the named tuple {__name__}.Wide of 1001 fields, which became Fields"]


@given(st.frozensets(KEYS))
def test_sets_of_plain_members_come_back_as_they_were(value):
    for one in (value, set(value), {"in": (value, frozenset({value}))}):
        back, lost = there_and_back(one)
        assert back == one
        assert type(back) is type(one)
        assert lost == []


def test_tensors_in_sets_and_in_lists_of_users_come_back():
    value = {
        "set": {torch.zeros(2), torch.ones(3)}, "frozen": frozenset({(torch.ones(1), 2)}),
        "users": UserList([torch.ones(2), UserList()]),
    }  # fmt: skip
    back, lost = there_and_back(value)
    assert sorted(tensor.tolist() for tensor in back["set"]) == [[0.0, 0.0], [1.0, 1.0, 1.0]]
    assert [(tensor.tolist(), n) for tensor, n in back["frozen"]] == [([1.0], 2)]
    assert [*map(type, back.values())] == [set, frozenset, UserList]
    assert back["users"][0].tolist() == [1.0, 1.0]
    assert back["users"][1] == []
    assert lost == []


def test_a_set_with_a_member_that_cannot_come_back_is_named():
    back, lost = there_and_back([{Odd()}, frozenset({namedtuple("Pair", "x")(1)})])
    why = "(a member would come back as what a set cannot hold: use a tuple)"
    assert lost == [f"builtins.set {why}", f"builtins.frozenset {why}"]
    assert repr(back[0]) == f"<not saved: builtins.set {why}>"


@pytest.mark.parametrize(
    ("base", "members", "kind"),
    [
        (UserList, [1.5], "userlist"),
        (list, [1.5], "list"),
        (tuple, [1.5], "tuple"),
        (set, [1.5], "set"),
        (frozenset, [1.5], "frozenset"),
        (dict, {"a": 1.5}, "dict"),
        (UserDict, {"a": 1.5}, "dict"),
    ],
)
def test_a_class_that_comes_back_as_a_plain_one_is_named(base, members, kind):
    mine = type("Mine", (base,), {"__module__": __name__})
    back, lost = there_and_back([mine(members)])
    assert back[0] == mine(members)
    assert lost == [f"the class {__name__}.Mine, which became a {kind}"]
    assert there_and_back(OrderedDict(a=1)) == ({"a": 1}, [])


@pytest.mark.parametrize(
    "data",
    [
        {"namedtuple": [[f"f{k}", 0] for k in range(100_000)], "type": "Wide"},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[{"list": []}, 1]]},
        {"dict": [[{"tensor": "0"}, 1]]},
        {"fields": [["a", 1], ["a", 2]]},
        {"set": [[0, 1], [1, 1]]},
        {"set": [[0, {"list": []}]]},
        {"frozenset": [[0, {"dict": []}]]},
        {"tuple": 3},
        {"other": []},
        {},
        [],
    ],
    ids=lambda data: str(data)[:20],
)
def test_what_encode_does_not_write_is_refused(data):
    with pytest.raises((ValueError, TypeError)):
        decode(data, lambda _: torch.zeros(1))


def test_one_class_is_made_for_a_named_tuple_read_many_times():
    pair = namedtuple("Pair", ["x", "y"])
    back, _ = there_and_back([pair(1, 2), pair(3, 4)])
    assert type(back[0]) is type(back[1])
    assert type(there_and_back(pair(5, 6))[0]) is type(back[0])


def test_a_named_tuple_that_came_back_can_be_pickled_and_copied():
    back, _ = there_and_back(namedtuple("Pair", ["x", "y"])(1, [2]))
    for again in (pickle.loads(pickle.dumps(back)), copy.deepcopy(back)):
        assert (type(again), again) == (type(back), back)
        assert again.y is not back.y


def test_two_layouts_of_one_tensor_are_told_apart():
    tensor, parts = torch.ones(2, 3), {}
    layout = {"shape": [4, 3], "mesh": [2], "names": [], "first": 0, "at": [0]}
    first = {**layout, "placements": [["shard", 0]]}
    second = {**layout, "shape": [2, 3], "placements": [["partial", "sum"]]}
    data = {"list": [[k, {"tensor": "0", "shard": first if k else second}] for k in range(2)]}
    values = decode(data, lambda name: tensor, parts)
    kinds = [parts[id(value)][0].placements[0][0] for value in values]
    assert kinds == ["partial", "shard"]
    older = {}
    assert decode({"tensor": "0", "shard": True}, lambda name: tensor, older) is tensor
    assert older == {}
