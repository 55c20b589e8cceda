"""Traps of raw hooks with operations in place. Checkpointing (15, 16) is in `tests/regimes`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


class Net(nn.Module):
    """Conv, batch norm, an in-place ReLU, twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)))


X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def truth(model):
    """What the batch norms return, and the gradients with respect to that."""
    bn1 = model.bn1(model.conv1(X))
    bn2 = model.bn2(model.conv2(bn1.relu()))
    grads = torch.autograd.grad(bn2.relu().sum(), [bn1, bn2])
    return {"bn1": bn1.detach(), "bn2": bn2.detach()}, dict(zip(("bn1", "bn2"), grads, strict=True))


@pytest.mark.trap(17)
def test_an_in_place_layer_rewrites_what_was_recorded_before_it():
    model = Net().eval()
    expected, _ = truth(model)
    kept = {}
    handles = [
        getattr(model, name).register_forward_hook(
            lambda module, args, output, name=name: kept.update({name: output.detach()})
        )
        for name in expected
    ]
    model(X)
    for handle in handles:
        handle.remove()
    for name, value in expected.items():
        assert (value < 0).any()
        assert torch.equal(kept[name], value.relu())  # another layer's output, without a word
    with hl.record(model, ["bn1", "bn2"]) as run:
        model(X)
    for name in expected:
        with pytest.raises(hl.OverwrittenError, match=rf"{name}.*(?s:.)*copy=True"):
            run[name]
    with hl.record(model, ["bn1", "bn2"], copy=True) as run:
        model(X)
    for name, value in expected.items():
        assert torch.equal(run[name], value)


@pytest.mark.trap(18)
def test_gradients_of_a_written_record_are_the_later_values():
    model = Net().eval()
    _, expected = truth(model)
    kept = {}
    handles = [
        getattr(model, name).register_forward_hook(
            lambda module, args, output, name=name: kept.update({name: output})
        )
        for name in expected
    ]
    loss = model(X).sum()
    found = torch.autograd.grad(loss, [kept["bn1"], kept["bn2"]])
    for handle in handles:
        handle.remove()
    for grad, right in zip(found, expected.values(), strict=True):
        assert not torch.allclose(grad, right)
    with hl.record(model, ["bn1:grad_output", "bn2:grad_output"]) as run:
        model(X).sum().backward()
    for name, right in expected.items():
        assert torch.equal(run[f"{name}:grad_output"], right)


@pytest.mark.trap(19)
def test_a_full_backward_hook_before_in_place_is_an_error():
    model = Net().eval()
    _, expected = truth(model)
    handle = model.bn1.register_full_backward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="BackwardHookFunction"):
        model(X)
    handle.remove()
    seen = []
    with hl.attach(model) as line, hl.edit(model, "bn2:grad_output", lambda grad: grad * 2):
        line.backward("bn1", lambda module, grads_in, grads_out: seen.append(grads_out[0]))
        model(X).sum().backward()
    assert torch.equal(seen[0], expected["bn1"] * 2)
