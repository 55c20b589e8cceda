"""Heat maps of sweeps: the cells, their labels, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl

X, CLEAN = torch.zeros(1, 2), torch.tensor([[1.0, 2.0]])


@pytest.fixture
def effects():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    return hl.sweep(model, X, "*", lambda out: out[0, 0], clean=CLEAN, each={"unit": 1})


def test_the_cells_are_the_effects(effects):
    figure = hl.plots.sweep(effects)
    (image,) = figure.axes[0].images
    np.testing.assert_array_equal(image.get_array().filled(np.nan), effects.effects)
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["0", "1", "2"]
    assert (figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()) == ("site", "unit")
    assert figure.texts[0].get_text() == "Measured effects"


def test_texts_stand_for_labels_and_shares_for_effects(effects):
    figure = hl.plots.sweep(effects, texts={"unit": ["the", "cat", "sat"]}, normalised=True)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["the", "cat", "sat"]
    cells = figure.axes[0].images[0].get_array().filled(np.nan)
    np.testing.assert_allclose(cells, effects.normalised)


def test_a_cell_of_a_further_axis_is_the_largest():
    model = nn.Linear(2, 2).eval()
    changes = {"(root)": {"small": hl.edits.scale(0.9), "none": hl.edits.scale(-1)}}
    sweep = hl.sweep(model, X, changes, lambda out: out.sum(), each={"row": 0, "unit": 1})
    figure = hl.plots.sweep(sweep, axes=("site", "unit"))
    np.testing.assert_array_equal(figure.axes[0].images[0].get_array(), sweep.effects[:, 0, :, 1])
    assert "largest effect over row, change" in figure.texts[1].get_text()


def test_one_axis_is_one_column_and_unmoved_cells_have_a_dot():
    model = nn.Sequential(nn.Identity(), nn.Linear(2, 1)).eval()
    sweep = hl.sweep(model, X, "*", lambda out: out[0, 0], clean=torch.tensor([[0.0, 1.0]]),
                     each={"unit": 1})  # fmt: skip
    (dots,) = hl.plots.sweep(sweep).axes[0].lines
    assert (list(dots.get_xdata()), list(dots.get_ydata())) == ([0], [0])
    whole = hl.attribute(model, X, "*", lambda out: out[0, 0], clean=CLEAN)
    figure = hl.plots.sweep(whole)
    assert figure.axes[0].images[0].get_array().shape == (2, 1)
    assert figure.texts[0].get_text() == "Estimated effects"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"axes": ("site", "head")}, "axes must be two of 'site', 'unit'"),
        ({"texts": {"unit": ["a"]}}, "one text for each label of 'unit', got 1 text for 3 labels"),
    ],
)
def test_what_cannot_be_drawn_is_refused(effects, arguments, said):
    with pytest.raises(hl.InputError, match=said):
        hl.plots.sweep(effects, **arguments)


def test_another_object_is_refused():
    with pytest.raises(hl.InputError, match=r"must come from hl\.sweep or hl.attribute, got list"):
        hl.plots.sweep([1.0])
