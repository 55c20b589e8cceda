"""A batched backward (`is_grads_batched=True`, `vectorize=True`): as under `torch.vmap`."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian
from torch.testing import assert_close

import hookline as hl


class Two(nn.Module):
    def forward(self, x):
        return x.sin(), x * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.two, self.last = nn.Linear(3, 3), Two(), nn.Linear(3, 2)

    def forward(self, x):
        a, b = self.two(self.first(x).tanh())
        return self.last(a + b)


X = torch.tensor([0.3, -1.0, 2.0])
SITES = ["first:grad_output", "two:grad_output", "two:grad_input", "last:grad_input"]


def by_older_vmap(net, **options):
    x = X.clone().requires_grad_()
    (rows,) = torch.autograd.grad(net(x), x, torch.eye(2), is_grads_batched=True, **options)
    return rows


def by_jacobian(net, **options):
    return jacobian(net, X, vectorize=True, **options)


def by_vmap(net):
    x = X.clone().requires_grad_()
    y = net(x)
    return torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(2))


batched = pytest.mark.parametrize("backward", [by_older_vmap, by_jacobian])
OPTIONS = {
    "plain": {},
    "copy": {"copy": True},
    "keep": {"keep": lambda grad: (grad.detach().norm(), grad[1:])},
    "dtype": {"dtype": torch.float64},
}


@batched
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("has_graph", [False, True])
def test_recorded_gradients_have_the_batch_in_front(backward, option, has_graph):
    net, records = Net(), {}
    for function in (lambda net: backward(net, create_graph=has_graph), by_vmap):
        with hl.record(net, SITES, **OPTIONS[option]) as run:
            function(net)
        records[function] = {site: run[site] for site in SITES}
    got, want = records.values()
    assert_close(got, want)
    if option == "plain":
        assert got["first:grad_output"].shape == (2, 3)


@batched
def test_gradients_with_a_graph_can_be_differentiated(backward):
    net = Net()
    with hl.record(net, "two:grad_input", keep=torch.tanh, detach=False) as run:
        backward(net, create_graph=True)
    run["two:grad_input"].sum().backward()
    assert net.last.weight.grad.abs().sum() > 0


def test_values_stay_whole_inside_a_later_transform():
    net = Net()
    with hl.record(net, SITES, keep=lambda grad: grad * 1) as run:
        by_older_vmap(net)
        shape = []
        torch.vmap(lambda x: shape.append(run["first:grad_output"].shape) or x)(torch.eye(2))
    assert shape == [(2, 3)]


def test_a_second_derivative_records_both_backwards():
    net = Net()
    with hl.record(net, "first:grad_output") as run:
        hessian(lambda x: net(x).square().sum(), X, vectorize=True)
    shapes = [back["first:grad_output"].shape for back in run.passes[0].backwards]
    assert shapes == [(3,), (3, 3)]


CHANGES = {
    "scaled": lambda net, site: hl.edit(net, site, hl.edits.scale(2)),
    "clamped": lambda net, site: hl.edit(net, site, lambda grad: grad.clamp(-0.1, 0.1)),
    "by its norm": lambda net, site: hl.edit(net, site, lambda grad: grad / grad.norm()),
    "the same for all": lambda net, site: hl.edit(net, site, lambda grad: torch.ones(3)),
    "left": lambda net, site: hl.edit(net, site, lambda grad: None if grad.dim() else grad),
    "clip by value": lambda net, site: hl.clip(net, site, value=0.1),
    "clip by norm": lambda net, site: hl.clip(net, site, norm=0.1),
    "clip by largest": lambda net, site: hl.clip(net, site, norm=0.1, norm_type=float("inf")),
}


@batched
@pytest.mark.filterwarnings("ignore:hl.edit changed nothing")
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("change", CHANGES)
def test_each_example_is_changed_by_itself(backward, change, site):
    net, results = Net(), []
    for function in (backward, by_vmap):
        with hl.record(net, SITES) as run, CHANGES[change](net, site):
            results.append((function(net), {name: run[name] for name in SITES}))
    assert_close(*results)


def test_clip_counts_each_example():
    net = Net()
    with hl.clip(net, "first", norm=1e-3, ports="grad_output") as line:
        by_older_vmap(net)
    assert (line.report().seen, line.report().clipped) == (2, 2)


def test_an_edit_of_a_wrong_form_is_refused():
    net = Net()
    with hl.edit(net, "first:grad_output", lambda grad: grad[1:]):
        with pytest.raises(hl.StructureError, match="change the gradient's form"):
            by_older_vmap(net)


LOOKS = {
    "check": lambda net: hl.check(net, also=["dead"]),
    "monitor": lambda net: hl.monitor(net, "first", ports="grad_output"),
    "watch": lambda net: hl.watch(net, ports=("output", "grad_output"), file=io.StringIO()),
    "profile": hl.profile,
    "clip of all": lambda net: hl.clip(net, total_norm=1.0),
    "a parameter": lambda net: hl.record(net, "last.weight:grad"),
}


@batched
@pytest.mark.filterwarnings("ignore::hookline.errors.HooklineWarning")
@pytest.mark.parametrize("verb", LOOKS)
def test_verbs_that_look_change_nothing(backward, verb):
    net = Net()
    want = backward(net)
    with LOOKS[verb](net):
        assert_close(backward(net), want, rtol=0, atol=0)


def test_a_parameters_gradient_has_the_batch_in_front():
    net = Net()
    with hl.record(net, "last.bias:grad") as run:
        torch.autograd.grad(net(X), net.last.bias, torch.eye(2), is_grads_batched=True)
    assert_close(run["last.bias:grad"], torch.eye(2))


@batched
def test_raw_hooks_are_called_as_those_of_torch(backward):
    net = Net()

    def times_two(module, *grads):
        return tuple(grad * 2 for grad in grads[0])

    def attach(stack):
        line = stack.enter_context(hl.attach(net))
        line.backward("first", times_two)
        line.backward_pre("last", times_two)
        line.backward("two", times_two)

    want = backward(net)
    with contextlib.ExitStack() as stack:
        attach(stack)
        assert_close(backward(net), want * 8)


@batched
def test_a_view_written_in_place_is_told(backward):
    class Views(nn.Module):
        def forward(self, x):
            return (x * 1).view(3)

    net = Net()
    net.two = Views()
    net.forward = lambda x: net.last(net.two(net.first(x)).mul_(2))
    with pytest.warns(hl.HooklineWarning, match="it is a view that was changed in place later"):
        with hl.record(net, "two:grad_output"):
            backward(net)
    with pytest.raises(hl.AttachError, match="two:grad_output cannot be changed"):
        with hl.edit(net, "two:grad_output", lambda grad: grad * 2):
            backward(net)
