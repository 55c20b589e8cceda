"""Traps of raw hooks on gradients, and of what hooks keep alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import hookline as hl

X = torch.linspace(-1, 1, 12).view(4, 3)


class Branches(nn.Module):
    """Two layers whose outputs are added: one gradient for both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.one(x) + self.other(x)


@pytest.mark.trap(39)
def test_a_gradient_changed_in_place_changes_another_branchs():
    model = Branches()

    def zeroed(grad):
        grad.mul_(0)

    def forward_hook(module, args, output):
        output.register_hook(zeroed)

    handle = model.other.register_forward_hook(forward_hook)
    model(X).square().sum().backward()
    handle.remove()
    assert not model.one.bias.grad.any()  # only the other one's was to be changed
    model.zero_grad()
    with pytest.raises(hl.StructureError, match="changed a gradient in place"):
        with hl.edit(model, "other:grad_output", zeroed):
            model(X).square().sum().backward()
    model.zero_grad()
    with hl.edit(model, "other:grad_output", hl.edits.scale(0.0)):
        model(X).square().sum().backward()
    assert model.one.bias.grad.any()
    assert not model.other.bias.grad.any()


@pytest.mark.trap(39)
def test_a_recorded_grad_changes_when_it_is_clipped_or_zeroed():
    model, kept = nn.Sequential(nn.Linear(3, 1)), []
    handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    with hl.record(model, "0.weight:grad") as run:
        model(X).square().sum().backward()
    handle.remove()
    before = kept[0].clone()
    nn.utils.clip_grad_norm_(model.parameters(), before.norm().item() / 2)
    assert not torch.allclose(kept[0], before)
    model.zero_grad(set_to_none=False)
    assert not kept[0].any()
    assert torch.equal(run["0.weight:grad"], before)


class Two(nn.Module):
    """A module of several operations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).tanh() * 2


@pytest.mark.trap(40)
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_the_legacy_hooks_grad_input_is_the_last_operations():
    model, seen, x = nn.Sequential(Two(), nn.Linear(2, 2)), [], X.clone().requires_grad_()
    handles = [
        module.register_backward_hook(lambda module, grads_in, grads_out: seen.append(grads_in))
        for module in model
    ]
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    of_linear, of_two = seen
    assert [list(grad.shape) for grad in of_linear] == [[2], [4, 2], [2, 2]]  # bias, x, weight.T
    assert of_two[0].shape != x.shape
    with pytest.raises(AttributeError, match=r"not dL/dx.*\n.*line\.backward") as failed:
        with hl.attach(model) as line:
            line.register_backward_hook("0", lambda *_: None)
    assert "ports=('grad_input', 'grad_output')" in str(failed.value)
    expected, x.grad = x.grad, None
    with hl.record(model, "0:grad_input") as run:
        model(x).sum().backward()
    assert torch.equal(run["0:grad_input"], expected)


class Sized(nn.Module):
    """Returns something that can be watched for being alive."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.act, self.head = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)
        self.alive: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x):
        x = self.act(self.layer(x))
        self.alive.append(weakref.ref(x))
        return self.head(x)  # which keeps it for backward

    def n_alive(self):
        gc.collect()
        return sum(one() is not None for one in self.alive)


@pytest.mark.trap(41)
def test_a_record_keeps_the_graph_and_all_it_holds():
    model, kept = Sized(), []
    handle = model.head.register_forward_hook(lambda module, args, output: kept.append(output))
    for _ in range(3):
        model(X)
    handle.remove()
    assert model.n_alive() == 3  # for four numbers each
    kept.clear()
    assert model.n_alive() == 0
    with hl.record(model, "head") as run:
        for _ in range(3):
            model(X)
    assert len(run.passes) == 3
    assert model.n_alive() == 0


@pytest.mark.trap(41)
def test_a_kept_slice_keeps_the_storage_of_the_whole():
    model, kept = nn.Sequential(nn.Linear(3, 1000)), []
    handle = model[0].register_forward_hook(
        lambda module, args, output: kept.append(output.detach()[:, :2])
    )
    model(X)
    handle.remove()
    assert kept[0].untyped_storage().nbytes() == 4 * 4 * 1000
    with hl.record(model, "0", keep=lambda value: value[:, :2]) as run:
        model(X)
    assert run["0"].untyped_storage().nbytes() == 4 * 4 * 2
    assert torch.equal(run["0"], kept[0])


@pytest.mark.trap(41)
def test_a_tensor_hook_that_closes_over_its_tensor_is_not_freed():
    model, by_hand = Sized(), Sized()

    def hook(module, args, output):
        output.register_hook(lambda grad: grad * output.sign())

    handle = by_hand.act.register_forward_hook(hook)
    by_hand(X).sum().backward()
    handle.remove()
    assert by_hand.n_alive() == 1
    with (
        hl.record(model, "act:grad_output"),
        hl.edit(model, "act:grad_output", lambda grad: grad.sign()),
    ):
        model(X).sum().backward()
    assert model.n_alive() == 0


class Stop(Exception):
    """Of a hook that has what it wants."""


@pytest.mark.trap(41)
def test_an_exception_that_stops_early_keeps_activations_if_held():
    model = Sized()

    def hook(module, args, output):
        raise Stop

    handle = model.head.register_forward_hook(hook)
    try:
        model(X)
    except Stop as stop:
        held = stop
    handle.remove()
    assert model.n_alive() == 1  # by the frames of its traceback
    del held
    assert model.n_alive() == 0
    features = hl.features(model, X, "head")
    assert model.n_alive() == 0
    assert torch.equal(features["head"], model(X))


@pytest.mark.trap(41)
def test_a_dict_of_modules_keeps_the_model():
    def recorded(how):
        model = Sized()
        if how == "by hand":
            kept = {}
            handle = model.head.register_forward_hook(
                lambda module, args, output: kept.update({module: output.detach()})
            )
            model(X)
            handle.remove()
        else:
            with hl.record(model, "head") as kept:
                model(X)
        return kept, weakref.ref(model.head)

    kept, model = recorded("by hand")
    gc.collect()
    assert model() is not None
    assert len(kept) == 1
    kept, model = recorded("by a line")
    gc.collect()
    assert model() is None
    assert len(kept) == 1
