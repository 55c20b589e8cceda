"""Tensors inside nested values."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from hookline.engine import tree
from hookline.engine.errors import SiteError

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    value: object
    other: object = None


leaves = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.text(max_size=3),
    st.integers(0, 3).map(lambda n: torch.arange(float(n))),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(lambda pair: Frozen(*pair)),
    ),
    max_leaves=8,
)


@given(values)
def test_mapping_the_identity_keeps_every_structure_and_every_tensor(value):
    same = tree.map_tensors(lambda t: t, value)
    assert tree.difference(value, same) is None
    before, after = list(tree.tensors(value)), list(tree.tensors(same))
    assert [leaf for leaf, _ in before] == [leaf for leaf, _ in after]
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True))


@given(values)
def test_every_tensor_is_found_again_by_its_leaf(value):
    for leaf, tensor in tree.tensors(value):
        assert tree.get(value, leaf, "here") is tensor


@given(values)
def test_putting_a_leaf_changes_that_leaf_and_nothing_else(value):
    for leaf, _ in tree.tensors(value):
        new = torch.full((2,), 7.0)
        changed = tree.put(value, leaf, new)
        assert tree.get(changed, leaf, "here") is new
        others = [(k, t) for k, t in tree.tensors(changed) if k != leaf]
        before = [(k, t) for k, t in tree.tensors(value) if k != leaf]
        assert all(a[1] is b[1] for a, b in zip(others, before, strict=True))
        assert tree.get(value, leaf, "here") is not new


def test_a_snapshot_of_a_growing_object_does_not_grow():
    class Cache:
        def __init__(self):
            self.layers = [torch.zeros(1)]

    cache = Cache()
    kept = tree.map_tensors(torch.Tensor.detach, cache)
    cache.layers.append(torch.ones(1))
    assert len(kept.layers) == 1
    assert type(kept) is Cache


def test_a_snapshot_keeps_the_tensors_that_an_object_held_even_if_none_of_them_changed():
    class Layer:
        def __init__(self):
            self.keys = torch.zeros(1)

    class Cache:
        def __init__(self):
            self.layer = Layer()

    cache = Cache()
    kept = tree.map_tensors(lambda t: t, cache)
    cache.layer.keys = torch.zeros(5)
    assert kept.layer.keys.shape == (1,)


def test_an_object_that_holds_itself_is_walked_once():
    loop = [torch.zeros(1)]
    loop.append(loop)
    assert len(list(tree.tensors(loop))) == 1
    assert len(tree.map_tensors(torch.Tensor.detach, loop)) == 2


def test_library_outputs_keep_their_type_and_attributes():
    out = BaseModelOutput(last_hidden_state=torch.ones(1, 2), hidden_states=(torch.zeros(1),))
    new = tree.put(out, ("last_hidden_state",), torch.zeros(1, 2))
    assert type(new) is BaseModelOutput
    assert new.last_hidden_state.sum() == 0
    assert new["last_hidden_state"].sum() == 0
    assert out.last_hidden_state.sum() == 2
    assert tree.get(out, (0,), "here") is out.last_hidden_state


def test_dictionaries_keep_their_type():
    for value in (OrderedDict(a=torch.zeros(1)), defaultdict(list, a=torch.zeros(1))):
        new = tree.map_tensors(lambda t: t + 1, value)
        assert type(new) is type(value)
        assert new["a"].item() == 1


def test_torchs_own_named_tuples_are_rebuilt():
    result = torch.max(torch.eye(2), dim=0)
    new = (
        tree.put(result, ("indices",), torch.tensor([5, 5]))
        if hasattr(result, "_fields")
        else (tree.put(result, (1,), torch.tensor([5, 5])))
    )
    assert type(new) is type(result)
    assert new.indices.tolist() == [5, 5]


def test_a_leaf_that_is_not_there_shows_what_is():
    with pytest.raises(SiteError) as caught:
        tree.get((torch.zeros(2), {"k": 1}), (1, "missing"), "block:output[1].missing")
    text = str(caught.value)
    assert "block:output[1].missing has no leaf [1].missing" in text
    assert "'k'" in text
    assert len(text.splitlines()) <= 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (torch.zeros(2), torch.zeros(3), "expected Tensor[2] float32 on cpu, got Tensor[3]"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2), 3.0, "got 3.0"),
        ((torch.zeros(2), None), torch.zeros(2), "expected tuple(Tensor[2], None)"),
        ((torch.zeros(2), None), [torch.zeros(2), None], "got list"),
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, "expected the key 'a'"),
        ((torch.zeros(2),), (torch.zeros(2), 1), "expected tuple(Tensor[2])"),
        ((None, 1), (torch.zeros(1), 1), "expected None at [0]"),
    ],
)
def test_differences_in_structure_are_named(old, new, said):
    assert said in tree.difference(old, new)


def test_equal_structures_have_no_difference():
    value = (torch.zeros(2), {"a": [torch.ones(1), None, 3]})
    assert tree.difference(value, copy.deepcopy(value)) is None


def test_values_are_described_on_one_line():
    value = (torch.zeros(1, 4), None, {"a": torch.zeros(2)}, Point(1, 2.5))
    assert tree.describe(value) == "tuple(Tensor[1, 4], None, dict(a=Tensor[2]), Point(x=1, y=2.5))"
    assert tree.form(torch.zeros(2, 3)) == "[2, 3]"
