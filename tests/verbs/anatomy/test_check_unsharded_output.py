"""A model with whole weights is compared with what it was with split ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.anatomy.check_unsharded_output import check_same_output, run_output


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 6)


def test_the_same_output_passes_whole_or_in_part(model):
    x = torch.randn(2, 4)
    for part in (model(x), model(x)[:, 3:], model(x)[:1]):
        check_same_output(model, x, {(): part.detach()})


@pytest.mark.parametrize(
    "change", [lambda y: 1.01 * y, lambda y: y.roll(1, 1)[:, :3], lambda y: y[0], torch.zeros_like]
)
def test_another_output_is_refused_with_its_number(model, change):
    x = torch.randn(2, 4)
    with pytest.raises(hl.AttachError, match=r"Linear, whose output is off by .*\n.*before par"):
        check_same_output(model, x, {(): change(model(x).detach())})


def test_a_model_that_needs_its_part_is_refused_with_its_error():
    class Halves(nn.Module):
        def forward(self, x):
            return x.view(-1, 2)

    with pytest.raises(hl.AttachError, match=r"Halves, which raises RuntimeError: shape .*3"):
        check_same_output(Halves(), torch.ones(3), {})


def test_parts_that_do_not_say_of_what_are_refused(model):
    model._hf_tp_plan = "colwise"  # as transformers before 5.16 marks a module that it splits
    with pytest.raises(hl.AttachError, match=r"Sequential, which transformers before 5.16 has sp"):
        hl.anatomy(nn.Sequential(model), torch.ones(2, 4))


def test_the_floating_tensors_of_an_output_count():
    class Several(nn.Module):
        def forward(self, x):
            return {"y": x, "n": torch.ones(1, dtype=torch.int64), "none": torch.ones(0)}

    assert list(run_output(Several(), torch.ones(2))) == [("y",)]
