"""A batch that forward does not take: the error says which part of it forward takes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline as hl

X, Y = torch.randn(10, 3), torch.arange(10)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, scale=None):
        return self.fc(x)


class Inner(Two):
    """A model whose own code raises a TypeError."""

    def forward(self, x, y):
        return self.fc(x, y)


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X),
        DataLoader(TensorDataset(X), batch_size=4),
        iter(DataLoader(TensorDataset(X), batch_size=4)),
        iter([[X[:4]], [X[4:]]]),
        iter([(X[:4],), (X[4:],)]),
    ],
    ids=["data set", "loader", "iterator", "lists", "tuples"],
)
def test_a_batch_of_one_tensor_is_that_tensor(tmp_path, data):
    model = nn.Linear(3, 2)
    store = hl.extract(model, data, "", tmp_path / "s")
    assert torch.equal(store[""][:], model(X).detach())


@pytest.mark.parametrize(
    ("model", "data", "code"),
    [
        (nn.Linear(3, 2), (X, Y), "batch[0]"),
        (Two(), (X, X, Y), "batch[:2]"),
        (Two(), {"x": X, "label": Y}, "{key: batch[key] for key in ('x',)}"),
        (nn.Linear(3, 2), {"pixels": X, "label": Y}, "batch['pixels']"),
    ],
    ids=["one of two", "two of three", "keys", "another key"],
)
def test_the_error_of_the_call_says_what_to_give(tmp_path, model, data, code):
    with pytest.raises(TypeError) as caught:
        hl.extract(model, data, "", tmp_path / "s")
    assert caught.value.__notes__[-1] == (
        "hookline: the model's forward does not take all of the batch."
        f"\nGive what it takes: inputs=lambda batch: {code}."
    )
    given = eval(f"lambda batch: {code}")
    assert len(hl.extract(model, data, "", tmp_path / "s", inputs=given)) == 10


@pytest.mark.parametrize("data", [(X, Y), {"x": X, "y": Y}])
def test_an_error_inside_the_model_gets_no_such_note(tmp_path, data):
    with pytest.raises(TypeError) as caught:
        hl.extract(Inner(), data, "", tmp_path / "s")
    assert not any("inputs=" in note for note in getattr(caught.value, "__notes__", []))


def test_what_inputs_returns_is_not_called_the_batch(tmp_path):
    with pytest.raises(TypeError) as caught:
        hl.extract(nn.Linear(3, 2), X, "", tmp_path / "s", inputs=lambda batch: (batch, batch))
    assert not any("inputs=" in note for note in caught.value.__notes__)


def test_a_list_of_several_tensors_still_needs_inputs(tmp_path):
    with pytest.raises(hl.InputError, match=r"must hold only the model's inputs, got list"):
        hl.extract(nn.Linear(3, 2), TensorDataset(X, Y), "", tmp_path / "s")


def test_a_list_of_batches_is_told_from_one_of_items(tmp_path):
    convolution, batches = nn.Conv2d(1, 4, 3), [torch.ones(6, 1, 8, 8)] * 2
    with pytest.raises(RuntimeError) as caught:
        hl.extract(convolution, batches, "", tmp_path / "s")
    assert caught.value.__notes__[-1].endswith("\nIf it holds batches, give iter(data).")
    store = hl.extract(convolution, iter(batches), "", tmp_path / "s", resume=False)
    assert len(store) == 12
