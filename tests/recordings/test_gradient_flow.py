"""run.gradients(): norms, ratios, and what is dead or exploding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hookline as hl
from zoo import tanh_net


@pytest.fixture
def model():
    return tanh_net()


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def test_norms_ratios_and_shares_are_those_of_the_gradients(model, x):
    before = [p.detach().norm().item() for p in model.parameters()]
    with hl.record(model, ports="grad") as run:
        model(x).square().sum().backward()
    flow = run.gradients()
    assert [row.site for row in flow] == [f"{n}:grad" for n, _ in model.named_parameters()]
    for row, parameter, weight in zip(flow, model.parameters(), before, strict=True):
        grad = parameter.grad
        assert row.count == 1
        assert row.norm == pytest.approx(grad.norm().item(), rel=1e-5)
        assert row.largest == pytest.approx(grad.abs().max().item())
        assert row.zeros == (grad == 0).float().mean().item()
        assert row.ratio == pytest.approx(grad.norm().item() / weight, rel=1e-5)
        assert row.state == ""
    assert flow.dead == flow.exploding == []
    assert str(flow).endswith("no gradient is dead or exploding")
    assert flow["0.bias:grad"].site == "0.bias:grad"


def test_the_weight_is_measured_when_its_gradient_comes(model, x):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ratios = []
    with hl.record(model, "0.weight:grad") as run:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            weight = model[0].weight
            ratios.append((weight.grad.norm() / weight.norm()).item())
            optimizer.step()
    row = run.gradients()["0.weight:grad"]
    assert row.count == 3
    assert row.ratio == pytest.approx(sum(ratios) / 3, rel=1e-5)


def test_gradients_that_flow_between_modules_have_no_ratio(model, x):
    with hl.record(model, "1", ports=("grad_input", "grad_output")) as run:
        model(x).square().sum().backward()
    rows = list(run.gradients())
    assert [row.site for row in rows] == ["1:grad_input", "1:grad_output"]
    assert rows[0].norm == pytest.approx(run["1:grad_input"].norm().item(), rel=1e-5)
    assert rows[0].ratio is None


def test_the_norm_of_a_structure_is_that_of_all_its_tensors():
    lstm = nn.LSTM(3, 4)
    with hl.record(lstm, "", ports="grad_output") as run:
        out, (h, _) = lstm(torch.randn(5, 2, 3))
        (out.sum() + 2 * h.sum()).backward()
    (row,) = run.gradients()
    # What is not used has no gradient; out has ones, h twos.
    assert row.norm == pytest.approx(math.sqrt(5 * 2 * 4 + 4 * 2 * 4), rel=1e-5)


def test_what_is_zero_everywhere_or_gets_nothing_is_dead(model, x):
    model.unused = nn.Linear(2, 2)  # in a Sequential it would run
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with hl.edit(model, "1:grad_output", torch.zeros_like), hl.record(model, ports="grad") as run:
        model(x).square().sum().backward()
    flow = run.gradients()
    assert flow.dead == [
        "0.weight:grad", "0.bias:grad", "unused.weight:grad", "unused.bias:grad",
    ]  # fmt: skip
    assert flow["0.weight:grad"].zeros == 1
    assert flow["unused.bias:grad"].count == 0
    assert "no gradient flowed back to it" in flow["unused.bias:grad"].why
    assert "4 dead: 0.weight:grad" in str(flow)


def test_a_table_says_100_percent_of_zeros_alone():
    model = nn.Sequential(nn.Embedding(2000, 2), nn.Linear(2, 1))
    with hl.record(model, "0", ports="grad") as run:
        model(torch.tensor([3, 7])).sum().backward()
    assert run.gradients()["0.weight:grad"].zeros == 0.999
    assert str(run.gradients()).splitlines()[1].endswith(" 99.9 %")


def test_a_single_number_that_is_zero_is_all_zeros():
    model = nn.Linear(2, 1)
    with hl.record(model, "bias:grad") as run:
        (model(torch.ones(3, 2)) * 0).sum().backward()
    assert run.gradients()["bias:grad"].zeros == 1


def test_a_gradient_without_elements_is_none_and_not_dead():
    model = nn.Identity()  # as an expert without tokens, or a rank without a part of a parameter
    with hl.record(model, "", ports="grad_output") as run:
        model(torch.ones(0, 3, requires_grad=True)).sum().backward()
    (row,) = run.gradients()
    assert (row.count, row.state, row.why) == (1, "none", "no elements here")
    assert run.gradients().dead == []


def test_what_is_frozen_is_none_and_not_dead(model, x):
    model[0].requires_grad_(False)
    with hl.record(model, ports=("grad", "grad_output")) as run:
        model(x).square().sum().backward()
    flow = run.gradients()
    assert [row.site for row in flow if row.state == "none"] == [
        "0:grad_output", "0.weight:grad", "0.bias:grad", "1:grad_output",
    ]  # fmt: skip
    assert flow.dead == []
    assert "frozen" in flow["0.bias:grad"].why
    assert "0.bias:grad" in str(flow)


@pytest.mark.parametrize(
    ("change", "site"),
    [
        (lambda g: g * math.inf, "2.bias:grad"),
        (lambda g: torch.full_like(g, math.nan), "2.bias:grad"),
        (lambda g: g * 1e6, "2.bias:grad"),
    ],
)
def test_what_is_not_finite_or_far_too_large_is_exploding(model, x, change, site):
    with hl.edit(model, site, change), hl.record(model, ports="grad") as run:
        model(x).square().sum().backward()
    flow = run.gradients()
    assert flow.exploding == [site]
    assert f"1 exploding: {site}" in str(flow)


def test_a_gradient_much_larger_than_others_is_exploding(x):
    layers = [nn.Linear(4, 4, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        layers[0].weight.mul_(1e-6)
        model[1].weight.copy_(torch.eye(4) * 1e6)
    with hl.record(model, ports="grad_output") as run:
        model(x).sum().backward()
    assert run.gradients().exploding == ["0:grad_output"]


@pytest.mark.parametrize("unit", [1e-24, 1e-40, 1e30])
def test_norms_of_tiny_and_huge_gradients_are_right(unit):
    model = nn.Sequential(nn.Identity())
    x = torch.ones(64, requires_grad=True)
    with hl.record(model, "0", ports="grad_output") as run:
        model(x).backward(torch.tensor([0.3, -0.4] * 32) * unit)
    (row,) = run.gradients()
    assert row.norm == pytest.approx(0.5 * 32**0.5 * unit, rel=1e-3, abs=0)


def test_norms_of_millions_of_elements_have_six_digits():
    model = nn.Identity()
    model.weight = nn.Parameter(torch.rand(2**21))
    with hl.record(model, "weight:grad") as run:
        (model.weight * torch.rand(2**21)).sum().backward()
    (row,) = run.gradients()
    weight, grad = (part.double().norm().item() for part in (model.weight, model.weight.grad))
    assert row.norm == pytest.approx(grad, rel=1e-6)  # torch's has four, or fewer on one thread
    assert row.ratio == pytest.approx(grad / weight, rel=1e-6)


def test_half_precision_does_not_overflow(x):
    model = nn.Linear(4, 4).half()
    with hl.record(model, "", ports="grad_output") as run:
        (model(x.half()) * 30000).sum().backward()
    (row,) = run.gradients()
    assert row.norm == pytest.approx(30000 * math.sqrt(12), rel=1e-2)
    assert row.state == ""


def test_a_saved_recording_gives_the_same_table(model, x, tmp_path):
    model[0].weight.requires_grad_(False)
    with hl.record(model, ports=("grad", "grad_output")) as run:
        model(x).square().sum().backward()
    run.save(tmp_path / "run")
    assert list(hl.open(tmp_path / "run").gradients()) == list(run.gradients())


def test_without_gradients_the_remedy_is_said(model, x):
    with hl.record(model, "0") as run:
        model(x)
    with pytest.raises(hl.NotRecordedError, match="ports='grad'"):
        run.gradients()
    with hl.record(model, ports="grad") as run:
        model(x).sum().backward()
    with pytest.raises(hl.NotRecordedError, match="must be a row of this table, got"):
        run.gradients()["nothing"]


def test_a_table_without_a_backward_says_so():
    model = nn.Linear(2, 2)
    with pytest.warns(hl.HooklineWarning), hl.record(model, ports="grad") as run:
        model(torch.ones(1, 2))
    assert str(run.gradients()).splitlines()[-1].startswith("no gradient was seen: call backward")
