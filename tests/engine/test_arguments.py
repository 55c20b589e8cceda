"""What modules are called with, as one value, and what raw hooks are given of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.arguments import Arguments


class Taking(nn.Module):
    def forward(self, x, y=None, *rest, scale=1.0, **options):
        return x * scale


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
    arguments = Arguments()
    found = arguments.bind(Taking(), args, kwargs)
    assert found == bound
    assert arguments.unbind(found, found, args, kwargs) == (args, kwargs)


def test_a_lone_tensor_needs_no_name_by_position_or_by_keyword():
    x, new = torch.ones(1), torch.zeros(1)
    assert Arguments().bind(Taking(), (x,), {}) is x
    assert Arguments().unbind(new, x, (x,), {}) == ((new,), {})
    assert Arguments().bind(Taking(), (), {"x": x}) is x
    assert Arguments().unbind(new, x, (), {"x": x}) == ((), {"x": new})


def test_arguments_that_no_parameter_takes_are_numbered():
    class Odd(nn.Module):
        forward = None

    arguments, odd = Arguments(), Odd()
    assert arguments.bind(odd, (1, 2), {}) == {"arg0": 1, "arg1": 2}
    assert arguments.unbind({"arg0": 3, "arg1": 4}, {}, (1, 2), {}) == ((3, 4), {})


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


def test_a_hook_removed_during_a_call_is_still_called_in_it_and_then_no_more():
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
            other.quiet = True
            other.forward("", lambda *_: log.append("hookline"))
        model(torch.ones(1))
        model(torch.ones(1))
        if by == "hookline":
            one.remove()
            assert not len(hl.inventory(model))
    assert log == ["torch", "hookline"]


def test_always_called_hooks_get_what_there_is_when_a_module_raises():
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
