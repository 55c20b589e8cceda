"""Traps of raw hooks that come from how modules are called and what they return."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.models._torchvision_import import import_torchvision


class Looped(nn.Module):
    """One block under two names, four calls in a pass."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.again = self.first

    def forward(self, x):
        for _ in range(2):
            x = self.again(self.first(x).tanh())
        return x


X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.mark.trap(20)
def test_a_shared_module_has_one_name_and_a_dict_keeps_one_call():
    model, kept = Looped(), {}
    expected = [model.first(X)]
    for k in range(3):
        expected.append(model.first(expected[-1] if k == 1 else expected[-1].tanh()))
    handles = [
        module.register_forward_hook(lambda m, a, output, name=name: kept.update({name: output}))
        for name, module in model.named_modules()
        if name
    ]
    model(X)
    for handle in handles:
        handle.remove()
    assert list(kept) == ["first"]
    assert torch.equal(kept["first"], expected[3])
    with hl.record(model, nn.Linear) as run:
        model(X)
    assert all(map(torch.equal, run.calls("again"), expected))
    assert len(run.calls("first")) == 4
    assert torch.equal(run["again#1"], run["first#1"])
    with pytest.raises(hl.AmbiguousError, match="first#0"):
        run["first"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))


@pytest.mark.trap(21)
def test_a_tied_parameter_is_seen_once_with_the_total_gradient():
    model, kept, ids = Tied(), {}, torch.tensor([1, 2])
    handles = [
        parameter.register_hook(lambda grad, name=name: kept.update({name: grad}))
        for name, parameter in model.named_parameters()
    ]
    model(ids).sum().backward()
    for handle in handles:
        handle.remove()
    assert list(kept) == ["embed.weight"]  # who asks for head.weight finds nothing
    with hl.record(model, "head.weight:grad") as run:
        model(ids).sum().backward()
    assert torch.equal(run["head.weight:grad"], kept["embed.weight"])
    assert torch.equal(run["embed.weight:grad"], kept["embed.weight"])
    assert hl.select(model, "*.weight:grad").sites == hl.select(model, "embed.weight:grad").sites


@pytest.mark.trap(22)
def test_a_hook_on_a_copy_writes_to_the_originals_store():
    model, kept = Looped(), []
    handle = model.first.register_forward_hook(lambda module, args, output: kept.append(output))
    copy.deepcopy(model)(X)
    assert len(kept) == 4  # of a model that did not run
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(model)
    handle.remove()
    with hl.record(model, "first") as run:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(X)
            assert not len(hl.inventory(other))
        assert not run.passes
        model(X)
    assert len(run.passes) == 1


@dataclass
class Out:
    hidden: torch.Tensor


FORMS = {
    "a dict": lambda t: {"hidden": t},
    "a list": lambda t: [t],
    "a dataclass": Out,
}


class Inner(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x, *, scale):
        return self.form(x * scale)


class Outer(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.inner = Inner(form)

    def forward(self, x, scale):
        found = self.inner(x, scale=scale)
        parts = vars(found) if isinstance(found, Out) else found
        return (parts[0] if isinstance(parts, list) else parts["hidden"]).sum()


@pytest.mark.trap(23)
@pytest.mark.filterwarnings("ignore:For backward hooks to be called")
@pytest.mark.parametrize("form", FORMS)
def test_full_backward_hooks_skip_structured_outputs(form):
    model, seen = Outer(FORMS[form]), []
    x, scale = X.clone().requires_grad_() * 1, torch.full((4, 3), 2.0, requires_grad=True) * 1
    handle = model.inner.register_full_backward_hook(lambda *_: seen.append(1))
    model(x, scale).backward(retain_graph=True)
    handle.remove()
    assert not seen
    with (
        hl.record(model, "inner", ports=("grad_output", "grad_input")) as run,
        hl.attach(model) as line,
    ):
        line.backward("inner", lambda module, grads_in, grads_out: seen.append(grads_out))
        model(x, scale).backward()
    grad = run["inner:grad_output"]
    assert type(grad) is type(FORMS[form](X))
    assert len(seen) == 1
    hidden = {"a dict": "hidden", "a list": 0, "a dataclass": "hidden"}[form]
    leaf = grad.hidden if isinstance(grad, Out) else grad[hidden]
    assert torch.equal(leaf, torch.ones(4, 3))
    assert torch.equal(run["inner:grad_input.scale"], x)


@pytest.mark.trap(23)
def test_full_backward_hooks_leave_out_keyword_arguments():
    model, seen = Outer(lambda t: {"hidden": t}), []
    model.inner.form = torch.Tensor.clone
    model.forward = lambda x, scale: model.inner(x, scale=scale).sum()
    x, scale = X, torch.full((4, 3), 2.0, requires_grad=True) * 1  # x is data: it needs no gradient
    handle = model.inner.register_full_backward_hook(lambda m, grads_in, _: seen.append(grads_in))
    with pytest.warns(UserWarning, match="no input.* require"):
        model(x, scale).backward(retain_graph=True)
    handle.remove()
    assert seen == [(None,)]  # of two inputs, one of which has a gradient
    with hl.attach(model) as line, hl.record(model, "inner", ports="grad_input") as run:
        line.backward("inner", lambda module, grads_in, grads_out: seen.append(grads_in))
        model(x, scale).backward()
    assert seen[1][0] is None
    assert torch.equal(seen[1][1], x)
    assert torch.equal(run["inner:grad_input"]["scale"], x)


class Cached(nn.Module):
    """As a language model does, returns the cache that it has been given, grown by a token."""

    def forward(self, x, cache):
        cache.update(x, x, 0)
        return x, cache


@pytest.mark.trap(24)
def test_a_recorded_cache_keeps_growing():
    import_torchvision()  # transformers imports it, and cannot where its operators are missing
    from transformers import DynamicCache

    model, kept = nn.ModuleDict({"inner": Cached()}), []
    handle = model["inner"].register_forward_hook(lambda m, args, output: kept.append(output[1]))
    cache = DynamicCache()
    with hl.record(model["inner"], "") as run:
        for _ in range(2):
            model["inner"](torch.zeros(1, 1, 1, 3), cache)
    handle.remove()
    assert [one.get_seq_length() for one in kept] == [2, 2]
    assert [one[""][1].get_seq_length() for one in run.passes] == [1, 2]


class Split(nn.Module):
    def forward(self, x):
        return x, x * 2


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.split = Split()

    def forward(self, x):
        first, second = self.split(x)
        return first + second


@pytest.mark.trap(25)
def test_an_edit_that_returns_the_first_of_a_tuple_gives_rows():
    model, x = Unpacks(), X[:2]
    handle = model.split.register_forward_hook(lambda module, args, output: output[0])
    wrong = model(x)
    handle.remove()
    assert torch.equal(wrong, x[0] + x[1])  # a row plus a row
    with pytest.raises(hl.StructureError, match="split"):
        with hl.edit(model, "split", lambda output: output[0]):
            model(x)
    with hl.edit(model, "split:output[0]", lambda first: first * 10):
        assert torch.equal(model(x), x * 10 + x * 2)
