"""Lazy modules, hooked before their first run."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def model():
    return nn.Sequential(nn.LazyConv2d(2, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))


@pytest.fixture
def x():
    return torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.cell("lazy modules, before their first run", "record", "gradients", "statistics")
def test_lines_before_the_first_run_see_it_and_leave_no_trace(model, x):
    ports = ("input", "output", "grad_output", "grad_input")
    with hl.record(model, ports=ports) as run, hl.record(model, "0", keep=torch.mean) as mean:
        y = model(x)
        y.sum().backward()
    assert torch.equal(run["0:input"], x)
    assert torch.equal(run[":output"], y)
    assert torch.equal(mean["0"], run["0"].mean())
    assert torch.equal(run["3:grad_input"], model[3].weight.sum(0).expand(4, -1))
    assert [type(module) for module in model] == [
        nn.Conv2d, nn.BatchNorm2d, nn.Flatten, nn.Linear,
    ]  # fmt: skip
    assert not len(hl.inventory(model))
    assert not any(hasattr(module, "_infer_parameters_hook") for module in model)


@pytest.mark.cell(
    "lazy modules, before their first run", "edit", "edit gradients", "raw hooks", "features",
    "watch",
)  # fmt: skip
def test_every_verb_works_on_the_first_run(model, x, capsys):
    seen = []
    with (
        hl.edit(model, "0:input", hl.edits.scale(0.0)),
        hl.edit(model, "3:grad_output", lambda g: g * 0),
        hl.attach(model) as line,
        hl.watch(model),
    ):
        line.forward("0", lambda module, args, output: seen.append(output))
        line.backward("3", lambda module, grad_input, grad_output: seen.append(grad_output[0]))
        model(x).sum().backward()
    assert torch.equal(seen[0], model[0].bias[:, None, None].expand(4, 2, 3, 3))
    assert not seen[1].any()
    assert not model[0].weight.grad.any()
    assert "LazyConv2d" in capsys.readouterr().out
    fresh = nn.Sequential(nn.LazyLinear(3), nn.LazyLinear(4))
    assert hl.features(fresh, x, "0")["0"].shape == (4, 1, 5, 3)
    assert type(fresh[1]) is nn.LazyLinear  # it was not reached


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.Linear, nn.Conv2d, nn.LazyConv2d])
def test_a_type_selects_lazy_modules_that_will_be_of_it(model, kind):
    (site,) = hl.select(model, kind)
    assert site.module_type == f"Lazy{kind.__name__.removeprefix('Lazy')}"


def test_after_the_first_run_lazy_types_match_nothing(model, x):
    model(x)
    with pytest.raises(hl.SelectionError, match="BatchNorm2d, Conv2d, Flatten, Linear"):
        hl.select(model, nn.LazyLinear)


@pytest.mark.cell(
    "lazy modules, before their first run", "gradients", "clip", refused="AttachError",
    note="Attaching a hook to the gradient of a lazy parameter raises `AttachError`. Run the"
    " model once first.",
)  # fmt: skip
def test_hooks_on_lazy_parameters_are_refused_until_a_first_run(model, x):
    def hook(line, what):
        with line as attached:
            getattr(attached, what)("0.weight", lambda value: None)

    for action in (
        lambda: hl.record(model, "0", ports="grad"),
        lambda: hl.edit(model, "0.weight:grad", lambda g: g),
        lambda: hl.clip(model, "0", norm=1.0),
        lambda: hook(hl.attach(model), "grad"),
        lambda: hook(hl.attach(model), "accumulated"),
    ):
        with pytest.raises(hl.AttachError, match=r"0\.weight is lazy.*\n.*model\(x\)"):
            action()
    assert all(entry.owner == "torch" for entry in hl.inventory(model))
    model(x)
    with hl.record(model, "0", ports="grad") as run, hl.clip(model, "0", norm=1e-3):
        model(x).sum().backward()
    assert run["0.weight:grad"].shape == (2, 1, 3, 3)
    assert model[0].weight.grad.norm() <= 1.001e-3


def test_a_pickled_copy_is_free_and_its_first_run_sheds_hooks(model, x):
    with hl.record(model, "0") as run:
        other = pickle.loads(pickle.dumps(model))
        other(x)
        assert not len(hl.inventory(other))
        assert len(run.passes) == 0
        model(x)
    assert type(other[0]) is type(model[0]) is nn.Conv2d


def test_a_lazy_root_is_a_root(x):
    model = nn.LazyLinear(3)
    with hl.record(model, ports=("output", "input")) as run:
        y = model(x)
    assert torch.equal(run[":output"], y)
    assert len(run.passes) == 1


def test_a_summary_without_a_run_lists_them_one_with_is_refused(model, x):
    assert [row.module_type for row in hl.summary(model).rows[1:3]] == [
        "LazyConv2d", "LazyBatchNorm2d",
    ]  # fmt: skip
    with pytest.raises(hl.InputError, match=r"no lazy parameters, got 0.weight"):
        hl.summary(model, x)


@pytest.mark.cell(
    "lazy modules, before their first run", "sweep", "attribute", "shadow", refused="InputError",
    note="Run the model once first.",
)  # fmt: skip
def test_verbs_that_run_the_model_refuse_lazy_parameters(model, x):
    model.eval()
    before = len(hl.inventory(model))  # torch's own hooks

    def number(out):
        return out.sum()

    for refused in (
        lambda: hl.sweep(model, x, "0", number, clean=x * 2),
        lambda: hl.attribute(model, x, "0", number, clean=x * 2),
        lambda: hl.shadow(model, model, x),
    ):
        with pytest.raises(hl.InputError, match=r"run|lazy"):
            refused()
    assert len(hl.inventory(model)) == before
