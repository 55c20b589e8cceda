"""What modules are called with, as one value, and what raw hooks are given of it."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.utils import counters

import hookline as hl
from hookline.engine.pytree.call_arguments import ArgumentBinder


class Taking(nn.Module):
    def forward(self, x, y=None, *rest, scale=1.0, **options):
        return x * scale


class Odd(nn.Module):
    forward = None


@pytest.mark.parametrize(
    ("args", "kwargs", "bound"),
    [
        ((1, 2), {}, {"x": 1, "y": 2}),
        ((1,), {"scale": 2}, {"x": 1, "scale": 2}),
        ((1, 2, 3, 4), {"other": 5}, {"x": 1, "y": 2, "rest": (3, 4), "other": 5}),
        ((), {}, {}),
    ],
)
def test_arguments_are_bound_by_name_and_come_back_as_they_came(args, kwargs, bound):
    arguments, module = ArgumentBinder(), Taking()
    found = arguments.bind(module, args, kwargs)
    assert found == bound
    assert arguments.unbind(module, found, found, args, kwargs) == (args, kwargs)


def test_a_lone_tensor_needs_no_name_by_position_or_by_keyword():
    x, new = torch.ones(1), torch.zeros(1)
    assert ArgumentBinder().bind(Taking(), (x,), {}) is x
    assert ArgumentBinder().unbind(Taking(), new, x, (x,), {}) == ((new,), {})
    assert ArgumentBinder().bind(Taking(), (), {"x": x}) is x
    assert ArgumentBinder().unbind(Taking(), new, x, (), {"x": x}) == ((), {"x": new})


def test_arguments_that_no_parameter_takes_are_numbered():
    arguments, odd = ArgumentBinder(), Odd()
    assert arguments.bind(odd, (1, 2), {}) == {"arg0": 1, "arg1": 2}
    assert arguments.unbind(odd, {"arg0": 3, "arg1": 4}, {}, (1, 2), {}) == ((3, 4), {})


class PositionalOnly(nn.Module):
    def forward(self, x, /, *rest, **options):
        return x + 10 * options.get("x", 0) + 100 * sum(rest) + 1000 * options.get("rest", 0)


class Wrapped(nn.Module):
    """Takes more than its signature says, as a decorated forward may."""

    def forward(self, *args, **kwargs):
        return args[0] + 10 * args[1] + 100 * kwargs.get("arg1", 0)

    forward.__signature__ = inspect.signature(lambda self, arg1: None)


@pytest.mark.parametrize(
    ("module", "args", "kwargs", "bound"),
    [
        (PositionalOnly(), (1,), {"x": 2}, {"x": 1, "**x": 2}),
        (
            PositionalOnly(),
            (1, 2, 3),
            {"rest": 4, "x": 5},
            {"x": 1, "rest": (2, 3), "**rest": 4, "**x": 5},
        ),
        (PositionalOnly(), (1,), {"**x": 3, "x": 2}, {"x": 1, "**x": 3, "****x": 2}),
        (PositionalOnly(), (1,), {"rest": 2, "other": 3}, {"x": 1, "rest": 2, "other": 3}),
        (Wrapped(), (1, 2), {"arg1": 3}, {"arg1": 1, "*arg1": 2, "**arg1": 3}),
        (Wrapped(), (1, 2), {"*arg1": 3}, {"arg1": 1, "*arg1": 2, "***arg1": 3}),
    ],
)
def test_arguments_of_one_name_have_distinct_names(module, args, kwargs, bound):
    arguments = ArgumentBinder()
    found = arguments.bind(module, args, kwargs)
    assert found == bound
    assert arguments.unbind(module, found, found, args, kwargs) == (args, kwargs)


@given(
    names=st.permutations(["x", "rest", "**x", "**rest", "****x", "options", "arg1"]),
    n_args=st.integers(1, 4),
    n_kwargs=st.integers(0, 7),
)
def test_no_call_loses_an_argument_to_a_name(names, n_args, n_kwargs):
    args = tuple(range(n_args))
    kwargs = {name: 10 + number for number, name in enumerate(names[:n_kwargs])}
    for module in (PositionalOnly(), Odd(), Wrapped()):
        arguments = ArgumentBinder()
        found = arguments.bind(module, args, kwargs)
        assert arguments.unbind(module, dict(found), found, args, kwargs) == (args, kwargs)


class Calling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = PositionalOnly()

    def forward(self, a, b):
        return self.inner(a, x=b)


def test_an_edit_that_changes_nothing_leaves_one_name_twice():
    model, a, b = Calling(), torch.tensor(1.0), torch.tensor(2.0)
    with hl.edit(model, "inner:input", dict):
        assert model(a, b) == 21
    with hl.edit(model, 'inner:input["**x"]', hl.edits.scale(2)):
        assert model(a, b) == 41
    with hl.edit(model, "inner:input.x", hl.edits.scale(2)):
        assert model(a, b) == 22
    with hl.record(model, "inner:input") as run:
        model(a, b)
    assert run["inner:input"] == {"x": a, "**x": b}


class Minus(nn.Module):
    def forward(self, x, y):
        return x - y


def test_names_are_those_of_the_forward_that_runs():
    model, a, b = Minus(), torch.tensor(1.0), torch.tensor(2.0)
    with hl.edit(model, ":input.x", hl.edits.scale(100)):
        assert model(a, b) == 98
        model.forward = lambda y, x: x - y
        assert model(a, b) == 199
        model.forward = lambda x, y: y - x
        assert model(a, b) == -98
        del model.forward
        assert model(a, b) == 98


def test_names_are_those_of_a_forward_that_its_class_was_given(monkeypatch):
    model, a, b = Minus(), torch.tensor(1.0), torch.tensor(2.0)
    # Once something was compiled, the call behind it is refused (compile/test_guards.py).
    if frames := sys.modules.get("torch._dynamo.convert_frame"):
        monkeypatch.setattr(frames, "FRAME_COUNTER", 0)
    with hl.record(model, ":input") as run:
        model(a, b)
        monkeypatch.setattr(Minus, "forward", lambda self, y, x: x - y)
        model(a, b)
    assert [one[":input"] for one in run.passes] == [{"x": a, "y": b}, {"y": a, "x": b}]


def test_a_forward_that_is_new_at_each_look_up_has_its_names():
    class Fresh(Minus):
        @property
        def forward(self):
            return Uncommon()

    class Uncommon:
        __slots__ = ()  # no weak reference to it can be made

        def __call__(self, y, x):
            return x - y

    model = Fresh()
    with hl.edit(model, ":input.x", hl.edits.scale(100)):
        assert model(torch.tensor(1.0), torch.tensor(2.0)) == 199


def test_a_replaced_forward_is_not_kept_alive():
    model, a = Minus(), torch.tensor(1.0)
    with hl.record(model, ":input"):
        model.forward = lambda y, x: x - y
        model(a, a)
        forward = weakref.ref(model.forward)
        del model.forward
        gc.collect()
        assert forward() is None
        model(a, a)


def test_gradients_have_argument_names_of_the_forward_that_runs():
    model = Minus()

    def run_once():
        a, b = (torch.tensor(number, requires_grad=True) for number in (1.0, 2.0))
        model(a, b).backward()

    with hl.record(model, ":grad_input") as run:
        run_once()
        model.forward = lambda y, x: x - y
        run_once()
    found = [one[":grad_input"] for one in run.passes]
    assert found == [{"x": 1, "y": -1}, {"y": -1, "x": 1}]
    assert [list(one) for one in found] == [["x", "y"], ["y", "x"]]


@pytest.mark.slow
def test_names_in_compiled_code_are_of_the_forward_that_runs():
    torch._dynamo.reset()

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Minus()

        def forward(self, a, b):
            return self.inner(a, b)

    model, a, b = Outer(), torch.tensor(1.0), torch.tensor(2.0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with hl.edit(model, "inner:input.x", hl.edits.scale(100)):
        assert compiled(a, b) == 98
        model.inner.forward = lambda y, x: x - y
        assert compiled(a, b) == 199


@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize("by", ["torch", "hookline"])
def test_forward_hooks_are_given_what_torchs_are(by, with_kwargs):
    model, seen = Taking(), []
    x = torch.ones(2)

    def note(module, *values):
        seen.append((module is model, *values))

    if by == "torch":
        handles = [
            model.register_forward_pre_hook(note, with_kwargs=with_kwargs),
            model.register_forward_hook(note, with_kwargs=with_kwargs),
        ]
        y = model(x, 3, scale=2.0)
        for handle in handles:
            handle.remove()
    else:
        with hl.attach(model) as line:
            line.forward_pre("", note, with_kwargs=with_kwargs)
            line.forward("", note, with_kwargs=with_kwargs)
            y = model(x, 3, scale=2.0)
    kwargs = ({"scale": 2.0},) if with_kwargs else ()
    assert seen == [(True, (x, 3), *kwargs), (True, (x, 3), *kwargs, y)]
    assert seen[1][-1] is y


def test_a_hook_removed_in_a_call_is_called_in_it_then_no_more():
    # As with torch's own: what is to be called is settled when the calling begins.
    log = []
    for by in ("torch", "hookline"):
        model = nn.Identity()
        if by == "torch":
            model.register_forward_hook(lambda *_, model=model: model._forward_hooks.popitem())
            model.register_forward_hook(lambda *_: log.append("torch"))
            model(torch.ones(1))
            model._forward_hooks.clear()
        else:
            one, other = hl.attach(model), hl.attach(model)
            one.forward("", lambda *_, other=other: other.remove())
            other.options.quiet = True
            other.forward("", lambda *_: log.append("hookline"))
        model(torch.ones(1))
        model(torch.ones(1))
        if by == "hookline":
            one.remove()
            assert not len(hl.inventory(model))
    assert log == ["torch", "hookline"]


def test_always_called_hooks_get_what_there_is_after_a_raise():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("here")

    seen = {}
    for by in ("torch", "hookline"):
        model = Failing()

        def note(module, args, kwargs, output, by=by):
            seen[by] = len(args), kwargs, output

        with hl.attach(model) as line, pytest.raises(ValueError, match="here"):
            if by == "torch":
                model.register_forward_hook(note, with_kwargs=True, always_call=True)
            else:
                line.forward("", note, with_kwargs=True, always_call=True)
            model(torch.ones(1))
    assert seen["torch"] == seen["hookline"] == (1, {}, None)


def test_state_dict_hooks_are_given_what_torchs_are():
    seen = {"torch": [], "hookline": []}
    for by, found in seen.items():
        model = nn.Sequential(nn.Linear(2, 2))

        def note(*values, found=found):
            found.append([type(value).__name__ for value in values])

        kinds = ("state_dict_pre", "state_dict", "load_state_dict_pre", "load_state_dict")
        if by == "torch":
            names = (
                "state_dict_pre",
                "state_dict_post",
                "load_state_dict_pre",
                "load_state_dict_post",
            )
            for name in names:
                getattr(model[0], f"register_{name}_hook")(note)
            model.load_state_dict(model.state_dict())
        else:
            with hl.attach(model) as line:
                for kind in kinds:
                    getattr(line, kind)("0", note)
                model.load_state_dict(model.state_dict())
    assert seen["hookline"] == seen["torch"]
    assert len(seen["torch"]) == 4


@pytest.mark.usefixtures("fresh_dynamo")
def test_named_arguments_need_one_graph_for_all_lines():
    class Two(nn.Module):
        def forward(self, first, second, *rest):
            return first * 2 + second

    net, x = nn.Sequential(nn.Identity()), torch.ones(2)
    net.two = Two()
    net.forward = lambda x: net.two(x, x * 3, x)
    call = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(3):
        with hl.record(net, "two", ports="input") as run:
            call(x)
        assert list(run["two:input"]) == ["first", "second", "rest"]
    assert counters["stats"]["unique_graphs"] == 1
    net.two.forward = lambda left, right, third: left * 2 + right
    with hl.record(net, "two", ports="input") as run:
        call(x)
    assert list(run["two:input"]) == ["left", "right", "third"]
