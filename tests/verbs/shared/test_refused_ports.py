"""Ports that a verb is given beside a selection, whose sites have ports of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


def test_a_selection_of_values_is_none_of_their_gradients():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    values = hl.select(net, "1")
    said = r"got a selection of the output of 1\.\nSelect again: .*ports='grad_output'\)"
    for selector in (values, ["0", values]):
        with pytest.raises(hl.SelectionError, match=said):
            hl.record(net, selector, ports="grad_output")
        with pytest.raises(hl.SelectionError, match=said):
            hl.watch(net, selector, ports="grad_output")
        with pytest.raises(hl.SelectionError, match=said):
            hl.doctor(net, torch.ones(1, 2), selector, ports="grad_output")
    with pytest.raises(hl.SelectionError, match=said):
        hl.edit(net, {"0": torch.neg, values: torch.neg}, ports="grad_output")
    gradients = hl.select(net, "1", ports="grad_output")
    with hl.edit(net, gradients, torch.neg, ports="grad_output"):
        net(torch.ones(1, 2)).sum().backward()
    with hl.record(net, values, ports=("output", "grad_output")) as run:
        net(torch.ones(1, 2))
    assert list(run) == ["1"]
