"""Random numbers and autocast of a run."""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch import nn

from hookline.verbs.shared.model_state import restore_modes_buffers_rng
from hookline.verbs.shared.run_settings import RandomStates


def test_all_random_states_are_put_back():
    model = nn.Identity()
    model.generator = torch.Generator()

    def draw():
        return [
            random.random(),
            np.random.random(),
            torch.rand(()).item(),
            torch.rand((), generator=model.generator).item(),
        ]

    with restore_modes_buffers_rng([model]):
        first = draw()
    assert draw() == first


def test_numpys_random_state_is_put_back_before_its_first_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.random", raising=False)
    states = RandomStates()
    first = np.random.random()
    states.restore()
    assert np.random.random() == first
