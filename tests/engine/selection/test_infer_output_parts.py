"""may_return_part: which named parts the code of a forward shows that an output can have."""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

import pytest
from torch import Tensor, nn

from hookline.engine.selection.infer_output_parts import may_return_part

if TYPE_CHECKING:
    from elsewhere import Unknown  # type: ignore[import-not-found]


class Fields(NamedTuple):
    logits: Tensor


@dataclass
class Data:
    logits: Tensor


class Typed(TypedDict):
    logits: Tensor


Untyped = collections.namedtuple("Untyped", ["logits"])


def module(forward):
    """A module with this forward."""
    return type("Made", (nn.Module,), {"forward": forward})()


def wrapped(function):
    """A function as a decorator returns it."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


def a_named_tuple(self, x) -> Fields: ...
def a_data_class(self, x) -> Data: ...
def a_typed_dict(self, x) -> Typed: ...
def one_of_several(self, x) -> tuple[Tensor, ...] | Data: ...
def a_dict(self, x) -> dict[str, Tensor]:
    return {"logits": x}


def a_dict_of_two(self, x):
    return {"logits": x, "other": x}


def an_update(self, x):
    return x.more(logits=x)


def anything(self, x) -> Any:
    return Untyped(x)


def an_unknown_class(self, x) -> Unknown:
    return Data(x)


def a_tensor(self, x) -> Tensor:
    return {"logits": x}["logits"]


def a_tuple(self, x) -> tuple[Tensor, ...]:
    return (Fields(x).logits,)


def another_name(self, logits):
    return {"other": logits}


def another_class(self, x) -> Untyped | None:
    return None


@pytest.mark.parametrize(
    "forward",
    [
        a_named_tuple,
        a_data_class,
        a_typed_dict,
        one_of_several,
        a_dict,
        a_dict_of_two,
        an_update,
        anything,
        an_unknown_class,
        wrapped(a_named_tuple),
    ],
)
def test_a_part_that_the_code_shows_is_there(forward):
    assert may_return_part(module(forward), "logits")


@pytest.mark.parametrize("forward", [a_tensor, a_tuple, another_name])
def test_a_part_that_the_code_does_not_show_is_not(forward):
    assert not may_return_part(module(forward), "logits")


def test_a_forward_that_is_no_python_function_shows_nothing():
    assert not may_return_part(module(print), "logits")
    assert not may_return_part(nn.ModuleList(), "logits")
    assert not may_return_part(nn.Linear(1, 1), "weight")
    assert not may_return_part(module(another_class), "other")
