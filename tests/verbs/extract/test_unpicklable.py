"""The innermost part that cannot be pickled, by its name."""

from __future__ import annotations

import pickle
import threading

import pytest
from torch import nn

from hookline.verbs.extract.unpicklable import find_unpicklable

LOCK = threading.Lock()


class Loops:
    def __init__(self):
        self.me, self.lock = self, threading.Lock()

    def method(self):
        return self.lock


def with_lock():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    model[1][0].lock = threading.Lock()
    return model


def nested():
    lock = threading.Lock()
    return lambda: lock


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (with_lock(), "it.1.0.lock"),
        ({"a": [1, threading.Lock()]}, "it['a'][1]"),
        (Loops(), "it.lock"),
        (Loops().method, "it.__self__.lock"),
        (nested(), "the variable lock of it"),
        (lambda: LOCK, "the variable LOCK of it"),
        (lambda: 0, "it"),
    ],
)
def test_the_part_is_named(value, name):
    found = find_unpicklable({"first": 1, "it": value}, pickle.dumps)
    assert found is not None
    assert found[0] == name


def test_what_can_be_pickled_is_not_named():
    assert find_unpicklable({"model": nn.Linear(2, 2), "selector": "*"}, pickle.dumps) is None
