"""Operations in compiled code."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hookline as hl

pytestmark = [pytest.mark.compiles, pytest.mark.usefixtures("fresh_dynamo")]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(this, x):  # the name of the first argument is free
        y = F.relu(this.inner(x)).unflatten(-1, (2, 4)).flatten(-2)
        a, b = nn.Softmax(dim=-1)(1 - y).split(4, -1)
        z = torch.cat([b, a], -1)
        z.sigmoid_()
        return z + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 2


SITES = [
    *(f"blocks.{k}@{name}" for k in range(2) for name in (
        "relu", "unflatten", "rsub", "softmax", "split", "cat", "sigmoid_", "add:input.other",
    )),
    "@mul",
]  # fmt: skip


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def compiled(net):
    """The compiled net, which counts its graphs."""
    graphs = []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    model = torch.compile(net, backend=backend, fullgraph=True)
    model.graphs = graphs
    return model


def test_values_are_eager_ones_in_one_graph_more(net, compiled):
    x = torch.randn(3, 8)
    bare = compiled(x)
    with hl.record(net, SITES, copy=True) as eager:
        net(x)
    for _ in range(2):
        with hl.record(net, SITES, copy=True) as run:
            assert torch.equal(compiled(x), bare)
        for site in SITES:
            first, second = eager[site], run[site]
            pairs = (
                zip(first, second, strict=True) if isinstance(first, tuple) else [(first, second)]
            )
            assert all(torch.equal(a, b) for a, b in pairs), site
    assert len(compiled.graphs) == 2
    assert torch.equal(compiled(x), bare)


@pytest.mark.parametrize("name", ["relu", "rsub", "sigmoid_"])
def test_an_edit_is_the_eager_one(net, compiled, name):
    x = torch.randn(3, 8)
    bare = compiled(x)
    change = hl.edits.scale(0.5)
    with hl.edit(net, f"blocks.*@{name}", change):
        eager = net(x)
    with hl.edit(net, f"blocks.*@{name}", change):
        out = compiled(x)
    assert torch.equal(out, eager)
    assert not torch.equal(out, bare)


def test_gradients_are_the_eager_ones(net, compiled):
    x = torch.randn(3, 8, requires_grad=True)
    sites = ["blocks.0@cat:grad_output", "blocks.1@rsub:grad_output"]
    runs = []
    for model in (net, compiled):
        with hl.record(net, sites) as run:
            model(x).sum().backward()
        runs.append(run)
    for site in sites:
        assert torch.equal(runs[0][site], runs[1][site])


def test_another_operation_of_the_module_is_another_graph(net, compiled):
    x = torch.randn(3, 8)
    for name in ("relu", "cat", "relu"):
        with hl.record(net, f"blocks.0@{name}") as run:
            compiled(x)
        assert len(run) == 1
    assert len(compiled.graphs) == 2


@torch.no_grad()
def test_blocks_compiled_alone_give_their_values(net):
    x = torch.randn(3, 8)
    with hl.record(net, SITES, copy=True) as eager:
        net(x)
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    net(x)
    with hl.record(net, SITES, copy=True) as run:
        net(x)
    for site in ("blocks.0@relu", "blocks.1@cat", "@mul"):
        assert torch.equal(eager[site], run[site])


def test_a_compiled_function_in_a_module_is_the_modules():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def helper(x):
        return torch.tanh(x) + 1

    class Caller(nn.Module):
        def forward(self, x):
            return helper(x) * 2

    model, x = Caller(), torch.randn(3)
    with hl.record(model, ["@tanh", "@mul"]) as run:
        model(x)
    assert torch.equal(run["@tanh"], torch.tanh(x))


class Attention(nn.Module):
    def forward(self, x):
        q, k, v = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["function", "method"])
def test_a_compiled_attention_itself_makes_each_call_once(backend, way):
    model, x = Attention(), torch.randn(2, 5, 24)
    sites = ["@q", "@pattern", "@z", "@scaled_dot_product_attention"]
    with hl.record(model, sites) as eager:
        bare = model(x)
    compiled = model
    if way == "method":
        model.compile(backend=backend, fullgraph=True)
    else:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        with hl.record(compiled, sites) as run:
            assert torch.equal(compiled(x), bare)
        for site in sites:
            (value,) = run.calls(site)
            assert torch.equal(value, eager[site]), site


class Loop(nn.Module):
    """Dynamo gives up on it, and then compiles what its eager code calls, each by itself."""

    def forward(self, x):
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x.sin() + x.cos()
        return x.exp()


def test_code_that_dynamo_gives_up_on_calls_its_own_functions():
    loop, x = Loop(), torch.randn(2, 3)
    compiled = torch.compile(loop, backend="eager")
    expected = loop(x)
    with hl.record(loop, ["@cos", "@exp"]) as run:
        assert torch.equal(compiled(x), expected)
    assert torch.equal(run["@exp"], expected)
    assert len(run.calls("@cos")) == 2
    with hl.edit(loop, "@exp", hl.edits.scale(2.0)):
        assert torch.equal(compiled(x), expected * 2)
    assert torch.equal(compiled(x), expected)
