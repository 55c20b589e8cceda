"""check, monitor and profile change no bit in any regime, and see what a recording sees."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import hookline as hl

X = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A residual block; its parts are functions and modules."""

    def __init__(self):
        super().__init__()
        self.fc, self.act, self.out = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.out(self.act(self.fc(x)))


class Net(nn.Module):
    def __init__(self, around=lambda block, x: block(x)):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)
        self.around = around

    def forward(self, x):
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)


class Twice(nn.Module):
    """A module that calls itself."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, depth=0):
        return self.fc(x) if depth else self(x.tanh(), 1)


def train(model, x=X):
    """One forward and backward; the output and all gradients."""
    out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return train(model)


def compiled(model):
    torch._dynamo.reset()
    return train(torch.compile(model, backend="aot_eager"))


def frozen(model):
    with torch.no_grad():
        return [model(X)]


def functional(model):
    weights = dict(model.named_parameters())

    def loss(weights):
        return torch.func.functional_call(model, weights, (X,)).square().mean()

    return list(torch.func.grad(loss)(weights).values())


def vmapped(model):
    return [torch.func.vmap(model)(X).detach()]


def in_a_thread(model):
    found = []
    other = threading.Thread(target=lambda: found.extend(train(copy.deepcopy(model))))
    other.start()
    mine = train(model)
    other.join()
    return [*mine, *found]


def replaced(model):
    plain = model.blocks[0].forward
    model.blocks[0].forward = lambda x: plain(x) * 2
    try:
        return train(model)
    finally:
        del model.blocks[0].forward


def again(kind):
    return lambda block, x: checkpoint(block, x, use_reentrant=kind)


def leading(model):
    return train(model, X.clone().requires_grad_())


REGIMES = {
    "autocast": (Net, autocast),
    "checkpointing": (lambda: Net(again(False)), train),
    "checkpointing, reentrant": (lambda: Net(again(True)), leading),
    "torch.compile": (Net, compiled),
    "encoder layers, with gradients": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), train,
    ),
    "torch.func.grad, vjp": (Net, functional),
    "torch.func.vmap": (Net, vmapped),
    "lazy modules, before their first run": (
        lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2)), train,
    ),
    "parametrized weights": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2)),
        train,
    ),
    "torch.fx.GraphModule": (lambda: torch.fx.symbolic_trace(Net()), train),
    "AveragedModel (EMA, SWA)": (lambda: AveragedModel(Net()), train),
    "a forward replaced on the instance": (Net, replaced),
    "modules that call themselves": (Twice, train),
    "threads, one model": (Net, in_a_thread),
    "no_grad, inference_mode": (Net, frozen),
    "attributes of their own": (lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 2)),
                                lambda model: train(model, X.clone())),
}  # fmt: skip

CHECKED = pytest.mark.parametrize("regime", REGIMES)


def made(regime):
    """The model, and what runs it."""
    build, run = REGIMES[regime]
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(2)
    return model, run


def unchanged(regime, verb):
    """Run under a verb, compare all numbers with those of a bare run, and return what it gave."""
    model, run = made(regime)
    expected = run(model)
    model, run = made(regime)
    with verb(model) as given:
        found = run(model)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    return given


@pytest.mark.cell("autocast", "check")
@pytest.mark.cell("activation checkpointing", "check")
@pytest.mark.cell("torch.compile", "check")
@pytest.mark.cell("TransformerEncoder, with gradients", "check")
@pytest.mark.cell("torch.func.grad, vjp", "check")
@pytest.mark.cell("torch.func.vmap", "check")
@pytest.mark.cell("lazy modules, before their first run", "check")
@pytest.mark.cell("parametrized weights", "check")
@pytest.mark.cell("torch.fx.GraphModule", "check")
@pytest.mark.cell("AveragedModel (EMA, SWA)", "check")
@pytest.mark.cell("a forward replaced on the instance", "check")
@pytest.mark.cell("modules that call themselves recursively", "check")
@pytest.mark.cell("several threads that share a model", "check")
@pytest.mark.cell("no_grad, inference_mode", "check")
@pytest.mark.cell("modules with their own `__getattr__`, `__setattr__`", "check")
@pytest.mark.compiles
@CHECKED
def test_check_changes_no_bit_and_finds_nothing(regime):
    assert unchanged(regime, hl.check).findings == []


@pytest.mark.cell("autocast", "profile")
@pytest.mark.cell("activation checkpointing", "profile")
@pytest.mark.cell("torch.compile", "profile")
@pytest.mark.cell("TransformerEncoder, with gradients", "profile")
@pytest.mark.cell("torch.func.grad, vjp", "profile")
@pytest.mark.cell("torch.func.vmap", "profile")
@pytest.mark.cell("lazy modules, before their first run", "profile")
@pytest.mark.cell("parametrized weights", "profile")
@pytest.mark.cell("torch.fx.GraphModule", "profile")
@pytest.mark.cell("AveragedModel (EMA, SWA)", "profile")
@pytest.mark.cell("a forward replaced on the instance", "profile")
@pytest.mark.cell("modules that call themselves recursively", "profile")
@pytest.mark.cell("several threads that share a model", "profile")
@pytest.mark.cell("no_grad, inference_mode", "profile")
@pytest.mark.cell("modules with their own `__getattr__`, `__setattr__`", "profile")
@pytest.mark.compiles
@CHECKED
def test_profile_changes_no_bit_and_times_each_module_that_ran(regime):
    prof = unchanged(regime, hl.profile)
    assert prof.total.passes >= 1
    assert prof.total.time.all > 0
    assert any(row.calls for row in prof.rows)


@pytest.mark.cell("autocast", "monitor")
@pytest.mark.cell("activation checkpointing", "monitor")
@pytest.mark.cell("torch.compile", "monitor")
@pytest.mark.cell("TransformerEncoder, with gradients", "monitor")
@pytest.mark.cell("lazy modules, before their first run", "monitor")
@pytest.mark.cell("parametrized weights", "monitor")
@pytest.mark.cell("torch.fx.GraphModule", "monitor")
@pytest.mark.cell("AveragedModel (EMA, SWA)", "monitor")
@pytest.mark.cell("a forward replaced on the instance", "monitor")
@pytest.mark.cell("modules that call themselves recursively", "monitor")
@pytest.mark.cell("several threads that share a model", "monitor")
@pytest.mark.cell("no_grad, inference_mode", "monitor")
@pytest.mark.cell("modules with their own `__getattr__`, `__setattr__`", "monitor")
@pytest.mark.compiles
@CHECKED
def test_monitor_changes_no_bit_and_measures_what_is_recorded(regime):
    seen = unchanged(regime, partial(hl.monitor, ports="output"))
    model, run = made(regime)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a recording: what it could not see
        with hl.record(model, copy=True) as recorded:
            run(model)
    measured = 0
    for site in seen.sites:
        values = [value for one in recorded.passes for value in one.calls(site)]
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            continue
        whole = torch.cat([value.detach().double().flatten() for value in values])
        mean = seen[site].mean[-1]
        assert math.isclose(mean, whole.mean(), rel_tol=1e-5, abs_tol=1e-6), site
        measured += 1
    assert measured >= 1 or regime in ("torch.func.grad, vjp", "torch.func.vmap")
