"""The inventory: every hook, and whose it is."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import site
from pathlib import Path

import pytest
import torch
from torch import nn

import hookline as hl


def mine(module, args, output):
    return None


def test_hooks_are_listed_with_their_owner(net, image):
    net.fc.register_forward_hook(mine)
    net.stem.register_full_backward_hook(lambda *a: None)
    net.fc.weight.register_hook(lambda grad: None)
    net.fc.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    torch.nn.utils.spectral_norm(net.layer1[0].conv)
    with hl.record(net), hl.attach(hl.EVERYWHERE) as line:
        line.forward(None, mine)
        net(image)
        found = {(entry.path, entry.kind, entry.owner) for entry in hl.inventory(net)}
    assert {
        ("fc", "forward", "yours"),
        ("stem", "backward", "yours"),
        ("fc.weight", "grad", "yours"),
        ("fc.bias", "accumulated", "yours"),
        ("layer1.0.conv", "forward_pre", "torch"),
        ("layer1.0.conv", "state_dict", "torch"),
        ("fc", "forward", "hookline"),
        ("(every module)", "forward", "hookline"),
    } <= found


def test_it_says_where_a_hook_was_defined(net):
    net.fc.register_forward_hook(mine)
    (entry,) = hl.inventory(net)
    assert (entry.function, entry.where.rpartition(":")[0]) == ("mine", __file__)
    assert "fc    forward  yours  mine" in str(hl.inventory(net))


def test_a_model_without_hooks_says_so():
    assert str(hl.inventory(nn.Linear(1, 1))) == "no hooks on 1 module"


class Callable:
    """A hook that is an object."""

    def __call__(self, module, args, output):
        return None


def test_partials_objects_builtins_are_named_by_what_they_call():
    model = nn.Linear(2, 2)
    for hook in (functools.partial(mine, output=None), Callable(), id, json.dumps):
        model.register_forward_hook(hook)
    found = [(entry.path, entry.owner, entry.function) for entry in hl.inventory(model)]
    assert found == [
        ("", "yours", "mine"),
        ("", "yours", "Callable"),
        ("", "yours", "builtin_function_or_method"),
        ("", "python", "dumps"),
    ]
    line = inspect.getsourcelines(mine)[1]
    where = [entry.where for entry in hl.inventory(model)]
    assert (where[0], where[2]) == (f"{__file__}:{line}", "")


def test_a_librarys_hook_is_that_librarys(monkeypatch):
    installed = Path(pytest.approx.__code__.co_filename).parents[1]
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(installed)])
    model = nn.Linear(2, 2)
    model.register_forward_hook(pytest.approx)
    assert [entry.owner for entry in hl.inventory(model)] == ["_pytest"]


def test_hooks_of_a_line_say_where_they_are_a_copys_are_inert():
    model = nn.Sequential(nn.Linear(2, 2))
    with hl.record(model, "0"):
        copied = copy.deepcopy(model)
        assert [entry.function for entry in hl.inventory(model)] == [
            "pass begins", "pass ends", "record 0",
        ]  # fmt: skip
        model(torch.ones(1, 2))
    inert = [entry.function for entry in hl.inventory(copied)]
    assert inert == ["inert (of a copy): does nothing, is removed when first called"] * 3


def test_the_parameters_of_the_root_itself_have_no_dot():
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: None)
    assert [entry.path for entry in hl.inventory(model)] == ["weight"]


def test_it_prints_a_table():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_forward_hook(id)  # libraries replace `print`
    model[0].register_forward_pre_hook(id)
    assert len(hl.inventory(model)) == 2
    assert str(hl.inventory(model)).splitlines() == [
        "path    kind         owner  function                    where",
        "-" * 61,
        "(root)  forward      yours  builtin_function_or_method",
        "0       forward_pre  yours  builtin_function_or_method",
    ]
