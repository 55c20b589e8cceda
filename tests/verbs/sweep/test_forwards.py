"""Which calls a sweep's tape knows: those on the way to its sites."""

from __future__ import annotations

import pytest
from torch import nn

from hookline.engine import module_tree
from hookline.verbs.sweep.forwards import _modules_around


def around(model, sites):
    return [path for path, _ in _modules_around(module_tree(model), sites)]


@pytest.mark.parametrize(
    ("sites", "known"),
    [
        (["(root)"], []),
        (["b"], ["a", "b"]),
        (["b.1:input[0]#0"], ["a", "b", "b.0", "b.1"]),
        (["b@relu"], ["a", "b", "b.0", "b.1"]),
        (["a.0", "b.0"], ["a", "a.0", "b", "b.0", "b.1"]),
    ],
)
def test_what_is_called_inside_of_other_modules_is_left_out(sites, known):
    parts = {"a": nn.Sequential(nn.ReLU()), "b": nn.Sequential(nn.ReLU(), nn.Tanh())}
    assert around(nn.ModuleDict(parts), sites) == ["", *known]


def test_a_module_may_have_the_name_of_an_operation():
    model = nn.ModuleDict({"a@b": nn.ReLU()})
    assert around(model, ["a@b"]) == ["", "a@b"]
    inside = nn.ModuleDict({"a@b": nn.Sequential(nn.ReLU())})
    assert around(inside, ["a@b@relu"]) == ["", "a@b", "a@b.0"]
