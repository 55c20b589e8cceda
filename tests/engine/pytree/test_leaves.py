"""An edit of one part of a container keeps the container's class, attributes and other parts."""

from __future__ import annotations

import collections
import dataclasses
import types
import typing
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import hookline as hl
from hookline.engine.pytree import leaves, tree
from hookline.errors import StructureError


class Point(typing.NamedTuple):
    x: object
    y: object


class Tagged(Point):
    """A named tuple with attributes."""


class Pair(tuple):
    def __new__(cls, left, right):
        return super().__new__(cls, (left, right))


class Record(dict):
    def __init__(self, left, right):
        super().__init__(left=left, right=right)


class Row(list):
    pass


class Queue(collections.deque):
    pass


class ReadOnly(Mapping):
    """A mapping that holds a dict, and offers no way to write to it."""

    def __init__(self, held):
        self._held = held

    def __getitem__(self, key):
        return self._held[key]

    def __iter__(self):
        return iter(self._held)

    def __len__(self):
        return len(self._held)


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: object
    right: object


@dataclasses.dataclass
class Derived:
    left: object
    right: object
    size: object = dataclasses.field(init=False, default=3)


class DerivedMore(Derived):
    """A dataclass with attributes that are no fields."""


@dataclasses.dataclass(slots=True)
class Slotted:
    left: object
    right: object


class Output(BaseModelOutput):
    """A ModelOutput of one's own."""


def tagged(value):
    value.tag = "hi"
    return value


def frozen_tagged(left, right):
    value = Frozen(left, right)
    object.__setattr__(value, "tag", "hi")
    return value


def ordered(left, right):
    value = collections.OrderedDict(left=left, right=right)
    value.move_to_end("left")
    return tagged(value)


CONTAINERS = {
    "a tuple": lambda left, right: (left, right),
    "a named tuple": Point,
    "a subclass of a named tuple": lambda left, right: tagged(Tagged(left, right)),
    "a tuple with a __new__ of its own": lambda left, right: tagged(Pair(left, right)),
    "a list": lambda left, right: [left, right],
    "a subclass of list": lambda left, right: tagged(Row([left, right])),
    "a UserList": lambda left, right: tagged(collections.UserList([left, right])),
    "a subclass of deque": lambda left, right: tagged(Queue([left, right], maxlen=2)),
    "a subclass of dict": lambda left, right: tagged(Record(left, right)),
    "an OrderedDict": ordered,
    "a defaultdict": lambda left, right: collections.defaultdict(list, a=left, b=right),
    "a UserDict": lambda left, right: tagged(collections.UserDict(a=left, b=right)),
    "a ChainMap": lambda left, right: collections.ChainMap({"a": left}, {"b": right}),
    "a MappingProxyType": lambda left, right: types.MappingProxyType({"a": left, "b": right}),
    "a read-only mapping": lambda left, right: tagged(ReadOnly({"a": left, "b": right})),
    "the values of a dict": lambda left, right: {"a": left, "b": right}.values(),
    "a frozen dataclass": frozen_tagged,
    "a dataclass with a field that is not given": lambda *both: tagged(DerivedMore(*both)),
    "a dataclass with slots": Slotted,
    "a ModelOutput": lambda left, right: tagged(Output((left,), (right,))),
    "a SimpleNamespace": lambda left, right: types.SimpleNamespace(a=left, b=right),
}

inner = st.one_of(st.integers(0, 3).map(lambda n: torch.arange(float(n))), st.integers(0, 3))
values = st.recursive(
    inner,
    lambda parts: st.builds(
        lambda make, left, right: CONTAINERS[make](left, right),
        st.sampled_from(sorted(CONTAINERS)), parts, parts,
    ),
    max_leaves=6,
)  # fmt: skip


def own_attributes(value):
    """The attributes of a value that are no parts, and those that the class makes for parts."""
    names = {str(key) for key, _ in tree.items(value)} | {"data", "maps", "_held"}
    held = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in names}
    rest = [getattr(value, name, None) for name in ("maxlen", "default_factory")]
    return held, rest


def assert_same_but_for(value, made, leaf):
    """Check classes, keys and attributes on the way to a leaf, and identity beside it."""
    if not leaf:
        return
    assert type(made) is type(value)
    assert own_attributes(made) == own_attributes(value)
    before, after = tree.items(value), tree.items(made)
    assert [key for key, _ in before] == [key for key, _ in after]
    for (key, part), (_, new) in zip(before, after, strict=True):
        if key == leaf[0]:
            assert_same_but_for(part, new, leaf[1:])
        else:
            assert new is part


@given(values, st.data())
def test_an_edit_of_one_part_leaves_everything_else_as_it_is(value, data):
    found = [leaf for leaf, _ in tree.tensors(value)]
    if found:
        leaf = data.draw(st.sampled_from(found))
        kept = leaves.get(value, leaf, "x")
        for new in (kept, kept + 1):
            made = leaves.put(value, leaf, new, "x")
            assert leaves.get(made, leaf, "x") is new
            assert_same_but_for(value, made, leaf)
        assert leaves.get(value, leaf, "x") is kept


class Makes(nn.Module):
    """Returns what a function makes of its input and twice its input."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x, x * 2)


class Around(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.inner = Makes(make)

    def forward(self, x):
        return self.inner(x * 1)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_a_model_returns_the_same_container_after_an_edit(make):
    model = Around(make)
    check_edited(model, model(torch.ones(2)))


def check_edited(model, plain):
    leaf, last = list(tree.tensors(plain))[-1]
    with hl.edit(model, f"inner:output{leaf_text(leaf)}", hl.edits.scale(3.0)):
        edited = model(torch.ones(2))
    assert type(edited) is type(plain)
    assert own_attributes(edited) == own_attributes(plain)
    assert torch.equal(leaves.get(edited, leaf, "x"), last * 3)


def leaf_text(leaf):
    return "".join(f"[{key!r}]" for key in leaf)


COMPILED = [
    "a subclass of a named tuple", "a MappingProxyType", "a subclass of dict", "an OrderedDict",
    "a dataclass with a field that is not given", "a frozen dataclass",
]  # fmt: skip


@pytest.mark.compiles
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_model_returns_the_same_container(fresh_dynamo, name):
    model = Around(CONTAINERS[name])
    plain = model(torch.ones(2))
    check_edited(torch.compile(model, backend="eager"), plain)


class Computed(Mapping):
    """A mapping whose values are no values of a dict."""

    def __init__(self, left, right):
        self.left = left

    def __getitem__(self, key):
        return {"a": self.left}[key]

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


class Single(dict):
    def __copy__(self):
        return self


class Forgets(dict):
    def __copy__(self):
        return Forgets(self)


class Widens(dict):
    def __copy__(self):
        return dict(self)


REFUSED = {
    "read-only": (Computed, "Computed: it is read-only."),
    "single": (lambda left, right: Single(a=left), "Single: Single does not let itself be copied."),
    "forgets": (lambda left, right: tagged(Forgets(a=left)),
        "Forgets: its copy has another class, part or attribute."),
    "widens": (lambda left, right: Widens(a=left),
        "Widens: its copy has another class, part or attribute."),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_container_that_cannot_be_made_anew_is_refused(case):
    make, reason = REFUSED[case]
    model = Around(make)
    with hl.edit(model, 'inner:output["a"]', hl.edits.scale(3.0)):
        with pytest.raises(StructureError) as caught:
            model(torch.ones(2))
    name = reason.partition(":")[0]
    assert str(caught.value).splitlines() == [
        "inner:output.a must be a part of a container that can be made anew, got one of class"
        f" {reason}",
        f"Select the {name} as a whole, and return a new one; or use line.forward of hl.attach.",
    ]
