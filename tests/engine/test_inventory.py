"""The inventory: every hook, and whose it is."""

from __future__ import annotations

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
