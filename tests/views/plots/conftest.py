"""Recordings to draw: a small network, and values of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def recorded():
    """`recorded(value)`: a recording of one pass whose site `site` (an Identity) saw the value."""

    def recorded(*values, kind=nn.Identity):
        class Same(kind):
            def forward(self, value):
                return value

        Same.__name__ = kind.__name__
        model = nn.ModuleDict({"site": Same(*(1, 1, 1) if kind is not nn.Identity else ())})
        model.forward = model["site"].__call__
        with hl.record(model, "site") as run:
            for value in values:
                model(value)
        return run

    return recorded


@pytest.fixture
def net_run(net, image):
    with torch.no_grad(), hl.record(net, nn.Conv2d) as run:
        net(image)
    return run


def header(figure) -> str:
    """What stands above a figure, as one text."""
    return " ".join(text.get_text().replace("\n", " ") for text in figure.texts)


@pytest.fixture
def said():
    return header
