"""Operations and the parts of attention in checkpoints, compiled code, torch.func and threads."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookline as hl

PARTS = [f"0@{name}" for name in ("q", "k", "v", "scores", "pattern", "z")]
SITES = [*PARTS, "0@unflatten", "1@add", "1@tanh"]
GRADIENTS = [f"{site}:grad_output" for site in ("0@q", "0@pattern", "0@z", "1@tanh")]
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.fc(x)) + x


class Net(nn.Sequential):
    """Two modules, each in a checkpoint of its own if a kind is given."""

    kind: bool | None = None

    def forward(self, x):
        for part in self:
            run = part if self.kind is None else partial(checkpoint, part, use_reentrant=self.kind)
            x = run(x)
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net(Attention(), Gate())


def _seen(model, x=X):
    """Return what is recorded, forward and backward, and the gradients of model and input."""
    x = x.clone().requires_grad_()
    with hl.record(model, [*SITES, *GRADIENTS], copy=True) as run:
        model(x).square().sum().backward()
    values = {site: run.calls(site) for site in [*SITES, *GRADIENTS]}
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return values, grads


def _halved(model):
    """Return output and gradients under edits of a part, an operation and a gradient."""
    half = hl.edits.scale(0.5)
    x = X.clone().requires_grad_()
    changes = {"0@pattern": half, "1@tanh": half, "0@q:grad_output": half}
    with hl.edit(model, changes):
        out = model(x)
        out.square().sum().backward()
    grads = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return out, grads


def _is_same(found, expected):
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cell(
    "operations in checkpoints", "record", "gradients", "edit", "edit gradients", "statistics"
)
@pytest.mark.parametrize("kind", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpoints_show_operations_once_as_plain_runs(net, kind):
    seen, changed = _seen(net), _halved(net)
    net.kind = kind
    _is_same(_seen(net), seen)
    _is_same(_halved(net), changed)
    peak = hl.by_query(lambda pattern: pattern.amax(-1))
    with hl.record(net, "0@pattern", keep=peak) as run:
        net(X.clone().requires_grad_()).sum().backward()
    _is_same(run["0@pattern"], seen[0]["0@pattern"][0].amax(-1))


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.cell(
    "operations in checkpoints, in compiled code", "record", "gradients", "edit", "edit gradients"
)
def test_compiled_checkpoints_show_operations_as_plain_runs(net):
    seen, changed = _seen(net), _halved(net)
    net.kind = False
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    _is_same(_seen(compiled), seen)
    _is_same(_halved(compiled), changed)


@pytest.mark.compiles
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.cell(
    "operations inside modules, in compiled code", "edit gradients", "features", "watch"
)
def test_compiled_parts_are_the_eager_ones(net, capsys):
    seen, changed = _seen(net), _halved(net)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    _is_same(_seen(compiled), seen)
    _is_same(_halved(compiled), changed)
    _is_same(hl.features(compiled, X, "0@pattern")["0@pattern"], seen[0]["0@pattern"][0])
    with hl.watch(compiled, "0@pattern"):
        compiled(X)
    assert "0@pattern" in capsys.readouterr().out


@pytest.mark.cell("operations under torch.func", "record", "gradients", "edit", "edit gradients")
def test_transforms_show_operations_as_autograd_does(net):
    (values, grads), (_, changed) = _seen(net), _halved(net)
    with hl.record(net, [*SITES, *GRADIENTS], copy=True) as run:
        of_x = grad(lambda x: net(x).square().sum())(X)
    _is_same({site: run.calls(site) for site in values}, values)
    _is_same(of_x, grads[0])
    half = hl.edits.scale(0.5)
    with hl.edit(net, {"0@pattern": half, "1@tanh": half, "0@q:grad_output": half}):
        state = dict(net.named_parameters())
        of_state = grad(lambda state: functional_call(net, state, (X,)).square().sum())(state)
    _is_same(list(of_state.values()), changed[1:])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.cell("operations under torch.func", "record", "edit")
def test_vmap_shows_operations_of_the_whole_batch(net):
    (values, _), (changed, _) = _seen(net), _halved(net)
    with hl.record(net, SITES, copy=True) as run:
        vmap(net)(X[:, None])
    for site in SITES:  # vmap has one dimension more
        _is_same(run[site].reshape(values[site][0].shape), values[site][0])
    half = hl.edits.scale(0.5)
    with hl.edit(net, {"0@pattern": half, "1@tanh": half}):
        _is_same(vmap(net)(X[:, None])[:, 0], changed)


@pytest.mark.cell("operations in several threads", "record", "gradients", "edit", "edit gradients")
def test_threads_see_only_their_own_operations(net):
    seen, changed = _seen(net), _halved(net)
    results, together = {}, threading.Barrier(3)

    def record():
        together.wait(10)
        results["record"] = [_values_of(net) for _ in range(5)]

    def edit():
        together.wait(10)
        with hl.edit(net, {"0@pattern": hl.edits.scale(0.5), "1@tanh": hl.edits.scale(0.5)}):
            results["edit"] = [net(X) for _ in range(5)]

    def plain():
        together.wait(10)
        results["plain"] = [net(X) for _ in range(5)]

    threads = [threading.Thread(target=target) for target in (record, edit, plain)]
    bare = net(X)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for values in results["record"]:
        for site in SITES:
            assert torch.equal(values[site], seen[0][site][0]), site
        for site in GRADIENTS:
            _is_same(values[site], seen[0][site][0])
    assert all(torch.equal(out, bare) for out in results["plain"])
    for out in results["edit"]:
        _is_same(out, changed[0])


def _values_of(model):
    x = X.clone().requires_grad_()
    with hl.record(model, [*SITES, *GRADIENTS], copy=True) as run:
        torch.autograd.grad(model(x).square().sum(), x)
    return {site: run[site] for site in [*SITES, *GRADIENTS]}
