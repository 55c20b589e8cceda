"""Clipping at the end of backward, where several threads run backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from meeting import Meanwhile


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


def test_each_of_two_backwards_at_once_clips_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    meanwhile = Meanwhile(lambda: backward(model))
    with hl.clip(model, total_norm=1e-3, every_thread=True) as line:
        model[0].weight.register_hook(meanwhile)  # the second layer's gradients have come by then
        backward(model)
        meanwhile.end()
    assert line.report().seen == 2


def test_a_backward_that_raises_leaves_the_next_one_clipped():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def fail(grad):
        raise ValueError("not now")

    with hl.clip(model, total_norm=1e-3) as line:
        handle = model[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="not now"):
            backward(model)
        handle.remove()
        backward(model)
    assert line.report().seen == 1
