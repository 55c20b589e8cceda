"""The verbs on operations: the calls of functions in a module's own forward."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hookline as hl


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.fc(x)) * x


@pytest.fixture
def gate():
    torch.manual_seed(0)
    return Gate()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def _tanh(gate):
    return torch.tanh(gate.fc(X))


@pytest.mark.cell("operations inside modules", "record", "gradients", "statistics", "features")
def test_values_and_gradients_are_those_of_the_code(gate):
    with hl.record(gate, ["@tanh", "@tanh:grad_output"]) as run:
        gate(X).sum().backward()
    assert torch.equal(run["@tanh"], _tanh(gate))
    assert torch.equal(run["@tanh:grad_output"], X)
    with hl.record(gate, "@tanh", keep=torch.norm) as norms:
        gate(X)
    assert torch.equal(norms["@tanh"], _tanh(gate).norm())
    assert torch.equal(hl.features(gate, X, "@tanh")["@tanh"], _tanh(gate))


@pytest.mark.cell("operations inside modules", "edit", "edit gradients", "raw hooks")
def test_changes_and_raw_hooks_act_on_the_code(gate):
    with hl.edit(gate, "@tanh", hl.edits.scale(2.0)):
        assert torch.equal(gate(X), 2 * _tanh(gate) * X)
    x = X.clone().requires_grad_()
    with hl.edit(gate, "@tanh:grad_output", hl.edits.scale(0.0)):
        gate(x).sum().backward()
    assert torch.equal(x.grad, _tanh(gate))
    with hl.attach(gate) as line:
        line.forward("@tanh", lambda module, args, output: output * 3)
        assert torch.equal(gate(X), 3 * _tanh(gate) * X)


@pytest.mark.cell("operations inside modules", "watch", "monitor")
def test_watch_prints_and_monitor_measures_operations(gate, tmp_path):
    printed = io.StringIO()
    with hl.watch(gate, "@tanh", file=printed):
        gate(X)
    assert "@tanh" in printed.getvalue()
    optimizer = torch.optim.SGD(gate.parameters(), 0.0)
    with hl.monitor(gate, "@tanh", to=tmp_path / "run"):
        gate(X).sum().backward()
        optimizer.step()
    rows = hl.open(tmp_path / "run").to_pandas()
    assert rows["site"].str.startswith("@tanh").any()


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.cell(
    "operations inside modules, in compiled code", "record", "gradients", "statistics", "edit",
    note="Selecting other operations of a module compiles it again.",
)  # fmt: skip
def test_compiled_operations_are_the_eager_ones(gate):
    compiled = torch.compile(gate, backend="aot_eager", fullgraph=True)
    with hl.record(gate, ["@tanh", "@tanh:grad_output"]) as run:
        compiled(X).sum().backward()
    assert torch.equal(run["@tanh"], _tanh(gate))
    assert torch.equal(run["@tanh:grad_output"], X)
    with hl.record(gate, "@tanh", keep=torch.norm) as norms:
        compiled(X)
    assert torch.allclose(norms["@tanh"], _tanh(gate).norm())
    with hl.edit(gate, "@tanh", hl.edits.scale(2.0)):
        assert torch.equal(compiled(X), 2 * _tanh(gate) * X)
