"""Random models, structures, subsets and exceptions: gradients right, and nothing left behind."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge

import hookline as hl
from hookline.engine.pytree import tree
from thoroughness import examples

WIDTH = 3


@dataclass
class Out:
    value: object
    extra: object = None


WRAPS = {
    "plain": lambda x: x,
    "tuple": lambda x: (x * 1, None),
    "list": lambda x: [1, x * 2],
    "dict": lambda x: {"a": x * 1, "deep": (x * 3, "text")},
    "data": lambda x: Out(x * 1, {"mask": x > 0}),
    "same": lambda x: (x, x),
}


class Layer(nn.Module):
    """Takes what the layer before gave, by position or by keyword, and wraps what it computes."""

    def __init__(self, kind, wrap, by_keyword):
        super().__init__()
        self.part = {
            "linear": nn.Linear(WIDTH, WIDTH), "tanh": nn.Tanh(), "identity": nn.Identity(),
            "relu_": nn.ReLU(inplace=True), "view": nn.Flatten(0),
        }[kind]  # fmt: skip
        self.wrap, self.by_keyword, self.fails = WRAPS[wrap], by_keyword, False

    def forward(self, value, *, scale=1):
        total = sum(tensor for _, tensor in tree.tensors(value) if tensor.is_floating_point())
        total = self.part(total).reshape(-1, WIDTH)
        if self.fails:
            raise ValueError("on purpose")
        return self.wrap(total * scale)


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.stem, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers)

    def forward(self, x):
        value = self.stem(x)
        for layer in self.layers:
            value = layer(value=value, scale=2) if layer.by_keyword else layer(value)
        return value


layer = st.builds(
    Layer,
    st.sampled_from(["linear", "tanh", "identity", "relu_", "view"]),
    st.sampled_from(sorted(WRAPS)),
    st.booleans(),
)
models = st.lists(layer, min_size=1, max_size=4).flatmap(
    # One layer may come twice: a shared module, whose calls are apart.
    lambda layers: st.sampled_from([layers, [*layers, layers[0]]])
).map(Model)  # fmt: skip


def loss_of(value):
    tensors = [tensor for _, tensor in tree.tensors(value) if tensor.is_floating_point()]
    return sum((k + 1) * tensor.square().sum() for k, tensor in enumerate(tensors))


def reference(model, x):
    """torch.autograd.grad of what plain hooks caught, each tensor as it was when it was caught."""
    caught = {}

    def keep(path):
        def hook(module, args, output):
            edges = [
                get_gradient_edge(t) if t.requires_grad else None for _, t in tree.tensors(output)
            ]
            caught.setdefault(path, []).append(edges)

        return hook

    handles = [m.register_forward_hook(keep(path)) for path, m in model.named_modules() if path]
    loss = loss_of(model(x))
    for handle in handles:
        handle.remove()
    edges = [edge for calls in caught.values() for call in calls for edge in call if edge]
    found = iter(torch.autograd.grad(loss, edges, allow_unused=True, retain_graph=True))
    grads = {
        path: [[next(found) if edge else None for edge in call] for call in calls]
        for path, calls in caught.items()
    }
    return loss.detach(), grads


def parameters(model, x):
    model.zero_grad()
    loss_of(model(x)).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(one, other):
    return one is other if one is None or other is None else torch.equal(one, other)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models, st.integers(0, 99), st.data())
def test_gradients_of_any_structure_are_autograds(model, seed, data):
    torch.manual_seed(seed)
    x = torch.randn(2, WIDTH)
    _, expected = reference(model, x)
    bare = parameters(model, x)
    paths = sorted(expected)
    chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, unique=True))
    ports = data.draw(st.sampled_from(["grad_output", ("grad_output", "grad_input")]))
    line = hl.record(model, chosen, ports=ports)
    with line as run:
        found = parameters(model, x)
    assert all(map(same, found, bare))
    assert not len(hl.inventory(model))
    for path in chosen:
        calls = run.calls(f"{path}:grad_output")
        for value, wanted in zip(calls, expected[path], strict=True):
            tensors = [tensor for _, tensor in tree.tensors(value)]
            # A tensor that stands twice in a structure has its gradient twice.
            assert all(map(same, tensors, [grad for grad in wanted if grad is not None]))


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models, st.data())
def test_raw_hooks_without_effect_change_nothing_whatever_fails(model, data):
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH)
    bare = parameters(model, x)
    paths = [
        path for path, module in model.named_modules() if not isinstance(module, nn.ModuleList)
    ]
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    chosen = data.draw(
        st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from(paths)), max_size=5)
    )
    fails = data.draw(st.sampled_from(["no", "forward", "hook"]))
    seen = []

    def hook(*_):
        seen.append(1)
        if fails == "hook" and len(seen) == 3:
            raise ValueError("on purpose")

    with hl.attach(model) as line:
        for kind, path in chosen:
            getattr(line, kind)(path, hook)
        model.layers[-1].fails = fails == "forward"
        try:
            found = parameters(model, x)
        except ValueError:
            found = bare
        model.layers[-1].fails = False
        line.options.quiet = True
    assert not len(hl.inventory(model))
    # What comes back through an alias is added up in another order, and no more.
    for one, other in zip(found, bare, strict=True):
        assert same(one, other) or torch.allclose(one, other, rtol=1e-4)
    assert all(map(same, parameters(model, x), bare))


def test_the_zoo_is_no_straw_man():
    torch.manual_seed(0)
    model = Model([Layer("linear", "dict", True), Layer("relu_", "same", False)])
    _, grads = reference(model, torch.randn(2, WIDTH))
    assert sum(grad is not None for calls in grads.values() for call in calls for grad in call) >= 6
    with pytest.raises(ValueError, match="on purpose"):
        model.layers[0].fails = True
        model(torch.randn(2, WIDTH))
