from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn

from hookline.models import Batch
from hookline.models.loaded_model import LoadedModel, describe_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(1, 3, 224, 224), "1x3x224x224 float32"),
        (torch.zeros(5, dtype=torch.int64), "5 int64"),
        (torch.zeros((), dtype=torch.bool), "scalar bool"),
        (torch.zeros(0, 2), "0x2 float32"),
        (None, "NoneType"),
    ],
)
def test_a_value_is_described_by_shape_and_type(value, text):
    assert describe_value(value) == text


def test_a_batch_and_a_loaded_model_cannot_be_changed(linear):
    batch = Batch((torch.zeros(2),))
    assert (batch.kwargs, batch.images) == ({}, ())
    with pytest.raises(FrozenInstanceError):
        batch.args = ()
    with pytest.raises(FrozenInstanceError):
        linear.name = "other"
    assert batch != Batch(batch.args)  # by identity: tensors have no single truth value


def test_a_loaded_model_prints_on_one_line(linear):
    labels = tuple(f"class {k}" for k in range(1000))
    loaded = LoadedModel("file.py:make", nn.Linear(2, 3), preprocess=print, labels=labels)
    assert repr(loaded) == (
        "LoadedModel 'file.py:make': Linear of 9 parameters, takes pictures, 1,000 labels"
        " ('class 0', 'class 1', 'class 2', …)"
    )
    assert repr(LoadedModel("a\u202eb", nn.Identity())) == (
        "LoadedModel 'a\\u202eb': Identity of 0 parameters"
    )


def test_lazy_parameters_do_not_hinder_printing_a_loaded_model():
    assert "LazyLinear" in repr(LoadedModel("lazy", nn.LazyLinear(2)))
