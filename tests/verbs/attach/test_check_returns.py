"""What raw hooks may return: each wrong return is an error that names the site and the remedy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


class Two(nn.Module):
    def forward(self, a, b):
        return a * 2, b * 3


class Named(nn.Module):
    def forward(self, x):
        return {"a": x * 2, "b": x * 3}


X = torch.ones(2, 3)


def run(model, n_inputs):
    found = model(*[X.clone().requires_grad_() * 1 for _ in range(n_inputs)])
    parts = list(found.values()) if isinstance(found, dict) else found
    parts = parts if isinstance(parts, list | tuple) else [parts]
    sum(part.square().sum() for part in parts).backward()


WRONG = {
    "shape": (torch.ones(3, 2), torch.ones(2, 3)),
    "broadcastable": (torch.ones(1, 3), torch.ones(2, 3)),
    "dtype": (X.double(), X),
    "device": (X.to("meta"), X),
    "too few": (X,),
    "too many": (X, X, X),
    "a lone one for two": X,
    "none for one": (None, X),
    "structure": {"a": X, "b": X},
    "no gradient at all": "zeros",
    "true": True,
}


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
@pytest.mark.parametrize("wrong", WRONG)
def test_gradients_of_another_form_are_refused(kind, wrong):
    with hl.attach(Two()) as line, pytest.raises(hl.StructureError) as caught:
        getattr(line, kind)("", lambda *_: WRONG[wrong])
        run(line.root, 2)
    assert "must return the form of" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
    assert "Return gradients of the same form" in str(caught.value)
    assert f":{kind}" in caught.value.__notes__[0]


@pytest.mark.parametrize("wrong", [(X, X), {"a": X}, {"a": X, "c": X}, {"b": X, "a": X[:1]}, X])
def test_gradients_of_a_structure_keep_it(wrong):
    with (
        hl.attach(Named()) as line,
        pytest.raises(hl.StructureError, match="must return the form of"),
    ):
        line.backward_pre("", lambda *_: wrong)
        run(line.root, 1)


def test_gradients_are_taken_as_a_tuple_a_list_or_alone():
    seen = []
    for n_inputs, make, returned in (
        (2, Two, (X * 5, X * 6)),
        (2, Two, [X * 5, X * 6]),
        (1, Named, {"a": X * 5, "b": X * 6}),
        (1, nn.Tanh, X * 5),
        (1, nn.Tanh, [X * 5]),
    ):
        with hl.attach(make()) as line:
            line.backward_pre("", lambda *_, returned=returned: returned)
            line.backward_pre("", lambda module, grads: seen.append(grads))
            run(line.root, n_inputs)
    assert [list(found) for found in seen if isinstance(found, dict)] == [["a", "b"]]
    firsts = [(found["a"] if isinstance(found, dict) else found[0]) for found in seen]
    assert all(torch.equal(first, X * 5) for first in firsts)
    assert len(firsts) == 5


@pytest.mark.parametrize("kind", ["backward", "backward_pre", "grad"])
def test_a_gradient_changed_in_place_and_not_returned_is_refused(kind):
    model = nn.Linear(3, 3)

    def change(*values):
        grad = values[0] if kind == "grad" else values[1][0]
        grad.mul_(2)

    with hl.attach(model) as line, pytest.raises(hl.StructureError, match="in place") as caught:
        getattr(line, kind)("weight" if kind == "grad" else "", change)
        run(model, 1)
    assert "Return a new tensor instead" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("wrong", [X[0], X.double(), X.to("meta"), (X,), True, "x"])
def test_a_tensors_gradient_is_replaced_by_one_of_its_form_alone(wrong):
    b = X.clone().requires_grad_() * 1
    with (
        hl.attach() as line,
        pytest.raises(hl.StructureError, match="must return a gradient of") as caught,
    ):
        line.grad(b, lambda grad: wrong)
        b.sum().backward()
    assert "tensor[2, 3]:grad" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.trap(38)
@pytest.mark.parametrize("stray", [True, "", (), 0])
def test_whatever_a_hook_returns_becomes_the_output(stray):
    model = nn.Sequential(nn.Linear(3, 3))
    handle = model[0].register_forward_hook(lambda *_: stray)
    assert model(X) is stray
    handle.remove()
    with pytest.raises(hl.StructureError, match="must return an output with tensors") as failed:
        with hl.attach(model) as line:
            line.forward("0", lambda *_: stray)
            model(X)
    assert "0:forward (Linear)" in failed.value.__notes__[0]
    with pytest.raises(hl.StructureError), hl.edit(model, "0", lambda value: stray):
        model(X)


@pytest.mark.parametrize("with_kwargs", [False, True])
def test_a_pre_hooks_single_value_is_wrapped_with_kwargs_a_pair(with_kwargs):
    model = nn.Identity()
    with hl.attach(model) as line:
        line.forward_pre("", lambda module, *_: X * 5, with_kwargs=with_kwargs)
        if with_kwargs:
            with pytest.raises(hl.StructureError, match=r"must return \(args, kwargs\), got"):
                model(X)
        else:
            assert torch.equal(model(X), X * 5)


@pytest.mark.trap(38)
def test_a_list_is_an_argument_only_where_there_was_one():
    class Summing(nn.Module):
        def forward(self, parts):
            return sum(parts)

    model = Summing()
    handle = model.register_forward_pre_hook(lambda module, args: [X, X * 2])
    assert torch.equal(model((X,)), X * 3)  # a tuple became a list, and nothing is said
    handle.remove()
    with hl.attach(model) as line:
        line.forward_pre("", lambda module, args: [X, X * 2])
        assert torch.equal(model([X]), X * 3)
        with pytest.raises(hl.StructureError, match="would become one argument"):
            model((X,))


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("state_dict_pre", lambda m, o: m.state_dict()),
        ("state_dict", lambda m, o: m.state_dict()),
        ("load_state_dict_pre", lambda m, o: m.load_state_dict(m.state_dict())),
        ("load_state_dict", lambda m, o: m.load_state_dict(m.state_dict())),
        ("accumulated", lambda m, o: m(X).sum().backward()),
        ("step_post", lambda m, o: o.step()),
    ],
)
def test_hooks_that_return_nothing_are_held_to_it(kind, act):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hl.attach(model) as line, pytest.raises(hl.StructureError) as caught:
        line.options.quiet = True  # of two parameters, the first raises
        getattr(line, kind)(optimizer if kind == "step_post" else "", lambda *_: X)
        act(model, optimizer)
    assert "would be ignored" in str(caught.value)
    assert "in place" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("wrong", [3, "x", (1, 2), ((), []), [(), {}]])
def test_the_arguments_of_a_step_are_a_pair(wrong):
    optimizer = torch.optim.SGD([nn.Parameter(X.clone())], lr=0.1)
    with (
        hl.attach() as line,
        pytest.raises(hl.StructureError, match=r"must return \(args, kwargs\), got"),
    ):
        line.step_pre(optimizer, lambda *_: wrong)
        optimizer.step()
