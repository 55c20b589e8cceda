"""Gradients that leave every `.grad` as it is."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from hookline.verbs.shared.gradients import compute_gradients


def test_gradients_leave_grad_as_it_is():
    weight = torch.ones(2, requires_grad=True)
    weight.grad = before = torch.zeros(2)
    for use_reentrant in (True, False):
        output = checkpoint(lambda x: (x * weight).sum(), weight * 2, use_reentrant=use_reentrant)
        assert compute_gradients([output])[0].tolist() == [4.0, 4.0]
        assert weight.grad is before
        assert before.tolist() == [0.0, 0.0]
