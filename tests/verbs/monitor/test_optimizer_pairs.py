"""Which optimizers step after one run of the model; test_monitor.py counts steps with them."""

from __future__ import annotations

import gc

import torch
from torch import nn

from hookline.verbs.monitor.optimizer_pairs import OptimizerPairs


def optimizers(n):
    return [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(n)]


def test_optimizers_without_a_run_in_between_are_a_pair():
    pairs, (one, other) = OptimizerPairs(), optimizers(2)
    pairs.model_runs()
    assert not pairs.follows(one)
    pairs.stepped(one)
    assert pairs.follows(other)
    pairs.stepped(other)
    assert not list(pairs.before_run(one))  # no run since
    pairs.model_runs()
    assert list(pairs.before_run(one)) == [other]
    assert list(pairs.before_run(other)) == [one]


def test_a_run_in_between_or_the_same_optimizer_makes_no_pair():
    pairs, (one, other) = OptimizerPairs(), optimizers(2)
    pairs.stepped(one)
    assert not pairs.follows(one)
    pairs.model_runs()
    assert not pairs.follows(other)
    assert not list(pairs.before_run(one))


def test_an_optimizer_that_is_gone_is_no_partner():
    pairs, (one, other) = OptimizerPairs(), optimizers(2)
    pairs.stepped(other)
    assert pairs.follows(one)
    pairs.model_runs()
    del other
    gc.collect()
    assert not list(pairs.before_run(one))
