"""torch.compile: models that are compiled in pieces, with eager code or other pieces between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import config

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    before = config.skip_nnmodule_hook_guards
    yield
    assert config.skip_nnmodule_hook_guards is before
    torch.compiler.reset()


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), nn.Tanh()

    def forward(self, x):
        return self.act(self.linear(x))


class Broken(Step):
    def forward(self, x):
        x = self.linear(x)
        torch._dynamo.graph_break()
        return self.act(x)


class EagerBetween(nn.Module):
    """One block: in compiled code, in eager code, in compiled code."""

    def __init__(self):
        super().__init__()
        self.block = Step()

    @torch.compiler.disable
    def eager(self, x):
        return self.block(x)

    def forward(self, x):
        return self.block(self.eager(self.block(x)))


class PartBetween(EagerBetween):
    """One block: in the model's code, in that of a part compiled by itself, in the model's."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(self.block, nn.ReLU())

    @torch.compiler.disable
    def eager(self, x):
        return self.part(x)


class Long(nn.Module):
    """A block that graphs break in, more often than dynamo compiles: the last calls are eager."""

    def __init__(self):
        super().__init__()
        self.block = Broken()

    def forward(self, x):
        for _ in range(10):
            x = self.block(x)
        return x


def compiled(model):
    part = getattr(model, "part", None)
    if part is not None:
        part.compile(backend="aot_eager")
    return torch.compile(model, backend="aot_eager")


def backward(model, x=X):
    model.zero_grad()
    model(x).sum().backward()


def same(found, expected):
    assert list(found) == list(expected)
    torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=0)
    return True


@pytest.mark.parametrize("kind", [EagerBetween, PartBetween, Long])
def test_calls_are_numbered_as_they_run(kind):
    torch.manual_seed(0)
    model, found = kind(), []
    for run in (model, compiled(model)):
        for sites in ("block", "block#1", "block#2"):
            ports = ("output", "grad_output") + ("input",) * ("#" in sites)
            with hl.record(model, sites, ports=ports) as seen:
                backward(run)
            found.append(dict(seen.items()))
    assert len(found[1]) == 3
    for eager, other in zip(found[:3], found[3:], strict=True):
        assert same(other, eager)
    assert not len(hl.inventory(model))


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("port", ["output", "grad_output"])
@pytest.mark.parametrize("kind", [EagerBetween, PartBetween, Long])
def test_one_call_is_edited(kind, port, call):
    torch.manual_seed(0)
    model, found = kind(), []
    for run in (model, compiled(model)):
        with hl.edit(model, f"block:{port}#{call}", lambda value: value * 2) as line:
            backward(run)
        assert line.report().fired[0][1] == 1
        weight = model.block.linear.weight.grad
        found.append({"weight": weight.clone(), "y": model(X).detach()})
    assert same(found[1], found[0])
    backward(model)
    assert not torch.equal(model.block.linear.weight.grad, found[0]["weight"])


def test_the_settings_of_dynamo_are_put_back_whichever_of_two_lines_ends_its_pass_first():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Step()
            self.fast = torch.compile(lambda x: self.inner(x), backend="aot_eager", fullgraph=True)

        def forward(self, x):
            return self.fast(x)

    model = Inside()
    before = config.skip_nnmodule_hook_guards
    for _ in range(2):
        with hl.edit(model, "inner", lambda v: v * 2), hl.record(model, "inner.act") as seen:
            out = model(X)
        assert config.skip_nnmodule_hook_guards is before
        torch.testing.assert_close(seen["inner.act"] * 2, out, rtol=0, atol=0)
