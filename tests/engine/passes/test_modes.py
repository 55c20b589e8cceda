"""What a pass runs in, asked once as it begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.engine.passes.modes import Mode, running_mode
from hookline.engine.torch_private.modes import is_plain_eager


def test_code_under_no_mode_is_plain():
    assert running_mode() is None


def test_transforms_are_seen_while_they_run():
    found = []
    torch.func.vmap(lambda x: (found.append(running_mode()), x)[1])(torch.zeros(2))
    assert found == [Mode.TRANSFORMED]
    assert running_mode() is None


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_recomputation_is_told_from_the_first_run(is_reentrant):
    found = []

    def run(x):
        found.append(running_mode())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(run, x, use_reentrant=is_reentrant).sum().backward()
    assert found == [None, Mode.RECOMPUTED]


def test_tracing_is_refused():
    with pytest.raises(hl.AttachError, match="make_fx traces this model while a line is on"):
        make_fx(lambda x: (running_mode(), x)[1])(torch.zeros(2))


@pytest.mark.parametrize("n_passes", [1, 3])
def test_a_pass_asks_once(monkeypatch, n_passes):
    asked = []
    look = "hookline.engine.passes.modes.is_plain_eager"
    monkeypatch.setattr(look, lambda: asked.append(1) or is_plain_eager())
    model = nn.Linear(2, 2)
    with hl.record(model):
        for _ in range(n_passes):
            model(torch.zeros(1, 2))
        assert len(asked) == n_passes
