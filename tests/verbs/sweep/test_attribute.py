"""hl.attribute: exact where the metric is linear, and known to fail where it is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)).double().eval()


def draw(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, CLEAN = draw(1, 4), draw(1, 4, seed=1)


def metric(out):
    return out[0, 1]


def test_it_is_exact_on_a_linear_net_also_behind_another_site():
    model = linear()
    estimate = hl.attribute(model, X, ["0", "1", "2"], metric, clean=CLEAN, each={"unit": 1})
    sweep = hl.sweep(model, X, ["0", "1", "2"], metric, clean=CLEAN, each={"unit": 1})
    np.testing.assert_allclose(estimate.effects, sweep.effects, rtol=0, atol=1e-15)
    assert (estimate.axes, estimate.labels) == (sweep.axes, sweep.labels)
    assert (estimate.baseline, estimate.clean) == (sweep.baseline, sweep.clean)
    # Each site carries the whole change.
    for site in ("0", "1", "2"):
        total = float(estimate.scores[site].sum())
        assert total == pytest.approx(sweep.clean - sweep.baseline, abs=1e-15)


def test_equal_runs_give_zero():
    estimate = hl.attribute(linear(), X, "*", metric, clean=X.clone())
    assert not estimate.effects.any()


def test_a_frozen_model_and_its_gradients_are_left_as_they_were(left_as_found):
    model = linear()
    model(X).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    values = [grad.clone() for grad in grads]
    expected = hl.attribute(model, X, "1", metric, clean=CLEAN).scores["1"]
    model.requires_grad_(False)
    before = left_as_found(model)
    with torch.no_grad():
        frozen = hl.attribute(model, X, "1", metric, clean=CLEAN).scores["1"]
    assert torch.equal(frozen, expected)
    assert left_as_found(model) == before
    for parameter, grad, value in zip(model.parameters(), grads, values, strict=True):
        assert parameter.grad is grad
        assert torch.equal(grad, value)


@pytest.mark.parametrize("steps", [None, 1, 4])
def test_the_points_of_integrated_gradients_are_midpoints(steps):
    class Cube(nn.Module):
        def forward(self, x):
            return x**3

    model = nn.Sequential(nn.Identity(), Cube()).eval()
    x, clean = torch.tensor([[1.0, 2.0]]).double(), torch.tensor([[3.0, 0.0]]).double()
    estimate = hl.attribute(model, x, "0", torch.sum, clean=clean, steps=steps)
    points = [(k + 0.5) / steps for k in range(steps)] if steps else [0.0]
    slope = sum(3 * (x + (clean - x) * point) ** 2 for point in points) / len(points)
    torch.testing.assert_close(estimate.scores["0"], slope * (clean - x), rtol=0, atol=1e-14)


def test_many_points_sum_to_the_change_of_the_metric():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    estimate = hl.attribute(model, X, "0", metric, clean=CLEAN, steps=200)
    change = estimate.clean - estimate.baseline
    assert float(estimate.scores["0"].sum()) == pytest.approx(change, abs=1e-6)


class Saturated(nn.Module):
    """The first unit is far out on a sigmoid; the other passes as it is."""

    def forward(self, x):
        return torch.sigmoid(40 * x[:, 0]) + x[:, 1]


class Cancelling(nn.Module):
    """Two paths that cancel at the corrupt run, in value and in slope, and not at the clean one."""

    def forward(self, x):
        return (x - x.abs()).sum(1)


def test_saturation_is_reported_as_failing():
    model = nn.Sequential(nn.Identity(), Saturated()).eval()
    x, clean = torch.tensor([[1.0, 0.0]]), torch.tensor([[-1.0, 0.001]])
    estimate = hl.attribute(
        model, x, "0", lambda out: out[0], clean=clean, each={"unit": 1}, check=2
    )
    assert estimate.failing == ("0",)
    assert "Failing at 0: saturated or cancelling. Measure there with hl.sweep." in str(estimate)
    assert estimate.measured[0, 0] == pytest.approx(-1, abs=1e-3)
    assert estimate["0", 0] == pytest.approx(0, abs=1e-3)


def test_cancelling_paths_are_reported_as_failing():
    model = nn.Sequential(nn.Identity(), Cancelling()).eval()
    x, clean = torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, -3.0]])
    metric = lambda out: out[0]  # noqa: E731
    estimate = hl.attribute(model, x, "0", metric, clean=clean, each={"unit": 1}, check=9)
    assert estimate.failing == ("0",)
    better = hl.attribute(model, x, "0", metric, clean=clean, each={"unit": 1}, check=9, steps=8)
    assert better.failing == ()
    assert better.rank_correlation == pytest.approx(1)


def test_the_rank_correlation_is_that_of_a_sample():
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).double().eval()
    estimate = hl.attribute(model, X, "0", metric, clean=CLEAN, each={"unit": 1}, check=6)
    sweep = hl.sweep(model, X, "0", metric, clean=CLEAN, each={"unit": 1}, rows=1)
    is_known = ~np.isnan(estimate.measured)
    assert is_known.sum() == 6
    np.testing.assert_array_equal(estimate.measured[is_known], sweep.effects[is_known])
    ranks = [numbers[is_known].argsort().argsort() for numbers in (estimate.effects, sweep.effects)]
    assert estimate.rank_correlation == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert math.isnan(hl.attribute(model, X, "0", metric, clean=CLEAN).rank_correlation)


def test_changes_of_in_place_layers_are_measured_as_by_a_sweep(net):
    x, clean = torch.randn(2, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sites = ["layer1.0.bn", "layer2.1.conv"]
    estimate = hl.attribute(net, x, sites, metric, clean=clean, each={"channel": 1}, check=99)
    sweep = hl.sweep(net, x, sites, metric, clean=clean, each={"channel": 1}, rows=1)
    np.testing.assert_array_equal(estimate.measured, sweep.effects)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda out: out[0, 1].item(), "metric must return a tensor with a gradient"),
        (lambda out: out.detach()[0, 1], "metric must return a tensor with a gradient"),
        (lambda out: out.argmax(), "metric must return a tensor with a gradient"),
        (lambda out: out, "metric must return one number"),
        (lambda out: torch.ones((), requires_grad=True), "metric must depend on a value at 1"),
    ],
)
def test_a_metric_without_a_gradient_is_refused(function, said):
    with pytest.raises(hl.InputError, match=said):
        hl.attribute(linear(), X, "1", function, clean=CLEAN)


def test_values_that_have_no_gradient_are_refused(looped):
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)).eval()
    ids = torch.tensor([1, 2])
    with pytest.raises(hl.InputError, match="0:input must have one floating tensor"):
        hl.attribute(model, ids, "0:input", metric, clean=ids)
    with pytest.raises(hl.AmbiguousError):
        hl.attribute(looped.eval(), torch.ones(1, 2), "block", torch.sum, clean=torch.zeros(1, 2))
    named = hl.attribute(
        looped, torch.ones(1, 2), "block#1", torch.sum, clean=torch.zeros(1, 2), check=1
    )
    assert named.effects[0] == pytest.approx(named.measured[0], rel=1e-5)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"check": -1}, {"check": True}])
def test_an_invalid_argument_is_refused(arguments):
    with pytest.raises(hl.InputError, match="must be a"):
        hl.attribute(linear(), X, "1", metric, clean=CLEAN, **arguments)
