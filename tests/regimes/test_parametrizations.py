"""Weights that are computed: parametrizations, weight norm and spectral norm, pruning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import hookline as hl


def old_weight_norm(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(module)


def pruned(module):
    return prune.l1_unstructured(module, "weight", 0.5)


NEW = {
    "weight_norm": (parametrizations.weight_norm, ["original0", "original1"]),
    "spectral_norm": (parametrizations.spectral_norm, ["original"]),
    "orthogonal": (parametrizations.orthogonal, ["original"]),
}
OLD = {
    "weight_norm": (old_weight_norm, ["weight_g", "weight_v"]),
    "spectral_norm": (nn.utils.spectral_norm, ["weight_orig"]),
    "prune": (pruned, ["weight_orig"]),
}
ALL = [pytest.param(change, id=f"new {name}") for name, (change, _) in NEW.items()] + [
    pytest.param(change, id=f"old {name}") for name, (change, _) in OLD.items()
]


def build(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    change(model[0])
    return model


@pytest.fixture
def x():
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.cell("parametrized weights", "record", "gradients")
@pytest.mark.cell("pruning; old `weight_norm` and `spectral_norm`", "record", "gradients")
@pytest.mark.parametrize("change", ALL)
def test_a_recorded_model_gives_its_numbers_and_all_gradients(change, x):
    bare, model = build(change), build(change)
    y = bare(x)
    y.sum().backward()
    with hl.record(model, ports=("output", "input", "grad_output", "grad")) as run:
        z = model(x)
        z.sum().backward()
    assert torch.equal(y, z)
    for path, parameter in bare.named_parameters():
        assert torch.equal(run[f"{path}:grad"], parameter.grad)
    for (path, kept), (_, other) in zip(
        bare.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert torch.equal(kept, other), path  # the power iteration has run as often


@pytest.mark.cell("parametrized weights", "edit", "edit gradients", "raw hooks")
@pytest.mark.parametrize("name", NEW)
def test_what_a_parametrization_computes_is_a_site_of_its_own(name, x):
    change, parameters = NEW[name]
    model = build(change)
    with (
        hl.record(model, "0.parametrizations.**", ports=("output", "grad_output")) as run,
        hl.attach(model) as line,
    ):
        line.backward("0.parametrizations.weight.0", lambda m, gi, go: None)
        out = model[:1](x)
        out.sum().backward()
    weight = run["0.parametrizations.weight"]
    assert torch.allclose(out, x @ weight.T + model[0].bias)
    assert torch.allclose(run["0.parametrizations.weight:grad_output"], x.sum(0).expand(4, 3))
    with hl.edit(model, "0.parametrizations.weight", hl.edits.scale(0.0)):
        assert torch.equal(model[0](x), model[0].bias.expand(5, 4))
    model.zero_grad()
    with hl.edit(model, "0.parametrizations.weight:grad_output", lambda g: g * 0):
        model(x).sum().backward()
    for parameter in parameters:
        grad = getattr(model[0].parametrizations.weight, parameter).grad
        assert not grad.any()


@pytest.mark.cell(
    "parametrized weights",
    "record",
    note="Under `parametrize.cached()`, only the first run of the model computes and records"
    " the weight.",
)
def test_a_cached_parametrization_runs_once_later_passes_say_so(x):
    model = build(parametrizations.spectral_norm)
    with parametrize.cached(), hl.record(model, ["0.parametrizations.weight", "0"]) as run:
        model(x)
        model(x)
    assert run.passes[0]["0.parametrizations.weight"].shape == (4, 3)
    with pytest.raises(hl.NotRecordedError, match="did not fire in this pass"):
        run.passes[1]["0.parametrizations.weight"]
    assert len(run.passes[1]) == 1


@pytest.mark.parametrize("name", NEW)
def test_the_error_for_a_computed_weight_names_the_parameters(name):
    change, parameters = NEW[name]
    model = build(change)
    for select in (
        lambda: hl.select(model, "0.weight", ports="grad"),
        lambda: hl.record(model, "0.weight:grad"),
        lambda: hl.clip(model, "0.weight", norm=1.0),
    ):
        with pytest.raises(hl.SelectionError, match="computed by a parametrization") as caught:
            select()
        for parameter in parameters:
            assert f"'0.parametrizations.weight.{parameter}:grad'" in str(caught.value)
        assert "'0.parametrizations.weight:grad_output'" in str(caught.value)
    with pytest.raises(hl.SelectionError, match="it was computed, as a parametrized weight is"):
        hl.select(model, model[0].weight, ports="grad")


@pytest.mark.parametrize("name", OLD)
def test_the_error_for_a_weight_of_a_hook_names_its_parameters(name):
    change, parameters = OLD[name]
    model = build(change)
    with pytest.raises(hl.SelectionError, match="computed before each call") as caught:
        hl.record(model, "0.weight:grad")
    assert all(f"'0.{parameter}:grad'" in str(caught.value) for parameter in parameters)


@pytest.mark.cell("pruning; old `weight_norm` and `spectral_norm`", "edit", "raw hooks", "clip")
@pytest.mark.parametrize("change", [pytest.param(old_weight_norm, id="norm"), pruned])
def test_torchs_hooks_keep_their_place_input_edits_stay_edits(change, x):
    model = build(change)
    before = [entry for entry in hl.inventory(model) if entry.owner == "torch"]
    seen = []
    with (
        hl.edit(model, "0:input", hl.edits.scale(0.0)),
        hl.attach(model) as line,
        hl.clip(model, "0", total_norm=0.1),
    ):
        line.forward_pre("0", lambda module, args: seen.append(args[0].clone()))
        model(x).sum().backward()
        prune.random_unstructured(model[2], "weight", 0.5)  # while lines are on
        model(x)
    assert not seen[0].any()
    assert len(seen) == 2
    norms = [parameter.grad.norm() for parameter in model[0].parameters()]
    assert torch.stack(norms).norm() <= 0.1001
    after = [entry for entry in hl.inventory(model) if entry.owner == "torch"]
    assert after[: len(before)] == before
    assert [entry.path for entry in after[len(before) :]] == ["2"]
    prune.remove(model[2], "weight")
    assert [entry.path for entry in hl.inventory(model)] == ["0"] * len(before)


def test_a_parametrization_made_inside_the_block_is_a_reason(x):
    model = nn.Sequential(nn.Linear(3, 4))
    line = hl.record(model, ["0", "0.weight:grad"])
    parametrizations.weight_norm(model[0])
    with pytest.warns(hl.HooklineWarning, match="0.weight was unregistered after the line"):
        model(x).sum().backward()
    line.remove()
    assert list(line.recording) == ["0"]
