"""Clipping at the end of backward, where several threads run backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from second_thread import Meanwhile


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


def stepping_in_backward(model, *, to_none):
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad(set_to_none=to_none)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def by_torch(clip):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    backward(model)
    for parameter in model.parameters():
        clip([parameter], 0.01)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.state_dict()


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_an_optimizer_that_steps_in_backward_gets_clipped_ones(kind):
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    stepping_in_backward(model, to_none=True)
    with hl.clip(model, **{kind: 0.01}) as line:
        backward(model)
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[kind]
    expected = by_torch(clip)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert line.report().clipped == 2


@pytest.mark.parametrize("to_none", [True, False])
def test_total_norm_of_gradients_used_in_backward_is_refused(to_none):
    model = nn.Linear(2, 2)
    stepping_in_backward(model, to_none=to_none)
    with hl.clip(model, total_norm=0.01):
        with pytest.raises(hl.AttachError, match=r"2 of 2 that were used.*steps in backward"):
            backward(model)


def test_a_step_in_a_reentrant_checkpoint_is_refused():
    model = nn.Linear(2, 2)
    stepping_in_backward(model, to_none=False)
    with hl.clip(model, norm=0.01):
        loss = checkpoint(model, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum()
        with pytest.raises(hl.AttachError, match="without use_reentrant=True"):
            loss.backward()


def test_two_clips_of_one_gradient_run_in_their_order():
    model = nn.Linear(2, 1, bias=False)
    with hl.clip(model, value=0.5), hl.clip(model, norm=10.0) as by_norm:
        (model(torch.tensor([[3.0, 4.0]])).sum()).backward()
    assert by_norm.report().rows[0].largest == pytest.approx(0.5 * 2**0.5)
