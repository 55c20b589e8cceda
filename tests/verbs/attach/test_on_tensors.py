"""Raw hooks on parameters and tensors."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn

import hookline as hl
from second_thread import in_autograds_thread


def backward(model, image):
    model.zero_grad()
    model(image).square().sum().backward()


def test_a_parameters_gradient_is_seen_and_replaced(net, image):
    seen = []
    with hl.attach(net) as line:
        line.grad("fc*.bias", torch.zeros_like)
        line.grad("fc.weight", lambda grad: seen.append(grad.clone()))
        backward(net, image)
    assert not net.fc.bias.grad.any()
    assert torch.equal(seen[0], net.fc.weight.grad)
    assert not len(hl.inventory(net))


def test_any_tensor_can_be_hooked_without_a_model():
    a = torch.ones(5, requires_grad=True)
    b = 2 * a
    seen = []
    with hl.attach() as line:
        line.grad(a, seen.append)
        line.grad(b, seen.append)
        b.mean().backward()
    assert [grad.unique().item() for grad in seen] == pytest.approx([0.2, 0.4])
    assert b.grad_fn is not None
    assert not a._backward_hooks
    assert not b._backward_hooks


def test_hooks_run_in_torchs_order_and_prepend_puts_one_first(net, image):
    seen = []
    handle = net.fc.bias.register_hook(lambda grad: seen.append("before"))
    with hl.attach(net) as line:
        line.grad("fc.bias", lambda grad: seen.append("second"))
        line.grad("fc.bias", lambda grad: seen.append("third"))
        line.grad("fc.bias", lambda grad: seen.append("first"), prepend=True)
        with hl.record(net, "fc.bias:grad", keep=lambda g: seen.append("record") or g):
            line.grad("fc.bias", lambda grad: seen.append("fourth"))
            backward(net, image)
    handle.remove()
    assert seen == ["first", "before", "second", "third", "fourth", "record"]


def test_the_gradient_is_complete_when_it_has_been_accumulated(net, image):
    seen = []
    with hl.attach(net) as line:
        line.accumulated("fc", lambda parameter: seen.append(parameter.grad.clone()))
        net(image).sum().backward()
        net(image).sum().backward()
    assert len(seen) == 4
    assert any(torch.equal(seen[-1], p.grad) for p in net.fc.parameters())
    assert not net.fc.bias._post_accumulate_grad_hooks


def test_stepping_during_backward_is_like_stepping_after_it(net, image):
    other = torch.nn.Linear(4, 5)
    other.load_state_dict(net.fc.state_dict())
    x = torch.randn(2, 4)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.fc.parameters()}
    with hl.attach(net.fc) as line:
        line.accumulated("", lambda parameter: (optimizers[parameter].step(), None)[1])
        net.fc(x).square().sum().backward()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(x).square().sum().backward()
    optimizer.step()
    assert torch.equal(other.weight, net.fc.weight)


def test_gradients_changed_in_place_or_in_form_are_refused(net, image):
    for hook, says in (
        (lambda grad: grad.zero_(), "changed a gradient in place"),
        (lambda grad: grad[0], "must return a gradient of the same form"),
        (lambda grad: True, "got True"),
    ):
        with hl.attach(net) as line, pytest.raises(hl.StructureError) as caught:
            line.grad("fc.bias", hook)
            backward(net, image)
        assert says in str(caught.value)
        assert "fc.bias:grad" in str(caught.value)
        assert "zero_grad()" in caught.value.__notes__[1]


def test_an_accumulated_hook_that_returns_a_value_is_refused(net, image):
    with hl.attach(net) as line, pytest.raises(hl.StructureError, match="would be ignored"):
        line.accumulated("fc.bias", lambda parameter: parameter.grad)
        backward(net, image)


@pytest.mark.parametrize(
    ("attach", "error", "says"),
    [
        (lambda line, net: line.grad(torch.ones(2), print), hl.AttachError, "has no graph"),
        (lambda line, net: line.accumulated(torch.ones(2), print), hl.AttachError, "has no graph"),
        (
            lambda line, net: line.accumulated(net.fc.weight * 2, print),
            hl.AttachError,
            "only leaf tensors accumulate",
        ),
        (lambda line, net: line.grad("stem.weight", print), hl.AttachError, "a frozen parameter"),
        (lambda line, net: line.grad("fc:grad_output", print), hl.SelectionError, "is a module's"),
        (lambda line, net: line.grad("fc.bais", print), hl.SelectionError, "fc.bias"),
        (lambda line, net: line.grad("fc.bias", None), hl.AttachError, "must be a function"),
        (lambda line, net: hl.attach().grad("fc", print), hl.AttachError, "no model to select"),
    ],
)
def test_what_cannot_be_hooked_is_refused_with_the_remedy(net, attach, error, says):
    net.stem.weight.requires_grad_(False)
    with hl.attach(net) as line, pytest.raises(error, match=says) as caught:
        attach(line, net)
    assert len(str(caught.value).splitlines()) <= 3
    assert not len(hl.inventory(net))


def test_a_line_in_a_block_sees_the_backward_of_its_own_thread(net, image):
    entered, done = threading.Event(), threading.Event()

    def other():
        entered.wait()
        backward(net, image)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    seen = []
    with hl.attach(net) as line:
        line.grad("fc.bias", lambda grad: seen.append("grad"))
        line.accumulated("fc.bias", lambda parameter: seen.append("accumulated"))
        entered.set()
        done.wait()
        thread.join()
        assert seen == []
        backward(net, image)
    assert seen == ["grad", "accumulated"]


@pytest.mark.trap(42)
def test_a_backward_in_a_thread_of_autograd_belongs_to_the_line(net, image):
    seen = []
    with hl.attach(net) as line, hl.record(net, ["fc:grad_output", "fc.bias:grad"]) as run:
        line.grad("fc.bias", lambda grad: seen.append("grad"))
        line.backward("fc", lambda *_: seen.append("backward"))
        in_autograds_thread(net(image).sum().backward)
    assert seen in (["backward", "grad"], ["grad", "backward"])
    assert run["fc:grad_output"].shape == (2, 5)
    assert run["fc.bias:grad"].shape == (5,)


def test_a_tensor_pickled_meanwhile_leaves_its_hooks_behind(net):
    with hl.attach(net) as line:
        line.options.quiet = True
        line.grad("fc.bias", lambda grad: grad * 2)
        other = pickle.loads(pickle.dumps(net.fc.bias))  # a warning would be an error
        state = io.BytesIO()
        torch.save(net.state_dict(keep_vars=True), state)
    assert not other._backward_hooks
    other.sum().backward()
    assert torch.equal(other.grad, torch.ones_like(other))


def test_hooks_keep_neither_model_nor_parameter_nor_graph_alive(image):
    def one():
        model = nn.Linear(3, 3)
        with hl.attach(model) as line, hl.record(model, ports=("grad", "grad_output")):
            line.grad("weight", lambda grad: grad * 1)
            line.accumulated("weight", lambda parameter: None)
            line.backward("", lambda *_: None)
            y = model(torch.ones(2, 3))
            y.sum().backward()
        return weakref.ref(model), weakref.ref(model.weight), weakref.ref(y)

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in one()] == [None, None, None]
    finally:
        gc.enable()
