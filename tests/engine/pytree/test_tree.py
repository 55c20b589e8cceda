"""Tensors inside nested values."""

from __future__ import annotations

import copy
import logging
import types
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, GPT2Config
from transformers.modeling_outputs import BaseModelOutput

from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import HooklineWarning, SiteError

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    value: object
    other: object = None


leaf_values = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.text(max_size=3),
    st.integers(0, 3).map(lambda n: torch.arange(float(n))),
)
values = st.recursive(
    leaf_values,
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
def test_mapping_the_identity_keeps_structures_and_tensors(value):
    same = tree.map_tensors(lambda t: t, value)
    assert describe.difference(value, same) is None
    before, after = list(tree.tensors(value)), list(tree.tensors(same))
    assert [leaf for leaf, _ in before] == [leaf for leaf, _ in after]
    assert all(a is b for (_, a), (_, b) in zip(before, after, strict=True))


@given(values)
def test_every_tensor_is_found_again_by_its_leaf(value):
    for leaf, tensor in tree.tensors(value):
        assert leaves.get(value, leaf, "here") is tensor


@given(values)
def test_putting_a_leaf_changes_that_leaf_and_nothing_else(value):
    for leaf, _ in tree.tensors(value):
        new = torch.full((2,), 7.0)
        changed = leaves.put(value, leaf, new)
        assert leaves.get(changed, leaf, "here") is new
        others = [(k, t) for k, t in tree.tensors(changed) if k != leaf]
        before = [(k, t) for k, t in tree.tensors(value) if k != leaf]
        assert all(a[1] is b[1] for a, b in zip(others, before, strict=True))
        assert leaves.get(value, leaf, "here") is not new


def test_a_snapshot_of_a_growing_object_does_not_grow():
    class Cache:
        def __init__(self):
            self.layers = [torch.zeros(1)]

    cache = Cache()
    kept = tree.map_tensors(torch.Tensor.detach, cache)
    cache.layers.append(torch.ones(1))
    assert len(kept.layers) == 1
    assert type(kept) is Cache


def test_a_snapshot_keeps_tensors_of_an_unchanged_object():
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


@pytest.mark.parametrize("hold", [lambda t: [t], lambda t: {"a": (t, 1)}, BaseModelOutput, Frozen])
def test_an_error_of_the_change_itself_is_raised(hold):
    def refuse(tensor):
        raise ValueError("of the change")

    with warnings.catch_warnings(), pytest.raises(ValueError, match="of the change"):
        warnings.simplefilter("error")
        tree.map_tensors(refuse, hold(torch.zeros(1)))


def test_library_outputs_keep_their_type_and_attributes():
    out = BaseModelOutput(last_hidden_state=torch.ones(1, 2), hidden_states=(torch.zeros(1),))
    new = leaves.put(out, ("last_hidden_state",), torch.zeros(1, 2))
    assert type(new) is BaseModelOutput
    assert new.last_hidden_state.sum() == 0
    assert new["last_hidden_state"].sum() == 0
    assert out.last_hidden_state.sum() == 2
    assert leaves.get(out, (0,), "here") is out.last_hidden_state


def test_library_outputs_are_copied_without_their_checks(monkeypatch):
    out = BaseModelOutput(last_hidden_state=torch.ones(1, 2))
    out.note = "an attribute that is no field"
    monkeypatch.setattr(BaseModelOutput, "__post_init__", lambda self: pytest.fail("checked"))
    new = tree.map_tensors(lambda t: t + 1, out)
    assert vars(new).keys() == vars(out).keys()
    assert (new.note, new.hidden_states, list(new)) == (out.note, None, ["last_hidden_state"])
    assert new.last_hidden_state is new["last_hidden_state"] is new[0]
    assert out.last_hidden_state.sum() == 2


def test_dictionaries_keep_their_type():
    for value in (OrderedDict(a=torch.zeros(1)), defaultdict(list, a=torch.zeros(1))):
        new = tree.map_tensors(lambda t: t + 1, value)
        assert type(new) is type(value)
        assert new["a"].item() == 1


def test_torchs_own_named_tuples_are_rebuilt():
    result = torch.max(torch.eye(2), dim=0)
    new = (
        leaves.put(result, ("indices",), torch.tensor([5, 5]))
        if hasattr(result, "_fields")
        else (leaves.put(result, (1,), torch.tensor([5, 5])))
    )
    assert type(new) is type(result)
    assert new.indices.tolist() == [5, 5]


def test_a_leaf_that_is_not_there_shows_what_is():
    with pytest.raises(SiteError) as caught:
        leaves.get((torch.zeros(2), {"k": 1}), (1, "missing"), "block:output[1].missing")
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
    assert said in describe.difference(old, new)


def test_equal_structures_have_no_difference():
    value = (torch.zeros(2), {"a": [torch.ones(1), None, 3]})
    assert describe.difference(value, copy.deepcopy(value)) is None


def test_values_are_described_on_one_line():
    value = (torch.zeros(1, 4), None, {"a": torch.zeros(2)}, Point(1, 2.5))
    assert (
        describe.in_words(value)
        == "tuple(Tensor[1, 4], None, dict(a=Tensor[2]), Point(x=1, y=2.5))"
    )
    assert describe.shape_or_structure(torch.zeros(2, 3)) == "[2, 3]"


class Slotted:
    __slots__ = ("t",)

    def __init__(self):
        self.t = torch.zeros(1)


class Itself:
    def __init__(self):
        self.t = torch.zeros(1)

    def __copy__(self):
        return self


def test_slots_and_deques_are_walked_and_copied():
    slotted, queue = Slotted(), deque([torch.zeros(1)])
    kept = tree.map_tensors(torch.clone, (slotted, queue))
    slotted.t, _ = torch.ones(1), queue.append(torch.ones(1))
    assert kept[0].t.item() == 0
    assert len(kept[1]) == 1


def test_objects_that_are_not_ours_to_copy_are_left_alone():
    log = logging.getLogger("a.b.c")
    handlers, manager = log.handlers, log.manager

    class Box:
        def __init__(self):
            self.t, self.log, self.own = torch.zeros(1, requires_grad=True), log, Itself()

    box = Box()
    kept = tree.map_tensors(torch.Tensor.detach, box)
    assert kept.log is log
    assert (log.handlers, log.manager) == (handlers, manager)
    assert box.own.t.requires_grad is False
    assert box.t.requires_grad
    assert not kept.t.requires_grad


def test_an_empty_cache_that_fills_later_is_not_seen_to_fill():
    cache = DynamicCache(config=GPT2Config(n_layer=2))
    kept = tree.map_tensors(lambda t: t, {"cache": cache})
    cache.update(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 0)
    assert not list(tree.tensors(kept))


def test_values_that_hold_themselves_or_are_deep_do_no_harm():
    loop = [torch.zeros(1)]
    loop.append(loop)
    kept = tree.map_tensors(torch.clone, loop)
    assert kept[1] is kept
    assert "…" in describe.in_words(loop)
    deep = torch.zeros(1)
    for _ in range(5000):
        deep = (deep,)
    with pytest.warns(HooklineWarning, match="nested deeper"):
        tree.map_tensors(torch.clone, deep)
    assert len(list(tree.tensors(deep))) == 1


def test_what_is_shared_many_times_is_walked_once():
    value = [torch.zeros(1)]
    for _ in range(60):
        value = [value, value]
    assert len(list(tree.tensors(value))) == 1
    assert len(list(tree.tensors(tree.map_tensors(torch.clone, value)))) == 1


def test_a_dataclass_with_a_field_that_is_not_set_is_kept():
    @dataclass
    class Late:
        t: torch.Tensor
        later: object = field(init=False)

    kept = tree.map_tensors(torch.clone, Late(torch.ones(1)))
    assert kept.t.item() == 1


def test_named_tuples_with_a_new_of_their_own_are_rebuilt():
    class Odd(namedtuple("Odd", ["a"])):
        __slots__ = ()

        def __new__(cls, *, value):
            return super().__new__(cls, value)

    new = leaves.put(Odd(value=torch.zeros(1)), ("a",), torch.ones(1))
    assert type(new) is Odd
    assert new.a.item() == 1


def test_tensors_without_a_shape_or_a_size_are_described():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, that these are a prototype
        nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert describe.shape_or_structure(nested) == "[nested]"
    assert describe.n_bytes((nested, torch.eye(3).to_sparse(), torch.zeros(2))) >= 8


def test_parts_made_anew_at_each_access_do_not_get_mixed_up():
    class Fresh(dict):
        """Its values live only as long as somebody holds them."""

        def items(self):
            return [(key, [torch.full((1,), float(n))]) for key, n in super().items()]

    value = [Fresh({f"k{n}": n}) for n in range(200)]
    kept = tree.map_tensors(lambda t: t, value)
    assert [dict.__getitem__(one, f"k{n}")[0].item() for n, one in enumerate(kept)] == [*range(200)]
    assert [t.item() for _, t in tree.tensors(value)] == list(range(200))


def test_a_mapping_that_cannot_be_written_to_is_copied():
    kept = tree.map_tensors(torch.clone, types.MappingProxyType({"a": torch.ones(1)}))
    assert kept["a"].item() == 1


def _namesake():
    class Slotted:
        t = torch.zeros(1)

    return Slotted()


class Bag:
    def __init__(self, **parts):
        self.__dict__.update(parts)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (deque([1]), deque([1, 2]), "expected 1 part in the deque, got 2"),
        (deque([1], 3), deque([1]), "expected deque(maxlen=3), got deque(maxlen=None)"),
        ([1] * 7, [1] * 8, "expected 7 parts in the list, got 8"),
        (Bag(a=1), Bag(a=1, b=2), "expected the same keys in the Bag, got them with 'b'"),
        (Bag(a=1), Bag(), "expected the same keys in the Bag, got them without 'a'"),
        ([Bag(a=1)], [Bag()], "expected the same keys in the Bag at [0], got them without 'a'"),
    ],
)
def test_containers_that_read_alike_differ_by_what_they_hold(old, new, says):
    assert describe.difference(old, new) == says


def test_classes_of_one_name_are_told_apart():
    said = describe.difference(Slotted(), _namesake())
    assert said.endswith("Slotted, got one of " + f"{__name__}._namesake.<locals>.Slotted")


def test_a_mapping_is_whole_if_a_key_may_hold_tensors():
    plain, held = {"a": 1, 2: None}, {(torch.zeros(1),): 1}
    assert list(tree.tensors_and_opaque_parts([plain])) == []
    assert [(leaf, part is held) for leaf, part in tree.tensors_and_opaque_parts([held])] == [
        ((0,), True)
    ]
