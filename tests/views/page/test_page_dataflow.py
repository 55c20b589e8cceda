"""What flows into what: found from the recorded values, with the sums of residual blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.views.page.dataflow import find_edges
from hookline.views.page.module_rows import list_rows
from hookline.views.page.token_norms import find_token_ids, measure_token_norms, token_blocks
from hookline.views.page.value_entries import measure_values


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        return x + self.act(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(10).reshape(2, 5)


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(0)
    model = Net()
    with hl.record(model, ports=("input", "output", "grad_output"), copy=True) as run:
        model(IDS).sum().backward()
    return run


def edges(run):
    values = measure_values(run)
    rows = list_rows(run, values)
    return {
        (rows[edge.source].label, rows[edge.target].label, edge.is_join)
        for edge in find_edges(rows, values, 0)
    }


def test_inputs_come_from_equal_outputs_and_blocks_add_two(run):
    known = edges(run)
    assert ("embed", "blocks.0.norm", False) in known
    assert ("blocks.0.norm", "blocks.0.linear", False) in known
    assert {("embed", "blocks.0", True), ("blocks.0.act", "blocks.0", True)} <= known
    assert ("blocks.2", "head", False) in known
    assert ("blocks.0", "blocks.1", True) in known  # the skip
    assert not any(source == target for source, target, _ in known)


def test_without_inputs_only_sequences_are_known():
    model = nn.Sequential(nn.Linear(2, 3), Net().blocks[0].act, nn.Linear(3, 2))
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    assert edges(run) == {("0", "1", False), ("1", "2", False)}


def test_a_value_that_is_no_sum_has_no_join():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with hl.record(model, ports=("input", "output")) as run:
        model(torch.rand(3, 4))
    assert not any(is_join for *_, is_join in edges(run))


def test_norms_of_tokens_are_those_of_the_tensors(run):
    values = measure_values(run)
    rows = list_rows(run, values)
    chosen = token_blocks(rows, values, 0)
    assert (chosen.n_tokens, chosen.n_samples) == (5, 2)
    data = measure_token_norms(chosen, rows, {}, find_token_ids(values, 0, 5), 1)
    assert data["names"] == ["blocks.0", "blocks.1", "blocks.2"]
    assert data["ids"] == IDS[1].tolist()
    for name, norms in zip(data["names"], data["output"], strict=True):
        assert norms == pytest.approx(run[name][1].norm(dim=-1).tolist(), rel=1e-3)


def test_a_model_without_tokens_has_no_norms():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with hl.record(model) as run:
        model(torch.rand(3, 4))
    values = measure_values(run)
    assert token_blocks(list_rows(run, values), values, 0) is None
