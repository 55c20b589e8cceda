"""hl.attribute: exact where the metric is linear, and known to fail where it is not."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from float32_device import Float32Device
from hookline.verbs.sweep.estimate_verdicts import judge_sites
from thoroughness import tries


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


PATHS = [{}, {"steps": 3}, {"steps": 3, "along": "(root):input"}, {"steps": 2, "along": "0"}]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_exact_on_a_linear_net(path):
    model = linear()
    estimate = hl.attribute(model, X, ["0", "1"], metric, clean=CLEAN, each={"unit": 1}, **path)
    sweep = hl.sweep(model, X, ["0", "1"], metric, clean=CLEAN, each={"unit": 1})
    np.testing.assert_allclose(estimate.effects, sweep.effects, rtol=0, atol=1e-15)
    slope = model[2].weight[1] @ model[1].weight
    torch.testing.assert_close(estimate.gradients["0"], slope[None].detach(), rtol=0, atol=1e-15)


@pytest.mark.parametrize("path", PATHS)
def test_equal_runs_give_zero(path):
    estimate = hl.attribute(linear(), X, "*", metric, clean=X.clone(), **path)
    assert not estimate.effects.any()


@pytest.mark.parametrize("path", PATHS)
def test_a_frozen_model_and_its_gradients_are_left_as_they_were(path, left_as_found):
    model = linear()
    model(X).sum().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    values = [grad.clone() for grad in grads]
    expected = hl.attribute(model, X, "1", metric, clean=CLEAN, **path).scores["1"]
    model.requires_grad_(False)
    before = left_as_found(model)
    with torch.no_grad():
        frozen = hl.attribute(model, X, "1", metric, clean=CLEAN, **path).scores["1"]
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


@pytest.mark.slow
def test_many_points_sum_to_the_change_of_the_metric():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    estimate = hl.attribute(model, X, "0", metric, clean=CLEAN, steps=200)
    change = estimate.clean - estimate.baseline
    assert float(estimate.scores["0"].sum()) == pytest.approx(change, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "along"),
    [(16, None), (320, "(root):input"), *tries([(320, None), (16, "(root):input")], gate=[])],
)
def test_many_points_are_summed_more_exactly_than_bfloat16(steps, along):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    options = {"steps": steps, "along": along}
    exact = hl.attribute(model, X.float(), ["0", "1"], metric, clean=CLEAN.float(), **options)
    inputs, clean = X.bfloat16(), CLEAN.bfloat16()
    half = hl.attribute(
        model.bfloat16(), inputs, ["0", "1"], lambda out: out[0, 1].float(), clean=clean, **options
    )
    np.testing.assert_allclose(half.effects, exact.effects, rtol=0.03, atol=0.003)
    for site, gradient in half.gradients.items():
        torch.testing.assert_close(gradient, exact.gradients[site], rtol=0.03, atol=0.003)


class Attention(nn.Module):
    """Attention where each token sees those before it: other scores are -inf."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        value = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(value.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(
    "options", [{}, {"steps": 8}, {"steps": 8, "along": "(root):input"},
                {"steps": 8, "along": "@scores"}]
)  # fmt: skip
def test_scores_behind_a_causal_mask_have_estimates(options):
    torch.manual_seed(0)
    model, last = Attention().double().eval(), lambda out: out[0, -1, 0]
    x, clean = draw(1, 4, 8), draw(1, 4, 8, seed=1)
    estimate = hl.attribute(
        model, x, "@scores", last, clean=clean, each={"head": 1}, check=2, **options
    )
    assert np.isfinite(estimate.effects).all()
    assert "NaN" not in str(estimate)
    if options.get("along") != "(root):input":
        np.testing.assert_allclose(estimate.effects, estimate.measured, rtol=0.6, atol=0.02)


def test_a_value_that_is_infinite_in_one_run_alone_is_told():
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 2)).double().eval()
    clean = X.masked_fill(torch.arange(4) == 0, -math.inf)
    estimate = hl.attribute(model, X, "0", lambda out: out[0].sum().tanh(), clean=clean, steps=2)
    assert "NaN at 0: a value or a gradient is not finite there." in str(estimate)


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, ids, scale=1.0):
        return torch.tanh(self.mix(self.embed(ids))).sum(1) * scale


def test_the_embedding_stands_for_token_ids():
    model, ids, clean = Language().double().eval(), torch.tensor([[1, 2]]), torch.tensor([[3, 2]])
    estimate = hl.attribute(model, ids, "mix", metric, clean=clean, steps=60, along="embed")
    change = estimate.clean - estimate.baseline
    assert float(estimate.scores["mix"].sum()) == pytest.approx(change, abs=1e-4)
    assert not estimate.scores["mix"][:, 1].any()  # this token is the same in both
    with pytest.raises(hl.InputError, match="along must name values with a line between them"):
        hl.attribute(model, ids, "mix", metric, clean=clean, steps=4, along="(root):input")


@pytest.mark.slow
def test_a_path_may_be_a_part_of_the_difference():
    model = Language().double().eval()
    inputs = {"ids": torch.tensor([[1, 2]]), "scale": torch.tensor(1.0).double()}
    clean = {"ids": torch.tensor([[3, 2]]), "scale": torch.tensor(2.0).double()}
    options = {"clean": clean, "steps": 60}
    estimate = hl.attribute(model, inputs, ["mix", "(root)"], metric, along="embed", **options)
    only_ids = inputs | {"ids": clean["ids"]}
    with torch.no_grad():
        change = float(metric(model(**only_ids)) - metric(model(**inputs)))
    assert change != pytest.approx(estimate.clean - estimate.baseline, abs=0.1)
    for site in ("mix", "(root)"):
        assert float(estimate.scores[site].sum()) == pytest.approx(change, abs=1e-4)
    # What comes before the path does not move.
    before = hl.attribute(model, inputs, "embed", metric, along="mix", **options)
    assert not before.scores["embed"].any()


PLANTED = {
    "saturated": lambda x: torch.sigmoid(40 * x),
    "dead": lambda x: torch.relu(-x),
    "cancelling": lambda x: x - x.abs(),
    "steep": lambda x: torch.sigmoid(40 * (x - 1)),
}


class Planted(nn.Module):
    """A function of some units, and the rest as they are, scaled."""

    def __init__(self, function, n, scale):
        super().__init__()
        self.function, self.n, self.scale = PLANTED[function], n, scale

    def forward(self, x):
        rest = self.scale * x[:, self.n :]
        return torch.cat([self.function(x[:, : self.n]), rest], 1).sum(1)


def verdict_on(function, n, scale, check=400, **options):
    """Attribute 40 units, of which n have a function whose slope at 1 tells nothing."""
    model = nn.Sequential(nn.Identity(), Planted(function, n, scale)).double().eval()
    x = torch.ones(1, 40).double()
    clean = -x * (1 + draw(1, 40).abs())
    return hl.attribute(
        model, x, "0", lambda out: out[0], clean=clean, each={"unit": 1}, check=check, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("function", PLANTED)
@pytest.mark.parametrize("check", tries([8, 20, 40], gate=[8, 40]))
def test_saturated_and_cancelling_paths_are_reported_as_failing(function, check):
    estimate = verdict_on(function, 40, 1.0, check)
    assert estimate.failing == ("0",)
    assert "Failing at 0: saturated or cancelling. Measure there with hl.sweep." in str(estimate)
    better = verdict_on(function, 40, 1.0, check, steps=200)
    assert better.failing == ()


@pytest.mark.parametrize("function", PLANTED)
def test_few_units_with_most_of_the_effect_are_failing(function):
    # The other units are estimated well, and do not matter.
    assert verdict_on(function, 6, 0.01).failing == ("0",)
    assert verdict_on(function, 6, 1.0).failing == ()


def test_too_small_a_sample_says_so():
    estimate = verdict_on("saturated", 40, 1.0, check=5)
    assert (estimate.failing, estimate.unjudged) == ((), ("0",))
    assert "Too few measured changes to tell at 0: give check=20." in str(estimate)
    assert verdict_on("saturated", 40, 1.0, check=0).unjudged == ()


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.Tanh, nn.SiLU, nn.GELU])
def test_healthy_nets_are_never_failing(activation):
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(9, 32), activation(), nn.LayerNorm(32), nn.Linear(32, 32), activation(),
            nn.Linear(32, 3),
        ).eval()  # fmt: skip
        x, clean = torch.randn(2, 1, 9)
        for check in (20, 999):
            estimate = hl.attribute(
                model, x, ["0", "1", "3", "4"], metric, clean=clean, each={"unit": 1}, check=check
            )
            assert estimate.failing == ()


@pytest.mark.parametrize("n_sites", [1, 4, 12])
@pytest.mark.parametrize("n", [8, 14, 20, 30])
def test_a_false_alarm_is_rarer_than_one_in_twenty(n, n_sites):
    # All samples of a site of which exactly two thirds are missed, and the level it is held to.
    effects = np.ones((n_sites, 60))
    estimates = np.where(np.arange(60) < 40, 0.0, 1.0) * effects
    chance = 0.0
    for n_missed in range(max(0, n - 20), min(n, 40) + 1):
        measured = np.full((n_sites, 60), np.nan)
        measured[0, :n_missed] = measured[0, 40 : 40 + n - n_missed] = 1.0
        if judge_sites(list(range(n_sites)), estimates, measured)[0].is_failing:
            ways = math.comb(40, n_missed) * math.comb(20, n - n_missed)
            chance += ways / math.comb(60, n)
    assert chance <= 0.05 / n_sites


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


class Root(nn.Module):
    def forward(self, x):
        return x.abs().sqrt()  # without a gradient at 0


def test_an_estimate_that_is_nan_has_a_row():
    model = nn.Sequential(nn.Linear(4, 3), Root(), nn.Linear(3, 2)).double().eval()
    with torch.no_grad():
        model[0].weight[1], model[0].bias[1] = 0, 0
    estimate = hl.attribute(model, X, "0", metric, clean=CLEAN, each={"unit": 1})
    assert np.isnan(estimate.effects).tolist() == [[False, True, False]]
    assert [row["unit"] for row in estimate.to_dict()["rows"]] == [0, 1, 2]
    assert estimate.is_change.all()
    assert "NaN at 0: a value or a gradient is not finite there" in str(estimate)


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
    with pytest.raises(hl.AmbiguousError, match=r"must run once .*\n.*#0"):
        hl.attribute(looped.eval(), torch.ones(1, 2), "block", torch.sum, clean=torch.zeros(1, 2))
    named = hl.attribute(
        looped, torch.ones(1, 2), "block#1", torch.sum, clean=torch.zeros(1, 2), check=1
    )
    assert named.effects[0] == pytest.approx(named.measured[0], rel=1e-5)


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"check": -1}, {"check": True}])
def test_an_invalid_argument_is_refused(arguments):
    with pytest.raises(hl.InputError, match="must be a"):
        hl.attribute(linear(), X, "1", metric, clean=CLEAN, **arguments)


def test_a_path_without_points_and_an_unknown_option_are_refused():
    with pytest.raises(hl.InputError, match="along must come with steps"):
        hl.attribute(linear(), X, "1", metric, clean=CLEAN, along="0")
    with pytest.raises(TypeError, match="unexpected keyword argument 'step'"):
        hl.attribute(linear(), X, "1", metric, clean=CLEAN, step=3)


def test_a_model_that_draws_random_numbers_is_refused():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = nn.Sequential(nn.Linear(2, 3), Noisy()).eval()
    x = torch.ones(1, 2)
    with pytest.raises(hl.InputError, match="draws random numbers"):
        hl.attribute(model, x, "0", lambda out: out[0, 0], clean=x * 0)
    model = model[:1].eval()
    with (
        hl.edit(model, "0", hl.edits.noise(1.0, seed=0)),
        pytest.raises(hl.InputError, match="a hook on it such as an edit, draws random numbers"),
    ):
        hl.attribute(model, x, "0", lambda out: out[0, 0], clean=x * 0)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_site_in_a_checkpoint_has_the_scores_without_one(reentrant):
    class Regions(nn.Sequential):
        def forward(self, x):
            return self[2](checkpoint(self[1], self[0](x), use_reentrant=reentrant))

    parts = [nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 1)]
    x, clean = torch.randn(2, 1, 3)
    scores = [
        hl.attribute(model, x, ["1.0"], lambda out: out.sum(), clean=clean, steps=3).scores["1.0"]
        for model in (nn.Sequential(*parts).eval(), Regions(*parts).eval())
    ]
    assert torch.equal(*scores)


def test_a_metric_that_runs_the_model_runs_it_as_it_is():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).eval()
    x, clean = torch.randn(2, 1, 3)
    scores = [
        hl.attribute(model, x, ["0"], metric, clean=clean, steps=2).scores["0"]
        for metric in (lambda out: out.sum(), lambda out: out.sum() - model(clean).detach().sum())
    ]
    torch.testing.assert_close(*scores)


def test_a_device_without_float64_has_the_same_estimates():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x, clean = torch.randn(2, 2, 4)

    def estimates():
        return hl.attribute(net, x, "0", torch.Tensor.sum, clean=clean).effects

    expected = estimates()
    with Float32Device():
        assert np.array_equal(estimates(), expected)
