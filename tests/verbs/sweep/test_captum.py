"""Paths of gradients, against captum's integrated gradients, conductance and influence."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

captum = pytest.importorskip("captum.attr")

STEPS = 8  # captum computes its points in float32, where eighths are exact


def smooth():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))


@pytest.fixture(scope="module")
def model():
    return smooth().double().eval()


X, CLEAN = torch.randn(2, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
LAYERS = ("0", "1", "3")


def metric(out):
    return out[:, 1].sum()


def theirs(method, model, layer, x=X, clean=CLEAN, n_steps=STEPS, rule="riemann_middle"):
    return getattr(captum, method)(model, model.get_submodule(layer)).attribute(
        clean, x, target=1, n_steps=n_steps, method=rule
    )


def ours(model, steps=STEPS, along="(root):input"):
    return hl.attribute(model, X, list(LAYERS), metric, clean=CLEAN, steps=steps, along=along)


def near(a, b, atol=1e-14):
    torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=atol)


@pytest.mark.parametrize("layer", LAYERS)
def test_the_line_of_a_site_is_layer_integrated_gradients(model, layer):
    near(ours(model, along=None).scores[layer], theirs("LayerIntegratedGradients", model, layer))


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_along_the_inputs_are_internal_influence(model, layer):
    near(ours(model).gradients[layer], theirs("InternalInfluence", model, layer))


@pytest.mark.parametrize("layer", LAYERS)
def test_scores_along_the_inputs_are_layer_conductance(model, layer):
    # captum takes the gradient at the beginning of each step between midpoints: the mean of both
    # directions takes it at both ends. And it leaves out half a step at each end of the path.
    there = theirs("LayerConductance", model, layer, n_steps=STEPS - 1)
    back = theirs("LayerConductance", model, layer, CLEAN, X, n_steps=STEPS - 1)
    ends = torch.zeros_like(there)
    for point, border, sign in ((0.5 / STEPS, X, 1), (1 - 0.5 / STEPS, CLEAN, -1)):
        inputs = X + point * (CLEAN - X)
        slope = hl.attribute(model, inputs, layer, metric, clean=X).gradients[layer]
        with hl.record(model, layer) as run, torch.no_grad():
            model(inputs)
            model(border)
        ends += sign * slope * (run.passes[0][layer] - run.passes[1][layer])
    near(ours(model).scores[layer], (there - back) / 2 + ends)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_with_many_steps_captums_default_rule_agrees(model, layer):
    expected = theirs("LayerConductance", model, layer, n_steps=2000, rule="riemann_trapezoid")
    near(ours(model, steps=50).scores[layer], expected, atol=2e-3)
    expected = theirs("InternalInfluence", model, layer, n_steps=50, rule="gausslegendre")
    near(ours(model, steps=50).gradients[layer], expected, atol=2e-4)


def test_few_steps_are_nearer_to_the_whole_change_than_captums(model):
    estimate = ours(model)
    change = estimate.clean - estimate.baseline
    for layer in LAYERS:
        mine = abs(float(estimate.scores[layer].sum() - change))
        other = abs(float(theirs("LayerConductance", model, layer).detach().sum() - change))
        assert mine < other / 2
