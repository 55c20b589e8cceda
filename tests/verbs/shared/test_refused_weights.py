"""Weights without numbers are refused, and those of inference mode are named."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

import hookline as hl
from hookline.verbs.shared.refused_weights import explain_inference_weights, refuse_meta_tensors

X = torch.ones(2, 1, 6, 6)
MODEL = r"must have a model with numbers, got 0\.weight on the meta device"
INPUTS = "must have inputs with numbers, got a tensor on the meta device"


def small(device="cpu"):
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, device=device), nn.Flatten(), nn.Linear(32, 2, device=device)
    ).eval()


def first(output):
    return output[0, 0]


VERBS = {
    "cam": hl.cam,
    "sweep": lambda model, x: hl.sweep(model, x, {"0": hl.edits.scale(0)}, first),
    "attribute": lambda model, x: hl.attribute(model, x, "0", first, clean=x),
    "invariance": hl.invariance,
    "shadow": lambda model, x: hl.shadow(model, small(), x),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_or_inputs_of_shapes_alone_are_refused(verb):
    for model, x in [(small("meta"), X), (small("meta"), X.to("meta"))]:
        with pytest.raises(hl.InputError, match=rf"^hl\.{verb} {MODEL}"):
            VERBS[verb](model, x)
    with pytest.raises(hl.InputError, match=rf"^hl\.{verb} {INPUTS}"):
        VERBS[verb](small(), X.to("meta"))


def test_an_offloaded_model_has_numbers_where_it_runs():
    model = small("meta")
    model[0].register_forward_pre_hook(lambda module, args: None)  # may load the weights
    refuse_meta_tensors("hl.cam", model, X)
    with pytest.raises(hl.InputError, match=MODEL):
        refuse_meta_tensors("hl.anatomy", model, X, refuse_offloaded=True)


def offloaded():
    """A model as accelerate's `cpu_offload` leaves it: weights are loaded as modules run."""
    model = small()
    for layer, run in ((model[0], functional.conv2d), (model[2], functional.linear)):
        weight, bias = layer.weight.detach(), layer.bias.detach()
        layer.to("meta").forward = partial(run, weight=weight, bias=bias)
        layer._hf_hook = SimpleNamespace(execution_device="cpu")
    return model


def test_an_offloaded_model_is_summed_up_and_extracted(tmp_path):
    model = offloaded()
    summary = hl.summary(model, X)
    assert (summary.failure, summary.flops) == (None, hl.summary(small(), X).flops)
    assert torch.equal(hl.extract(model, X, "2", to=tmp_path)["2"][:], model(X))


def test_doctor_and_anatomy_say_that_a_model_is_offloaded():
    assert [note.about for note in hl.doctor(offloaded(), X, "0").notes if "acc" in note.what] == [
        "offloaded"
    ]
    with pytest.raises(hl.InputError, match=r"accelerate has offloaded 0\.weight.*\n.*device_map"):
        refuse_meta_tensors("hl.anatomy", offloaded(), X, refuse_offloaded=True)


def test_data_of_shapes_alone_are_refused_by_extract(tmp_path):
    with pytest.raises(hl.InputError, match="data must hold numbers, got a tensor on the meta"):
        hl.extract(small(), X.to("meta"), "0", to=tmp_path)


def test_lines_say_that_they_measured_nothing():
    model, x = small("meta"), X.to("meta")
    with pytest.warns(hl.HooklineWarning, match="hl.check checked nothing in 1 run of the model"):
        with hl.check(model):
            model(x)
    with pytest.warns(hl.HooklineWarning) as told:
        with hl.monitor(model):
            model(x)
    texts = [str(warning.message) for warning in told]
    assert "no numbers, because they are on the meta device or fake" in texts[0]
    assert "no selected value could be measured" in texts[1]


IMAGE = torch.arange(16.0).reshape(1, 1, 4, 4)


def attribute(model):
    return hl.attribute(model, IMAGE, "0", lambda out: out[0, 0], clean=IMAGE + 1)


@pytest.mark.parametrize("verb", [attribute, lambda model: hl.cam(model, IMAGE)])
def test_weights_of_inference_mode_are_named_until_copied(verb):
    layers = nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)
    model = nn.Sequential(*layers).eval()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    with torch.inference_mode():
        model = copy.deepcopy(model)
    with pytest.raises(hl.InputError) as told:
        verb(model)
    assert str(told.value).partition(" must ")[2] == (
        "have weights that autograd can save, got 0.weight, which was made in inference mode."
        "\nGive copy.deepcopy(model), made outside torch.inference_mode()."
    )
    verb(copy.deepcopy(model))


def test_an_error_of_the_model_itself_stays():
    with (
        pytest.raises(RuntimeError, match="mine"),
        explain_inference_weights("hl.cam", nn.Linear(2, 2)),
    ):
        raise RuntimeError("mine")
