"""The walk over a model's modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.selection.module_tree import module_tree, tree_of_tensors


def test_every_module_once_in_registration_order(net):
    nodes = module_tree(net).nodes
    assert [node.path for node in nodes] == [path for path, _ in net.named_modules()]
    assert [node.module for node in nodes] == list(net.modules())


def test_a_shared_module_and_those_below_carry_all_its_paths():
    shared = nn.Sequential(nn.Linear(2, 2))
    model = nn.ModuleDict({"a": shared, "b": shared})
    by_path = {node.path: node.aliases for node in module_tree(model).nodes}
    assert by_path == {"": (), "a": ("b",), "a.0": ("b.0",)}
    torchs = [path for path, _ in model.named_modules(remove_duplicate=False)]
    assert sorted([p for n in module_tree(model).nodes for p in n.paths]) == sorted(torchs)


def test_a_module_that_holds_itself_does_not_hang():
    model = nn.Sequential(nn.Linear(1, 1))
    model.add_module("me", model)
    assert [node.path for node in module_tree(model).nodes] == ["", "0"]


def test_wrapper_prefixes_are_left_out(net):
    wrapped = nn.DataParallel(net)
    averaged = torch.optim.swa_utils.AveragedModel(net)
    compiled = torch.compile(net, backend="eager")
    paths = [path for path, _ in net.named_modules()]
    for wrapper in (wrapped, averaged, compiled, torch.compile(wrapped, backend="eager")):
        assert [node.path for node in module_tree(wrapper).nodes] == paths


def test_a_child_that_is_merely_called_module_keeps_its_name():
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    assert [node.path for node in module_tree(model).nodes] == ["", "module"]


def test_modules_without_a_hash_are_walked():
    class Equal(nn.Linear):
        def __eq__(self, other):
            return True

        __hash__ = None

    assert len(module_tree(nn.Sequential(Equal(1, 1), Equal(1, 1))).nodes) == 3


def test_every_parameter_once_in_registration_order(net):
    nodes = module_tree(net).tensors
    assert [node.path for node in nodes] == [name for name, _ in net.named_parameters()]
    assert all(node.tensor is p for node, p in zip(nodes, net.parameters(), strict=True))
    assert nodes[0].type_name == "Conv2d.weight"


def test_shared_modules_and_tied_parameters_carry_all_paths():
    shared, head = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    head.weight = shared.weight
    model = nn.ModuleDict({"a": shared, "b": shared, "head": head})
    by_path = {node.path: node.aliases for node in module_tree(model).tensors}
    assert by_path == {"a.weight": ("b.weight", "head.weight"), "a.bias": ("b.bias",)}
    torchs = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found = [path for node in module_tree(model).tensors for path in node.paths]
    assert sorted(found) == sorted(torchs)


def test_tensors_that_are_given_by_name_are_found_by_it():
    a, b = torch.ones(1), torch.ones(2)
    nodes = tree_of_tensors({"a": a, "b": b, "again": a}).tensors
    assert [(node.path, node.aliases) for node in nodes] == [("a", ("again",)), ("b", ())]


def test_the_layout_knows_what_holds_compiled_call_wrappers_too():
    leaf, inner = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(leaf, inner, nn.Tanh())
    assert module_tree(model).compiled == []
    leaf.compile(backend="eager")
    inner.compile(backend="eager")
    wrapper = nn.DataParallel(model)
    wrapper.compile(backend="eager")
    assert module_tree(wrapper).compiled == [wrapper, leaf, inner]


@pytest.mark.parametrize("verb", [hl.record, hl.check, hl.inventory])
@pytest.mark.parametrize(
    ("target", "where"),
    [
        (nn.Linear, r"of this class, Linear\(...\)"),
        (SimpleNamespace(model=nn.ReLU()), "in its attribute .model"),
        ("resnet18", "itself"),
    ],
)
def test_what_is_no_model_is_told_where_it_is(target, where, verb):
    with pytest.raises(hl.AttachError, match=f"Give the model {where}"):
        verb(target)
