"""Optimizers of a model: the weights that each holds, and pairs that step together."""

from __future__ import annotations

import gc

import torch
from torch import nn

from hookline.verbs.monitor.optimizers import Optimizers


def test_weights_are_held_as_far_as_an_optimizer_has_them():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    other_weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([model[0].weight, other_weight], lr=0.1)
    ours = Optimizers(model)
    assert len(ours.unheld_weights()) == 4
    assert ours.ids_held_by(optimizer) == ours.all_held_ids() == {id(model[0].weight)}
    optimizer.add_param_group({"params": [model[1].weight]})
    assert ours.ids_held_by(optimizer) == {id(model[0].weight), id(model[1].weight)}
    assert list(map(id, ours.unheld_weights())) == [id(model[0].bias), id(model[1].bias)]


def test_torch_can_swap_weights_that_no_optimizer_holds():
    model = nn.Linear(1, 1)
    ours = Optimizers(model)
    assert ours.unheld_weights() == [model.weight, model.bias]
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.full((1, 1), 3.0)))
    assert ours.unheld_weights()[0].item() == 3


def optimizers(n):
    return [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(n)]


def test_optimizers_without_a_run_in_between_are_a_pair():
    ours, (first, second) = Optimizers(nn.Linear(1, 1)), optimizers(2)
    ours.mark_run()
    assert not ours.pair_with_last(first)
    ours.mark_step(first)
    assert ours.pair_with_last(second)
    ours.mark_step(second)
    assert not list(ours.partners_stepped_before_run(first))  # no run since
    ours.mark_run()
    assert list(ours.partners_stepped_before_run(first)) == [second]
    assert list(ours.partners_stepped_before_run(second)) == [first]


def test_a_run_in_between_or_the_same_optimizer_makes_no_pair():
    ours, (first, second) = Optimizers(nn.Linear(1, 1)), optimizers(2)
    ours.mark_step(first)
    assert not ours.pair_with_last(first)
    ours.mark_run()
    assert not ours.pair_with_last(second)
    assert not list(ours.partners_stepped_before_run(first))


def test_an_optimizer_that_is_gone_is_no_partner():
    ours, (first, second) = Optimizers(nn.Linear(1, 1)), optimizers(2)
    ours.mark_step(second)
    assert ours.pair_with_last(first)
    ours.mark_run()
    del second
    gc.collect()
    assert not list(ours.partners_stepped_before_run(first))
