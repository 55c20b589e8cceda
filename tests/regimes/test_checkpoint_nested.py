"""Checkpoints within checkpoints, of both kinds and in any order: as the model without them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hookline as hl
from thoroughness import examples

# Torch says it of each reentrant region that the first run of another one holds.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
PORTS = ("grad_input", "grad_output")


def plainly(function, value, is_reentrant):
    return function(value)


def checkpointed(function, value, is_reentrant):
    return checkpoint(function, value, use_reentrant=is_reentrant)


class Net(nn.Module):
    """Runs its layers as told: a number is a layer, a triple is a region.

    A region is (whether it is reentrant, whether its input is added, what is in it).
    """

    def __init__(self, parts, way) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]).double()
        self.parts, self.way = parts, way

    def run(self, parts, value):
        for part in parts:
            if isinstance(part, int):
                value = self.layers[part](value)
                continue
            is_reentrant, is_residual, inner = part
            new = self.way(partial(self.run, inner), value, is_reentrant)
            value = new + value if is_residual else new
        return value

    def forward(self, x):
        return self.run(self.parts, x)


def step(net):
    """The gradients of the input and of the parameters."""
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    net(x * 1).square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


def layers_in(parts):
    return {n for part in parts for n in ([part] if isinstance(part, int) else layers_in(part[2]))}


LAYER = st.integers(0, 2)
PARTS = st.recursive(
    st.lists(LAYER, min_size=1, max_size=3),
    lambda inner: st.lists(
        st.one_of(LAYER, st.tuples(st.booleans(), st.booleans(), inner)), min_size=1, max_size=3
    ),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(PARTS)
def test_gradients_recorded_are_those_without_checkpoints(parts):
    found = []
    for way in (plainly, checkpointed):
        net = Net(parts, way)
        sites = [f"layers.{n}:{port}" for n in sorted(layers_in(parts)) for port in PORTS]
        with hl.record(net, sites) as run:
            grads = step(net)
        found.append((grads, [run.calls(site) for site in sites], run.report().fired))
    assert_close(found[0][:2], found[1][:2])
    assert found[0][2] == found[1][2]


CHANGES = {
    "edit": lambda net, site: hl.edit(net, site, lambda grad: grad * 3 + 1),
    "clip": lambda net, site: hl.clip(net, site, norm=1e-3),
}


def raw(net, site, stack):
    path, port = site.split(":")
    line = stack.enter_context(hl.attach(net))
    if port == "grad_input":
        line.backward(path, lambda module, grad_input, grad_output: (grad_input[0] * 3,))
    else:
        line.backward_pre(path, lambda module, grad_output: (grad_output[0] * 3,))
    return line


@settings(max_examples=examples(100), deadline=None)
@given(PARTS, LAYER, st.sampled_from(PORTS), st.sampled_from([*CHANGES, "raw hook"]))
def test_gradients_changed_are_those_without_checkpoints(parts, n, port, change):
    n = n if n in layers_in(parts) else min(layers_in(parts))
    found = []
    for way in (plainly, checkpointed):
        net, site = Net(parts, way), f"layers.{n}:{port}"
        with ExitStack() as stack:
            if change == "raw hook":
                line = raw(net, site, stack)
            else:
                line = stack.enter_context(CHANGES[change](net, site))
            grads = step(net)
        report = line.report()
        counts = [(row.seen, row.clipped) for row in report] if change == "clip" else report.fired
        found.append((grads, counts))
    assert_close(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    with pytest.raises(AssertionError):
        assert_close(step(Net(parts, plainly)), found[0][0])


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("is_reentrant", [True, False])
def test_the_innermost_stretchs_first_module_has_its_grad_input(depth, is_reentrant):
    parts = [2]
    for n in range(depth):
        parts = [n % 2, (is_reentrant, False, parts)]
    found = []
    for way in (plainly, checkpointed):
        net = Net(parts, way)
        with hl.record(net, "layers.2:grad_input") as run:
            step(net)
        found.append(run["layers.2:grad_input"])
        net.zero_grad()
        with hl.edit(net, "layers.2:grad_input", torch.zeros_like):
            grads = step(net)
        assert not any(grad.any() for grad in grads[:3])  # of what is before it
        assert grads[3].any()
    assert_close(*found)
