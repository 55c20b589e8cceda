"""line.saved: packing what autograd saves, and that the switch is never left on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


def is_off() -> bool:
    """Whether torch's own switch is as it was: nothing packs what is saved now."""
    a = torch.ones(2, requires_grad=True)
    return (a * a).grad_fn._saved_self is a


def test_saved_tensors_are_packed_forward_and_unpacked_backward(model):
    packed, unpacked = [], []
    x = torch.ones(2, 3)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with hl.attach(model) as line:
        line.saved("", lambda t: packed.append(t) or t.clone(), lambda t: unpacked.append(t) or t)
        y = model(x)
        assert packed
        assert not unpacked
        assert is_off()
    y.sum().backward()  # also after the line's end: what was packed has to be unpacked
    assert len(unpacked) == len(packed)
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))


def test_only_the_selected_modules_pack_and_the_inner_one_wins(model):
    seen = []
    with hl.attach(model) as line:
        line.saved("1", lambda t: seen.append("inner") or t, lambda t: t)
        line.saved("", lambda t: seen.append("outer") or t, lambda t: t)
        model(torch.ones(2, 3))
    assert seen.count("inner") == 1  # tanh saves its result
    assert seen.count("outer") >= 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_fails_leaves_the_switch_off(model, error):
    def fail(module, args):
        raise error

    with hl.attach(model) as line:
        line.saved("", lambda t: t, lambda t: t)
        handle = model[1].register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(torch.ones(2, 3))
        handle.remove()
        packed = []
        line.saved("0", lambda t: packed.append(t) or t, lambda t: t)
        model(torch.ones(2, 3))
        assert packed
        assert is_off()
    assert is_off()


def test_a_line_ended_inside_the_forward_leaves_the_switch_off(model):
    line = hl.attach(model)
    line.saved("", lambda t: t, lambda t: t)
    handle = model[1].register_forward_hook(lambda *_: line.remove())
    model(torch.ones(2, 3))
    handle.remove()
    assert is_off()


def test_recursion_pushes_and_pops_in_pairs():
    class Down(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x, n):
            return x if n == 0 else self(self.linear(x), n - 1)

    model, packed = Down(), []
    with hl.attach(model) as line:
        line.saved("", lambda t: packed.append(t) or t, lambda t: t)
        model(torch.ones(1, 2), 3).sum().backward()
        assert packed
        assert is_off()


def test_errors_name_the_site_and_wrong_returns_are_refused(model):
    def fail(tensor):
        raise ValueError("mine")

    with hl.attach(model) as line, pytest.raises(ValueError, match="mine") as caught:
        line.saved("0", fail, lambda t: t)
        model(torch.ones(2, 3))
    assert caught.value.__notes__ == ["hookline: raised by the hook at 0:saved (Linear)"]
    with hl.attach(model) as line:
        line.saved("1", lambda t: t, lambda t: "nothing")
        with pytest.raises(
            hl.StructureError,
            match="unpack at 1:saved must return the tensor that was packed, got str",
        ):
            model(torch.ones(2, 3)).sum().backward()
    assert is_off()


def test_without_a_model_torchs_own_is_named():
    with pytest.raises(hl.AttachError, match="saved_tensors_hooks"):
        hl.attach().saved("", lambda t: t, lambda t: t)


@pytest.mark.parametrize("first", ["saved", "others"])
def test_what_hooks_compute_is_not_packed_by_their_module(first):
    model, packed = nn.Sequential(nn.Tanh()), []
    x = torch.ones(2, requires_grad=True)
    with hl.attach(model) as line, hl.attach(model) as other:
        saved = lambda: line.saved("0", lambda t: packed.append(t) or t, lambda t: t)  # noqa: E731
        if first == "saved":
            saved()
        other.forward_pre("0", lambda module, args: args[0].exp())
        other.forward("0", lambda module, args, output: output.exp() * output)
        with hl.edit(model, "0", lambda t: t.exp()):
            if first == "others":
                saved()
            model(x)
    assert len(packed) == 1  # tanh saves its result, and nothing else is the module's


@pytest.mark.parametrize(
    "unpack", [lambda t: t[:1], lambda t: t.double(), lambda t: t.to("meta")],
    ids=["shape", "dtype", "device"],
)  # fmt: skip
def test_what_is_unpacked_in_another_form_is_refused(unpack):
    # torch checks nothing here: a row would be broadcast, and the gradient be wrong in silence.
    model = nn.Sequential(nn.Tanh())
    with hl.attach(model) as line, pytest.raises(hl.StructureError) as caught:
        line.saved("0", lambda t: t, unpack)
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert "must return a tensor of shape [2, 3], torch.float32" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_around_a_module_compiled_in_place_tensors_are_packed(model):
    model.compile(backend="eager")
    packed = []
    with hl.attach(model) as line:
        line.saved("", lambda t: packed.append(t) or t, lambda t: t)
        model(torch.ones(2, 3)).sum().backward()
    assert packed
