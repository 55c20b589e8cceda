"""edit on gradients: what changes, in which order, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from zoo import tanh_net


@pytest.fixture
def model():
    return tanh_net()


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def backward(model, x):
    model.zero_grad()
    model(x).square().sum().backward()


def test_what_lies_before_an_edit_gets_the_edited_gradient(model, x):
    with (
        hl.edit(model, "1:grad_output", hl.edits.clamp(min=0)),
        hl.record(model, ["1:grad_output", "1:grad_input"]) as run,
    ):
        backward(model, x)
    assert run["1:grad_output"].min() == 0
    tanh = model[0](x).tanh()
    expected = run["1:grad_output"] * (1 - tanh.square())
    assert torch.allclose(run["1:grad_input"], expected)
    assert torch.allclose(model[0].bias.grad, expected.sum(0))


@pytest.mark.parametrize("site", ["1:grad_output", "1:grad_input", "0.weight:grad"])
def test_edits_run_in_the_order_made_recorders_see_the_result(model, x, site):
    with hl.record(model, site) as bare:
        backward(model, x)
    with (
        hl.record(model, site) as run,  # attached first, and called last all the same
        hl.edit(model, site, lambda g: g + 1),
        hl.edit(model, site, lambda g: g * 2),
    ):
        backward(model, x)
    assert torch.equal(run[site], (bare[site] + 1) * 2)


def test_the_gradients_of_parameters_are_set_by_their_paths(model, x):
    with hl.edit(model, "*.bias:grad", torch.zeros_like):
        backward(model, x)
    assert [model[k].bias.grad.abs().sum().item() for k in (0, 2)] == [0, 0]
    assert model[0].weight.grad.abs().sum() > 0


def test_a_hook_that_was_on_the_parameter_comes_after_edits(model, x):
    seen = []
    handle = model[0].bias.register_hook(lambda g: seen.append(g.clone()))
    with hl.edit(model, "0.bias:grad", torch.ones_like):
        backward(model, x)
    backward(model, x)
    handle.remove()
    assert torch.equal(seen[0], torch.ones(6))
    assert not torch.equal(seen[1], torch.ones(6))


def test_one_leaf_of_a_structure_is_edited_alone():
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, batch_first=True)
    x = torch.randn(2, 5, 3)
    with (
        hl.edit(lstm, ":grad_output[0]", torch.zeros_like),
        hl.record(lstm, "", ports="grad_output") as run,
    ):
        out, (h, c) = lstm(x)
        (out.sum() + h.sum() + c.sum()).backward()
    grad_out, (grad_h, grad_c) = run[":grad_output"]
    assert not grad_out.any()
    assert torch.equal(grad_h, torch.ones(1, 2, 4))
    assert torch.equal(grad_c, torch.ones(1, 2, 4))


def test_one_call_of_a_shared_module_is_edited_alone(looped):
    x = torch.ones(1, 2)
    with hl.record(looped, "block:grad_output") as bare:
        looped(x).sum().backward()
    with (
        hl.edit(looped, "block:grad_output#1", lambda g: g * 0),
        hl.record(looped, "block:grad_output") as run,
    ):
        looped(x).sum().backward()
    found, before = run.calls("block:grad_output"), bare.calls("block:grad_output")
    assert torch.equal(found[2], before[2])  # behind it in the model, so before it in backward
    assert not found[1].any()
    assert not found[0].any()


def test_a_containers_edit_comes_before_its_last_childs(x):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    with (
        hl.edit(model, "0.1:grad_output", lambda g: g * 10),
        hl.edit(model, "0:grad_output", torch.ones_like),
        hl.record(model, ["0:grad_output", "0.1:grad_output"]) as run,
    ):
        backward(model, x)
    assert run["0:grad_output"].unique().tolist() == [1.0]
    assert run["0.1:grad_output"].unique().tolist() == [10.0]


def test_tensors_by_name_are_edited():
    a = torch.ones(3, requires_grad=True)
    b = 2 * a
    with hl.edit({"b": b}, "b", lambda g: g * 5):
        b.sum().backward()
    assert a.grad.tolist() == [10.0, 10.0, 10.0]
    assert not b._backward_hooks


def test_an_edited_gradient_can_be_differentiated_again(model, x):
    x.requires_grad_()
    scale = torch.tensor(2.0, requires_grad=True)
    with hl.edit(model, "1:grad_output", lambda g: g * scale):
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert scale.grad.abs() > 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda g: g[0], "expected Tensor[3, 6] float32 on cpu, got Tensor[6]"),
        (lambda g: g.double(), "got Tensor[3, 6] float64"),
        (lambda g: (g,), "got tuple(Tensor[3, 6])"),
        (lambda g: 3, "got 3"),
        (lambda g: g.to("meta"), "on meta"),
        (lambda g: g.zero_(), "changed a gradient in place"),
    ],
)
@pytest.mark.parametrize("site", ["1:grad_output", "1:grad_input"])
def test_what_cannot_be_the_gradient_is_refused_at_its_site(model, x, change, says, site):
    with hl.edit(model, site, change), pytest.raises(hl.StructureError) as caught:
        backward(model, x)
    assert says in str(caught.value)
    assert site in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
    assert not len(hl.inventory(model))


@pytest.mark.trap(39)
def test_a_gradient_changed_in_place_changes_another_branchs():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.one(x) + self.other(x)  # one gradient for both

    model = Branches()

    def zeroed(grad):
        grad.mul_(0)

    def forward_hook(module, args, output):
        output.register_hook(zeroed)

    handle = model.other.register_forward_hook(forward_hook)
    model(torch.ones(4, 3)).square().sum().backward()
    handle.remove()
    assert not model.one.bias.grad.any()  # only the other one's was to be changed
    model.zero_grad()
    with pytest.raises(hl.StructureError, match="changed a gradient in place"):
        with hl.edit(model, "other:grad_output", zeroed):
            model(torch.ones(4, 3)).square().sum().backward()
    model.zero_grad()
    with hl.edit(model, "other:grad_output", hl.edits.scale(0.0)):
        model(torch.ones(4, 3)).square().sum().backward()
    assert model.one.bias.grad.any()
    assert not model.other.bias.grad.any()


def test_an_error_in_backward_keeps_its_type_and_names_the_site(model, x):
    def fail(grad):
        raise ZeroDivisionError("mine")

    with hl.edit(model, "1:grad_output", fail), pytest.raises(ZeroDivisionError) as caught:
        backward(model, x)
    assert caught.value.__notes__ == [
        "hookline: raised by the hook at 1:grad_output (Tanh)",
        "hookline: the backward pass stopped there. Parameters that it had reached before have"
        " their .grad already, the others not: zero_grad() before you go on.",
    ]
    assert model[2].weight.grad is not None
    assert model[0].weight.grad is None
    assert not len(hl.inventory(model))
    backward(model, x)


@pytest.mark.trap(43)
def test_an_edit_ended_before_backward_warns_changing_nothing(model, x):
    backward(model, x)
    bare = model[0].weight.grad.clone()
    with pytest.warns(hl.HooklineWarning, match="no gradient flowed back"):
        with hl.edit(model, "1:grad_output", torch.zeros_like):
            y = model(x)
    model.zero_grad()
    with pytest.warns(hl.HooklineWarning, match="its line ended before this backward") as caught:
        y.square().sum().backward()
    assert torch.equal(model[0].weight.grad, bare)
    assert len(caught) == 1
    assert "Call backward() inside the block" in str(caught[0].message)


def test_edits_of_what_never_gets_a_gradient_are_warned_of(model, x):
    with pytest.warns(hl.HooklineWarning, match="the value there requires no gradient"):
        with hl.edit(model, "0:grad_input", torch.zeros_like):
            backward(model, x)
    with pytest.warns(hl.HooklineWarning, match=r"torch\.no_grad"):
        with hl.edit(model, "0:grad_output", torch.zeros_like), torch.no_grad():
            model(x)


def test_choosing_everything_may_leave_some_without_a_gradient(model, x):
    with hl.edit(model, None, lambda g: g * 2, ports=("grad_input", "grad_output")):
        backward(model, x)


def test_torchs_full_backward_hook_gets_what_is_edited_after_it():
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), []
    with hl.edit(model, "0:grad_output", hl.edits.scale(0.0)):
        handle = model[0].register_full_backward_hook(lambda *given: seen.append(given[2][0]))
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()
        handle.remove()
    assert seen[0].any()
    assert not model[0].weight.grad.any()
