"""A value that is not finite, planted in twelve ways, is named at its operation and its line."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Between(nn.Module):
    """A function between two linear layers, in the module `mid`."""

    def __init__(self, function, *, is_checkpointed=False, reentrant=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mid = Applied(function)
        self.is_checkpointed, self.reentrant = is_checkpointed, reentrant

    def forward(self, x):
        x = self.first(x)
        if self.is_checkpointed:
            x = checkpoint(self.mid, x, use_reentrant=self.reentrant)
        else:
            x = self.mid(x)
        return self.last(x)


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def train(model, x=X, *, lr=0.1, steps=2, run=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        (model if run is None else run)(x).square().mean().backward()
        optimizer.step()


def found(model, action):
    """The finding of the error that the action raises under a check."""
    before = torch.get_rng_state()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model):
        action()
    assert torch.equal(torch.get_rng_state(), before)
    assert len(str(caught.value).splitlines()) <= 3
    return caught.value.finding


def planted_at(finding):
    """The word behind `# planted` on the line that a finding names."""
    return finding.line.text.partition("# planted ")[2]


def test_zero_by_zero_in_a_norm():
    def norm(x):
        x = x * 0
        return x / x.norm(dim=-1, keepdim=True)  # planted norm

    model = Between(norm)
    finding = found(model, lambda: train(model))
    assert (finding.kind, finding.path, finding.call, finding.step) == ("forward", "mid", 0, 0)
    assert (finding.operation, planted_at(finding)) == ("aten.div.Tensor", "norm")
    assert (finding.n_nan, finding.n_inf, finding.n_total) == (12, 0, 12)
    assert finding.passed_on == ("last",)


def test_the_logarithm_of_a_negative_number():
    model = Between(lambda x: x.log())  # planted log
    finding = found(model, lambda: train(model))
    assert (finding.operation, finding.function) == ("aten.log.default", "log")
    assert (finding.path, planted_at(finding)) == ("mid", "log")
    with torch.no_grad():
        negative = int((model.first(X) < 0).sum())
    assert (finding.n_nan, finding.n_total) == (negative, 12)
    assert finding.inputs[0].moments.min < 0


def test_an_overflow_in_float16():
    def wide(x):
        return (x.half() * 60_000 + 60_000 * x.sign().half()).float()  # planted overflow

    model = Between(wide)
    finding = found(model, lambda: train(model))
    assert (finding.path, planted_at(finding)) == ("mid", "overflow")
    assert finding.operation in ("aten.mul.Tensor", "aten.add.Tensor")
    assert finding.n_inf
    assert not finding.n_nan
    assert finding.inputs[0].dtype == "float16"


def test_a_poisoned_weight():
    model = Between(torch.tanh)

    def poison_and_run():
        model(X)
        with torch.no_grad():
            model.last.weight[1, 2] = math.nan
        model(X)

    finding = found(model, poison_and_run)
    assert (finding.kind, finding.path, finding.step) == ("parameter", "last.weight", 1)
    assert (finding.n_nan, finding.n_total) == (1, 16)
    assert finding.suspect == "parameter last.weight"
    assert finding.line.text == "return self.last(x)"
    assert finding.operation in ("aten.t.default", "aten.addmm.default")


def test_of_several_poisoned_weights_the_first_one_is_named():
    model = Between(torch.tanh)

    def poison_and_run():
        with torch.no_grad():
            for parameter in (model.last.bias, model.first.weight, model.last.weight):
                parameter.fill_(math.nan)
        model(X)

    finding = found(model, poison_and_run)
    assert (finding.kind, finding.path) == ("parameter", "first.weight")


def test_a_poisoned_batch():
    model = Between(torch.tanh)
    x = X.clone()
    x[1] = math.inf
    finding = found(model, lambda: train(model, x))
    assert (finding.kind, finding.path) == ("input", "(root):input")
    assert (finding.n_inf, finding.n_total) == (4, 12)
    assert finding.line.text == "x = self.first(x)"
    assert finding.operation


def test_an_exploding_learning_rate():
    model = Between(lambda x: x * x)
    finding = found(model, lambda: train(model, lr=1e25, steps=5))
    assert finding.kind in ("forward", "backward")
    assert finding.step > 0
    assert finding.operation
    assert finding.line.filename == __file__
    assert any(one.moments.max_abs > 1e10 for one in finding.parameters + finding.inputs)


def test_attention_that_is_masked_out_whole():
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[:, 1] = False  # one padded key
    mask[2] = False  # and a query that may look at nothing

    def attend(x):
        scores = x @ x.T
        scores = scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ x  # planted softmax

    model = Between(attend)
    finding = found(model, lambda: train(model))
    assert (finding.path, planted_at(finding)) == ("mid", "softmax")
    assert (finding.operation, finding.function) == ("aten._softmax.default", "softmax")
    assert (finding.n_nan, finding.n_total) == (3, 9)


def test_the_root_of_zero_in_backward():
    def root(x):
        return (x * 0).sqrt() + x  # planted root

    model = Between(root)
    finding = found(model, lambda: train(model))
    assert (finding.kind, finding.path, finding.step) == ("backward", "mid", 0)
    assert (finding.operation, finding.function) == ("aten.div.Tensor", "SqrtBackward0")
    assert planted_at(finding) == "root"


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.inner(x) * self.scale  # planted buffer


def test_a_nan_in_a_buffer():
    model = nn.Sequential(nn.Linear(4, 4), Scaled())

    def poison_and_run():
        model(X)
        model[1].scale[3] = math.nan
        model(X)

    finding = found(model, poison_and_run)
    assert (finding.kind, finding.path, finding.step) == ("buffer", "1.scale", 1)
    assert (finding.n_nan, finding.operation) == (1, "aten.mul.Tensor")
    assert planted_at(finding) == "buffer"


@pytest.mark.parametrize("by", ["torch.compile", "model.compile", "part"])
def test_inside_compiled_code(by, fresh_dynamo):
    from torch._dynamo.utils import counters

    model = Between(lambda x: (x - 100).log())  # planted compiled
    run = model
    if by == "torch.compile":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif by == "model.compile":
        model.compile(backend="aot_eager")
    else:
        model.mid.compile(backend="aot_eager")
    finding = found(model, lambda: train(model, run=run))
    assert (finding.operation, finding.path) == ("aten.log.default", "mid")
    assert (finding.n_nan, planted_at(finding)) == (12, "compiled")
    assert not counters["graph_break"]  # the repetition compiles nothing


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant):
    model = Between(
        lambda x: x.log(),  # planted checkpointed
        is_checkpointed=True,
        reentrant=reentrant,
    )
    finding = found(model, lambda: train(model))
    assert (finding.operation, finding.path, finding.call) == ("aten.log.default", "mid", 0)
    assert planted_at(finding) == "checkpointed"


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_the_backward_under_checkpointing(reentrant):
    model = Between(
        lambda x: (x * 0).sqrt() + x,  # planted behind
        is_checkpointed=True,
        reentrant=reentrant,
    )
    finding = found(model, lambda: train(model))
    assert (finding.kind, finding.step) == ("backward", 0)
    assert (finding.operation, finding.path) == ("aten.div.Tensor", "mid")
    assert planted_at(finding) == "behind"
