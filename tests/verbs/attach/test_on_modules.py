"""Raw hooks on modules: torch's own semantics, and where torch's are a trap."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hookline as hl


@dataclass
class Out:
    first: torch.Tensor
    second: torch.Tensor


class Two(nn.Module):
    """Two inputs, one of them by keyword, and two outputs in a structure."""

    def __init__(self, build=lambda a, b: (a, b)):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.build = build

    def forward(self, x, y, flag=True):
        return self.build(self.linear(x) * y, x + y)


class Outer(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.stem, self.inner, self.call = nn.Linear(3, 3), inner, call

    def forward(self, x):
        x = self.stem(x)
        found = self.call(self.inner, x)
        parts = found.values() if isinstance(found, dict) else (
            (found.first, found.second) if isinstance(found, Out) else found
        )  # fmt: skip
        return sum((k + 1) * part for k, part in enumerate(parts)).sum()


def by_position(inner, x):
    return inner(x, x * 2)


def by_keyword(inner, x):
    return inner(x, y=x * 2)


@pytest.fixture
def x():
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def same(found, expected):
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and all(map(same, found, expected))
    return found is expected if expected is None else torch.equal(found, expected)


def test_backward_hooks_get_and_change_what_torchs_do(x):
    torch.manual_seed(0)
    model = Outer(Two(), by_position)
    for change in (None, 3.0):
        seen = []

        def back(module, grad_input, grad_output, change=change, seen=seen):
            seen.append((type(module), grad_input, grad_output))
            changed = tuple(None if grad is None else grad * (change or 1) for grad in grad_input)
            return None if change is None else changed

        def pre(module, grad_output, change=change, seen=seen):
            seen.append((type(module), grad_output))
            return None if change is None else tuple(g + change for g in grad_output)

        model.zero_grad()
        handles = [
            model.inner.register_full_backward_pre_hook(pre),
            model.inner.register_full_backward_hook(back),
        ]
        model(x).backward()
        for handle in handles:
            handle.remove()
        expected, gradients = list(seen), [p.grad.clone() for p in model.parameters()]
        seen.clear()
        model.zero_grad()
        with hl.attach(model) as line:
            line.backward("inner", back)
            line.backward_pre("inner", pre)
            model(x).backward()
        assert len(seen) == 2
        for found, wanted in zip(seen, expected, strict=True):
            assert found[0] is wanted[0]
            assert all(map(same, found[1:], wanted[1:]))
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)
        )


@pytest.mark.parametrize(
    "build", [lambda a, b: {"a": a, "b": b}, Out, lambda a, b: [a, b]], ids=["dict", "data", "list"]
)
def test_structures_torch_calls_nothing_for_keep_their_form(x, build):
    model, seen = Outer(Two(build), by_keyword), []
    with hl.attach(model) as line:
        line.backward_pre("inner", lambda module, grad_output: seen.append(grad_output))
        line.backward("inner", lambda module, *grads: seen.append(grads))
        model(x).backward()
    before, (grad_input, grad_output) = seen
    parts = [
        list(found.values()) if isinstance(found, dict)
        else [found.first, found.second] if isinstance(found, Out) else list(found)
        for found in (before, grad_output)
    ]  # fmt: skip
    for found in parts:
        assert [part.unique().tolist() for part in found] == [[1.0], [2.0]]
    assert len(grad_input) == 2  # the positional argument, then the keyword one
    assert all(grad.shape == (2, 3) for grad in grad_input)


def test_an_in_place_layer_behind_a_module_is_no_obstacle(x):
    def build(register):
        torch.manual_seed(0)
        model, seen = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)), []
        register(model, lambda module, grad_input, grad_output: seen.append(grad_output[0]))
        return model, seen

    model, _ = build(lambda model, hook: model[0].register_full_backward_hook(hook))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        model(x.requires_grad_())
    line = None

    def ours(model, hook):
        nonlocal line
        line = hl.attach(model)
        line.backward("0", hook)

    model, seen = build(ours)
    model(x).sum().backward()
    line.remove()
    hidden = model[0](x).detach().requires_grad_()
    model[2](hidden.relu()).sum().backward()
    assert torch.equal(seen[0], hidden.grad)


def test_inputs_without_gradients_give_nones_without_a_warning(x):
    model, seen = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), []
    with hl.attach(model) as line:
        line.backward("*", lambda module, grad_input, grad_output: seen.append(grad_input))
        model(x).sum().backward()
    assert seen[1] == (None,)
    assert seen[0][0].shape == (2, 3)


def test_what_comes_back_past_the_module_is_not_in_grad_input(x):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            x = self.stem(x)
            return x + self.inner(x)

    model, seen = Residual(), []
    with (
        hl.attach(model) as line,
        hl.record(model, ["inner:grad_input", "inner:grad_output"]) as run,
    ):
        line.backward("inner", lambda module, grad_input, _: seen.append(grad_input[0]))
        model(x).sum().backward()
    share = run["inner:grad_output"] @ model.inner.weight
    assert torch.allclose(seen[0], share)
    assert torch.allclose(run["inner:grad_input"], share + 1)


def test_each_call_and_each_backward_is_told_of(looped):
    seen = []
    with hl.attach(looped) as line:
        line.backward("block", lambda module, grad_input, grad_output: seen.append(grad_output))
        loss = looped(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        torch.autograd.grad(loss, looped.block.weight)
    assert len(seen) == 6
    assert all(map(same, seen[:3], seen[3:]))


def test_a_module_that_returns_its_parameter_or_input_is_told_of(x):
    class Giving(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.weight

    for model, given in ((Giving(), x), (nn.Identity(), x.clone().requires_grad_())):
        seen = []

        def note(module, *gradients, seen=seen):
            seen.append(gradients[-1][0])

        with hl.attach(model) as line:
            line.backward_pre("", note)
            line.backward("", note)
            (model(given) * 2).sum().backward()
        assert [grad.unique().tolist() for grad in seen] == [[2.0], [2.0]]
        assert not any(p._backward_hooks for p in [given, *model.parameters()])


def test_order_is_edits_hooks_recorders_with_prepend_among_hooks(net, image):
    seen = []

    def note(name):
        return lambda *_: seen.append(name)

    with (
        hl.record(net, "fc:grad_output", keep=lambda g: seen.append("record") or g),
        hl.attach(net) as line,
        hl.edit(net, "fc:grad_output", lambda g: seen.append("edit") or g),
        hl.attach(hl.EVERYWHERE) as everywhere,
    ):
        line.backward_pre("fc", note("second"))
        line.backward_pre("fc", note("first"), prepend=True)
        line.backward("fc", note("after"))
        everywhere.backward_pre(nn.Linear, note("everywhere"))
        net(image).sum().backward()
    assert seen == ["everywhere", "edit", "first", "second", "record", "after"]


def test_backward_hooks_on_inputs_run_everywhere_first_as_added(net, image):
    seen = []
    with hl.attach(net) as line, hl.attach(hl.EVERYWHERE) as everywhere:
        line.backward("fc", lambda *_: seen.append("second"))
        line.backward("fc", lambda *_: seen.append("first"), prepend=True)
        everywhere.backward(nn.Linear, lambda *_: seen.append("everywhere"))
        net(image).sum().backward()
    assert seen == ["everywhere", "first", "second"]


@pytest.mark.parametrize(
    ("kind", "returned", "says"),
    [
        ("backward", "x", "got str"),
        ("backward", (None,), "expected Tensor[2, 4]"),
        ("backward_pre", (torch.zeros(2, 5), torch.zeros(2, 5)), "must return the form of tuple"),
        ("backward_pre", torch.zeros(5), "got Tensor[5]"),
        ("backward_pre", torch.zeros(2, 5).double(), "float64"),
    ],
)
def test_what_cannot_stand_for_the_gradients_is_refused(net, image, kind, returned, says):
    with hl.attach(net) as line:
        getattr(line, kind)("fc", lambda *_: returned)
        with pytest.raises(hl.StructureError) as caught:
            net(image).sum().backward()
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
    assert caught.value.__notes__[0] == f"hookline: raised by the hook at fc:{kind} (Linear)"


@pytest.mark.parametrize("kind", ["backward", "backward_pre"])
def test_a_lone_gradient_is_wrapped_one_changed_in_place_refused(net, image, kind):
    with hl.attach(net) as line:
        getattr(line, kind)("fc", lambda module, first, *rest: first[0] * 0)
        net(image).sum().backward()
    assert not net.stem.weight.grad.any()
    with hl.attach(net) as line:
        getattr(line, kind)("fc", lambda module, first, *rest: first[0].mul_(0) and None)
        with pytest.raises((hl.StructureError, RuntimeError)):
            net(image).sum().backward()


def test_a_module_that_changes_one_of_several_inputs_is_refused(x):
    class Add(nn.Module):
        def forward(self, a, b):
            a += b
            return a

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.add = nn.Linear(3, 3), Add()

        def forward(self, x):
            return self.add(self.stem(x), self.stem(x))

    model = Model()
    with hl.attach(model) as line:
        line.backward("add", lambda *_: None)
        with pytest.raises(hl.AttachError, match="changes one of its several inputs in place"):
            model(x)
    with hl.record(model, "add:grad_input") as run:
        model(x).sum().backward()
    assert torch.equal(run["add:grad_input.a"], torch.ones(2, 3))


def test_nothing_is_left_and_copies_are_inert(net, image, left_as_found):
    before, seen = left_as_found(net), []
    line = hl.attach(net)
    for kind in ("backward", "backward_pre", "forward", "state_dict", "load_state_dict_pre"):
        getattr(line, kind)("fc", lambda *_, kind=kind: seen.append(kind))
    line.saved("fc", lambda t: t, lambda t: t)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(image).sum().backward()
        other.load_state_dict(other.state_dict())
        assert not seen
        assert not len(hl.inventory(other))
    net(image).sum().backward()
    net.load_state_dict(net.state_dict())
    line.remove()
    assert seen == ["forward", "backward_pre", "backward", "state_dict", "load_state_dict_pre"]
    net.zero_grad()
    assert [one[0] for one in left_as_found(net)[1:-10]] == [one[0] for one in before[1:-10]]
    assert not len(hl.inventory(net))


@pytest.mark.parametrize(
    ("attach", "says"),
    [
        (lambda line: line.backward("fc:grad_output", print), "must be given modules"),
        (lambda line: line.backward_pre("fc#1", print), "must be given modules"),
        (lambda line: line.backward("nothing", print), "matches no module"),
        (lambda line: line.backward("fc", 3), "must be a function, got int"),
        (lambda line: line.saved("fc", print, 3), "must be a function, got int"),
    ],
)
def test_what_cannot_be_hooked_is_refused_and_leaves_nothing(net, attach, says):
    with hl.attach(net) as line, pytest.raises(hl.HooklineError, match=says):
        attach(line)
    assert not len(hl.inventory(net))


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("register_backward_hook", "line.backward(selector, fn)"),
        ("register_forward_hook", "line.forward(selector, fn)"),
        ("register_full_backward_hook", "line.backward(selector, fn)"),
        ("register_module_backward_hook", "line.backward(selector, fn)"),
        ("register_module_full_backward_hook", "hl.attach(hl.EVERYWHERE), line.backward(None"),
        ("register_optimizer_step_pre_hook", "line.step_pre(None, fn)"),
        ("register_hook", "line.grad("),
        ("register_post_accumulate_grad_hook", "line.accumulated("),
        ("register_step_pre_hook", "line.step_pre(optimizer, fn)"),
        ("register_state_dict_post_hook", "line.state_dict("),
        ("register_load_state_dict_pre_hook", "line.load_state_dict_pre("),
        ("register_module_parameter_registration_hook", 'line.registered("parameter", fn)'),
    ],
)
def test_asking_for_torchs_name_names_the_one_here(net, name, instead):
    with pytest.raises(AttributeError) as caught:
        getattr(hl.attach(net), name)
    assert instead in str(caught.value)
    assert not hasattr(hl.attach(net), "something_else")
