"""hl.operations lists what a module itself calls."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl


def _helper(x):
    return torch.tanh(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        x = F.gelu(self.fc(x)) + _helper(x)
        return F.dropout(x * x.shape[-1], 0.5, self.training)


@pytest.fixture
def model():
    return nn.Sequential(Block(), nn.Dropout())


X = torch.ones(2, 3)


def test_calls_come_in_order_with_sites_that_can_be_recorded(model):
    calls = hl.operations(model, X, "0")
    assert [row.function for row in calls] == ["gelu", "tanh", "add", "mul", "dropout"]
    with hl.record(model, [row.site for row in calls]) as run:
        model(X)
    assert len(run) == 5


def test_calls_of_one_function_are_numbered():
    class Twice(nn.Module):
        def forward(self, x):
            return x.exp().exp()

    assert [row.site for row in hl.operations(Twice(), X)] == ["@exp#0", "@exp#1"]


def test_each_call_has_shapes_and_its_line_of_source(model):
    first = inspect.getsourcelines(Block.forward)[1]
    gelu, tanh, add, _, dropout = hl.operations(model, X, "0")
    assert add.inputs == "input [2, 3], other [2, 3]"
    assert add.output == "[2, 3]"
    assert {Path(row.file) for row in (gelu, tanh, dropout)} == {Path(__file__)}
    assert gelu.line == first + 1
    assert dropout.line == first + 2  # and not a line of torch's own code
    assert tanh.line == inspect.getsourcelines(_helper)[1] + 1


def test_the_model_is_as_before(model):
    state = torch.get_rng_state()
    hl.operations(model, X, "0")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert len(hl.inventory(model)) == 0


def test_an_attention_names_its_parts():
    attention = nn.MultiheadAttention(4, 2)
    x = torch.ones(3, 1, 4)
    calls = hl.operations(attention, (x, x, x))
    assert calls.parts == ("@q", "@k", "@v", "@scores", "@pattern", "@z")
    assert "Of its attention, by name: @q" in str(calls)
    assert not hl.operations(nn.Sequential(Block()), X, "0").parts


def test_the_result_prints_and_is_plain_data(model):
    calls = hl.operations(model, X, "0")
    assert str(calls).startswith("0 (Block) itself makes 5 calls of torch's functions")
    assert "Write the path before each, as in '0@gelu'." in str(calls)
    data = calls.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["operations"][0]["site"] == "0@gelu"
    assert len(calls) == len(calls.to_pandas()) == 5


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("*", "path must be that of one module, got '\\*' \\(2 sites\\)"),
        ("0@gelu", "path must be that of one module"),
        ("nothing", "matches no module"),
    ],
)
def test_another_selector_is_refused(model, path, said):
    with pytest.raises(hl.SelectionError, match=said):
        hl.operations(model, X, path)


def test_a_module_that_did_not_run_is_told():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.idle = Block()

        def forward(self, x):
            return x + 1

    with pytest.raises(hl.SelectionError, match="idle did not run"):
        hl.operations(Skips(), X, "idle")
