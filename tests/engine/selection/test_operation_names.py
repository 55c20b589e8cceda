"""Operations in selectors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return F.relu(self.fc(x)) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.tanh(x)


@pytest.fixture(scope="module")
def net():
    return Net()


@pytest.mark.parametrize(
    ("selector", "sites"),
    [
        ("blocks.0@relu", ["blocks.0@relu"]),
        ("blocks.0@relu:input", ["blocks.0@relu:input"]),
        ("blocks.1@add:input.other#0", ["blocks.1@add:input.other#0"]),
        ("blocks.*@relu", [f"blocks.{k}@relu" for k in range(3)]),
        ("blocks.0@{relu,add}", ["blocks.0@add", "blocks.0@relu"]),
        ("blocks.2@pattern", ["blocks.2@pattern"]),
        ("@tanh", ["@tanh"]),
        ("(root)@tanh", ["@tanh"]),
    ],
)
def test_what_a_selector_with_an_operation_matches(net, selector, sites):
    assert sorted(map(str, hl.select(net, selector))) == sorted(sites)


def test_selections_of_operations_combine(net):
    both = hl.select(net, "blocks.*@relu") | "blocks.0"
    assert [str(site) for site in both] == [
        "blocks.0", "blocks.0@relu", "blocks.1@relu", "blocks.2@relu",
    ]  # fmt: skip
    assert [str(site) for site in both - "blocks.*@relu"] == ["blocks.0"]
    assert [str(site) for site in both & "blocks.1@relu"] == ["blocks.1@relu"]
    with hl.record(net, both) as run:
        net(torch.ones(1, 2))
    assert len(run) == 4


def test_a_selection_is_refused_after_its_module_has_gone():
    net = Net()
    selection = hl.select(net, "blocks.1@relu")
    net.blocks[1] = Block()
    with pytest.raises(hl.SelectionError, match="no longer there"):
        hl.record(net, selection)


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ("blocks.0@reluu", "no function 'reluu'.*Did you mean 'blocks.0@relu'"),
        ("blocks.0@patern", "Did you mean 'blocks.0@pattern'"),
        ("blocks.0@mT", "'mT' in 'blocks.0@mT' is an attribute"),
        ("blocks.0@torch.relu", r"no function 'torch\.relu'.*Did you mean 'blocks\.0@relu'\?"),
        ("blocks.0@F.relu", r"Did you mean 'blocks\.0@relu'\?"),
        ("blocks.0@ relu", r"Did you mean 'blocks\.0@relu'\?"),
        ("blocks.0@__add__", r"Did you mean 'blocks\.0@add'\?"),
        ("blocks.0@torch.ops.own.kernel", "operators of torch.ops cannot be selected.\nhl.operat"),
        ("block@relu", "'block@relu' matches no module"),
        ("blocks@relu", "nothing flows through 'blocks'"),
        ("blocks.0@relu:grad", "Block@relu at 'blocks.0@relu' has no parameters"),
    ],
)
def test_a_name_that_cannot_be_selected_is_explained(net, selector, said):
    with pytest.raises(hl.SelectionError, match=f"(?s){said}"):
        hl.select(net, selector)


def test_a_module_named_with_the_sign_is_that_module():
    model = nn.Module()
    model.add_module("a@relu", nn.Linear(2, 2))
    (site,) = hl.select(model, "a@relu")
    assert site.module_type == "Linear"


def test_scripted_and_exported_models_are_refused_by_name(net):
    scripted = torch.jit.script(nn.Sequential(nn.ReLU()))
    with pytest.raises(
        hl.AttachError, match=r"^0 is a ScriptModule.*\n.*before torch.jit.script; or a module"
    ):
        hl.record(scripted, "0@relu")
    with pytest.raises(hl.AttachError, match=r"1\.0 is a ScriptModule.*\n.*a module around it"):
        hl.record(nn.Sequential(nn.ReLU(), scripted), "1.0@relu")
    exported = torch.export.export(net, (torch.ones(1, 2),)).module()
    with pytest.raises(hl.SelectionError, match="exported program"):
        hl.record(exported, "@relu")
    with pytest.raises(hl.SelectionError, match=r"^\(root\) is an exported program"):
        hl.record(exported, "blocks.0@relu")  # which holds parameters, and is not called


class Adds(nn.Module):
    def forward(self, x):
        y = x.exp()
        y += x
        return y


def test_a_function_that_is_never_called_is_explained(net):
    said = r"blocks.0 calls no `gelu` itself, took another branch, or did not run; "
    said += r"hl.operations\(model, x, 'blocks.0'\)"
    with pytest.warns(hl.HooklineWarning, match=said):
        with hl.record(net, "blocks.0@gelu"):
            net(torch.ones(1, 2))
    with pytest.raises(hl.NotRecordedError, match=r"calls no `add` .*; in place, it is '@add_'"):
        hl.features(Adds(), torch.ones(2), "@add")
    said = r"itself computes no attention .*; 'blocks\.0\.\*\*@pattern' matches the modules inside"
    with pytest.warns(hl.HooklineWarning, match=said):
        with hl.record(net, "blocks.0@pattern"):
            net(torch.ones(1, 2))


def test_a_glob_warns_only_if_none_of_its_sites_fired(net):
    with hl.record(net, "**@tanh") as run:  # a warning would be an error
        net(torch.ones(1, 2))
    assert [str(site) for site in run.sites if site in run] == ["@tanh"]
    with pytest.warns(hl.HooklineWarning, match="7 of 7 sites never fired"):
        with hl.record(net, "**@gelu"):
            net(torch.ones(1, 2))


def test_a_replaced_module_is_told(net):
    net = Net()
    with hl.record(net, "blocks.1@relu"):
        net.blocks[1] = Block()
        with pytest.warns(hl.HooklineWarning, match="blocks.1 was replaced"):
            net(torch.ones(1, 2))
