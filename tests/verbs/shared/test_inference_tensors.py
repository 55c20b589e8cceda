"""Weights that were made in inference mode are named where a verb computes gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.shared.inference_tensors import explain_inference_weights

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
