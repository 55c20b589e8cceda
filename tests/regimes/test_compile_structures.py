"""Edits of whole structures, and of a tensor that comes several times, in one compiled graph."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import hookline as hl
from thoroughness import tries

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("fresh_dynamo")]

Two = namedtuple("Two", "a b")
X = torch.tensor([1.0, -2.0])


@dataclass
class Data:
    a: Any
    b: Any


def in_place(value):
    value["a"] = value["a"] * 10
    return value


# A structure of two tensors, how to read them, and an edit that returns a structure of its kind.
KINDS = {
    "tuple": (lambda a, b: (a, b), lambda v: v, lambda v: (v[0] * 10, v[1])),
    "list": (lambda a, b: [a, b], lambda v: v, lambda v: [v[0] * 10, v[1]]),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda v: v.values(), lambda v: {**v, "a": v["b"] * 9}),
    "dict in place": (lambda a, b: {"a": a, "b": b}, lambda v: v.values(), in_place),
    "ordered dict": (
        lambda a, b: OrderedDict(a=a, b=b),
        lambda v: v.values(),
        lambda v: OrderedDict(a=v["a"] * 10, b=v["b"]),
    ),
    "named tuple": (Two, lambda v: (v.a, v.b), lambda v: Two(v.a * 10, v.b)),
    "dataclass": (Data, lambda v: (v.a, v.b), lambda v: Data(v.a * 10, v.b)),
    "replaced": (Data, lambda v: (v.a, v.b), lambda v: replace(v, a=v.a * 10)),
    "nested": (
        lambda a, b: ((a, [b]), None, 3),
        lambda v: (v[0][0], v[0][1][0]),
        lambda v: ((v[0][0] * 10, [v[0][1][0] + 1]), None, v[2]),
    ),
    "tuple in a dict": (
        lambda a, b: {"p": (a, b)},
        lambda v: v["p"],
        lambda v: {"p": (v["p"][0] * 10, v["p"][1])},
    ),
    "kept parts": (lambda a, b: ((a, b), a), lambda v: v[0], lambda v: (v[0], v[1] * 10)),
    "the same": (lambda a, b: (a, (b, b)), lambda v: (v[0], v[1][0]), lambda v: v),
    "none": (lambda a, b: (a, (b, b)), lambda v: (v[0], v[1][0]), lambda v: None),
}


class Makes(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x * 2, x * 3)


class Reads(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.read = read

    def forward(self, value, scale=1):
        a, b = self.read(value)
        return a * scale + b * b


class Net(nn.Module):
    def __init__(self, kind) -> None:
        super().__init__()
        make, read, _ = KINDS[kind]
        self.makes, self.reads = Makes(make), Reads(read)

    def forward(self, x):
        return self.reads(self.makes(x), scale=2)


def results(net, call, *edits):
    x = X.clone().requires_grad_()
    lines = [hl.edit(net, site, change) for site, change in edits]
    try:
        y = call(x)
    finally:
        for line in lines:
            line.remove()
    y.sum().backward()
    return y, x.grad


@pytest.mark.filterwarnings("ignore:hl.edit changed nothing")
@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_structure_is_edited_as_in_eager(kind):
    net, change = Net(kind), KINDS[kind][2]
    edits = [
        ("makes", change),
        ("reads:input.value", change),
        ("reads:input", lambda given: {**given, "value": change(given["value"]) or given["value"]}),
    ]
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    alone = list(KINDS).index(kind) % 3
    for chosen in tries(([], edits[:1], edits[1:2], edits[2:], edits),
                        gate=([], edits[alone : alone + 1], edits)):  # fmt: skip
        assert_close(results(net, compiled, *chosen), results(net, net, *chosen))


@pytest.mark.parametrize("kind", ["tuple", "nested", "named tuple"])
def test_a_structure_of_another_form_is_refused(kind):
    net = Net(kind)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    with hl.edit(net, "makes", lambda value: (value[0],)):
        with pytest.raises(Exception, match="would change the value's structure"):
            compiled(X)


class Attention(nn.Module):
    def forward(self, q, k, v, *rest):
        return q * 2 + k.sin() * v + sum(part[0] for part in rest)


class Same(nn.Module):
    """Gives its attention some of three tensors, by number."""

    def __init__(self, numbers) -> None:
        super().__init__()
        self.attn, self.numbers = Attention(), numbers

    def forward(self, x):
        tensors = (x, x + 1, x.tanh())
        q, k, v, *rest = (tensors[number] for number in self.numbers)
        return self.attn(q, k, v, *((part, [x]) for part in rest))


CHANGES = {
    "scaled": lambda given: {
        k: v * 2 if isinstance(v, torch.Tensor) else v for k, v in given.items()
    },
    "unchanged": lambda given: given,
    "one of them": lambda given: {**given, "k": given["q"] + given["k"]},
}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 2), min_size=3, max_size=5), st.sampled_from(sorted(CHANGES)))
def test_a_tensor_may_come_several_times(numbers, change):
    torch._dynamo.reset()
    net = Same(numbers)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    edit = ("attn:input", CHANGES[change])
    assert_close(results(net, compiled, edit), results(net, net, edit))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_write_to_a_tensor_that_comes_twice_is_refused(name):
    net = Same([0, 0, 1])
    compiled = torch.compile(net, backend="eager", fullgraph=True)

    def write(given):
        given[name].mul_(2)
        return given

    with hl.edit(net, "attn:input", write):
        with pytest.raises(Exception, match="wrote in place to the value"):
            compiled(X)


def test_a_tensor_that_is_taken_out_and_written_to_is_refused():
    net = Net("dict")
    compiled = torch.compile(net, backend="eager", fullgraph=True)

    def write(value):
        held = value.pop("a")
        held.mul_(2)
        return {"a": held * 1, "b": value["b"]}

    with hl.edit(net, "makes", write):
        with pytest.raises(Exception, match="wrote in place to the value"):
            compiled(X)
