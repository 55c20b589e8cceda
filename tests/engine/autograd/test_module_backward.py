"""flow: what comes back through a module alone, which raw backward hooks are given."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hookline as hl
from thoroughness import examples
from zoo import Asking, Residual


@pytest.fixture
def x():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(2))


def backward_at(model, path, x, change=None):
    """What a raw backward hook is given: (grad_input, grad_output), once for each call."""
    seen = []

    def hook(module, grad_input, grad_output):
        seen.append((grad_input, grad_output))
        return None if change is None else change(grad_input)

    model.zero_grad()
    with hl.attach(model) as line:
        line.backward(path, hook)
        model(x).square().sum().backward()
    return seen


def test_what_comes_back_through_a_module_is_its_share_alone(x):
    torch.manual_seed(0)
    model = Residual(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    hidden = model.stem(x)
    alias = hidden.view_as(hidden)
    (expected,) = torch.autograd.grad(model.head(hidden + model.inner(alias)).pow(2).sum(), alias)
    ((found, _),) = backward_at(model, "inner", x)
    assert torch.equal(found[0], expected)
    with hl.record(model, "inner:grad_input") as run:
        model(x).square().sum().backward()
    assert not torch.allclose(run["inner:grad_input"], expected)


def test_raw_hooks_are_given_what_torchs_full_backward_hooks_are(net, image):
    for module in net.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False  # which torch's own refuse
    expected, found = {}, {}

    def keep(store, path):
        return lambda module, grad_input, grad_output: store.update(
            {path: (*grad_input, *grad_output)}
        )

    paths = [path for path, module in net.named_modules() if path and path != "stem"]
    handles = [net.get_submodule(p).register_full_backward_hook(keep(expected, p)) for p in paths]
    net(image).square().sum().backward()
    for handle in handles:
        handle.remove()
    with hl.attach(net) as line:
        for path in paths:
            line.backward(path, keep(found, path))
        net(image).square().sum().backward()
    assert len(found) == len(expected) == len(paths)
    for path in paths:
        assert all(map(torch.equal, found[path], expected[path])), path


def test_a_tensor_given_as_several_arguments_is_one_inside(x):
    torch.manual_seed(0)
    model = Asking()
    ((found, _),) = backward_at(model, "attention", x)
    stem = model.stem(x)
    alias = stem.view_as(stem)
    loss = (model.attention(alias, alias, alias) + stem).square().sum()
    (expected,) = torch.autograd.grad(loss, alias)
    assert found[3] is None
    # What comes back to one tensor is one gradient.
    assert all(torch.equal(grad, expected) for grad in found[:3])


@pytest.mark.parametrize("n_dims", [2, 3])  # of a batch of sequences, Linear returns a view
@pytest.mark.parametrize("between", [nn.Identity(), nn.Flatten(0, -2), None])
def test_an_in_place_layer_hides_no_gradient(n_dims, between):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), between, nn.ReLU(inplace=True), nn.Linear(4, 2)]
    model = nn.Sequential(*[layer for layer in layers if layer is not None])
    x = torch.randn(*(3, 2, 4)[-n_dims:])
    hidden = model[0](x).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model[-1](hidden.relu()).square().sum(), hidden)
    for path in ("1", "2")[: len(model) - 2]:
        ((found, _),) = backward_at(model, path, x)
        assert torch.equal(found[0].reshape(hidden.shape), expected)
        backward_at(model, path, x, change=lambda grads: (torch.zeros_like(grads[0]),))
        assert not model[0].weight.grad.any()


def test_in_place_on_one_of_several_inputs_is_refused(x):
    class AddTo(nn.Module):
        def forward(self, x, y):
            return x.add_(y)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.add = nn.Linear(4, 4), nn.Linear(4, 4), AddTo()

        def forward(self, x):
            return self.add(self.one(x), self.two(x))

    model = Two()
    with hl.attach(model) as line:
        line.backward("add", lambda *given: None)
        with pytest.raises(hl.AttachError, match=r"in place.*\n.*'add:grad_input'"):
            model(x)
        line.options.quiet = True
    with hl.record(model, "add:grad_input") as run:  # the remedy
        model(x).sum().backward()
    assert list(run["add:grad_input"]) == ["x", "y"]
    assert all(torch.equal(grad, torch.ones(3, 4)) for grad in run["add:grad_input"].values())


def test_several_inputs_meet_and_are_changed_together(x):
    model = nn.Bilinear(4, 4, 2)
    given = x.clone().requires_grad_(), x.clone().requires_grad_()

    def swap(module, grad_input, grad_output):
        return grad_input[1], grad_input[0] * 0

    model(*given).sum().backward()
    expected = [value.grad.clone() for value in given]
    for value in given:
        value.grad = None
    with hl.attach(model) as line:
        line.backward("", swap)
        model(*given).sum().backward()
    assert torch.equal(given[0].grad, expected[1])
    assert not given[1].grad.any()


class TwoOf(nn.Module):
    """Several outputs, one of which may be a view of what nobody else holds."""

    def __init__(self, is_view):
        super().__init__()
        self.is_view = is_view

    def forward(self, x):
        h = x * 1
        return (h.view(-1) if self.is_view else h), h.sum()


@pytest.mark.parametrize("kind", ["backward_pre", "backward"])
@pytest.mark.parametrize("is_view", [False, True])
def test_in_place_on_one_of_several_outputs_is_right_or_refused(x, kind, is_view):
    def step(model, x):
        v, total = model(x)
        v.mul_(2)
        return torch.autograd.grad(v.sum() + total, x)

    model, x = TwoOf(is_view), x.requires_grad_()
    (expected,) = step(model, x)
    with hl.attach(model) as line:
        getattr(line, kind)("", lambda *_: None)
        if is_view and kind == "backward_pre":  # h has the new numbers, and not the history
            with pytest.raises(hl.AttachError, match=r"changed in place.*wrong.*\n.*grad_output"):
                step(model, x)
            line.options.quiet = True
        else:
            assert torch.equal(step(model, x)[0], expected)
    with hl.record(model, ports="grad_output") as run:  # what the message tells to do
        assert torch.equal(step(model, x)[0], expected)
    assert len(run[":grad_output"]) == 2


def test_an_argument_that_comes_after_others_has_its_gradient(x):
    class Keyword(nn.Module):
        def forward(self, a, b):
            return a * b

    found = {}
    model, a = Keyword(), x.requires_grad_()
    b = (x * 2).detach().requires_grad_()
    with hl.attach(hl.EVERYWHERE) as everywhere, hl.attach(model) as line:
        everywhere.backward(Keyword, lambda module, into, out: found.update(everywhere=into))
        line.forward_pre("", lambda module, args: (args[0], args[1] * 3))
        line.backward("", lambda module, into, out: found.update(line=into))
        model(a, b).sum().backward()
    assert torch.equal(found["line"][0], b * 3)
    assert torch.equal(found["line"][1], a)
    assert torch.equal(found["everywhere"][1], a * 3)


def test_an_output_that_an_edit_adds_has_its_gradient(x):
    class Pair(nn.Module):
        def forward(self, x):
            return x * 2, x * 3

    seen = []
    with hl.attach(hl.EVERYWHERE) as everywhere:
        everywhere.backward_pre(Pair, lambda module, out: seen.append(out))
        model = Pair()
        with hl.attach(model) as line:
            line.forward("", lambda module, args, output: (output[0], output[1] * 5))
            line.backward_pre("", lambda module, out: seen.append(out))
            first, second = model(x.requires_grad_())
            (first + second).sum().backward()
    one = torch.ones_like(x)
    by_line, by_everywhere = seen
    assert all(map(torch.equal, by_line, (one, one)))
    assert all(map(torch.equal, by_everywhere, (one, one * 5)))
    assert torch.equal(x.grad, one * 17)


def test_a_tensor_taken_twice_has_and_takes_one_gradient(x):
    class Twice(nn.Module):
        def forward(self, a, b):
            return a * 2 + b * 5

    model, h = Twice(), x.requires_grad_() * 1
    with hl.attach(model) as line:
        line.backward("", lambda module, into, out: (into[0] * 0, into[1]))
        with pytest.raises(hl.StructureError, match="one gradient for each tensor"):
            model(h, h).sum().backward()
    x.grad = None
    with hl.attach(model) as line:
        line.backward("", lambda module, into, out: tuple(grad * 2 for grad in into))
        h = x * 1
        model(h, h).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 14.0))


class Branches(nn.Module):
    """Reads a tensor itself, before it was split; a part is written to, and another is not."""

    def __init__(self, inplace, split):
        super().__init__()
        self.inplace, self.split = inplace, split

    def forward(self, y):
        skip = 5 * y.sum()
        q, k = self.split(y)
        early = 3 * q.sum()
        q = q.mul_(0.5) if self.inplace else q.mul(0.5)
        return q.sum() + 2 * k.sum() + early + skip


class Split(nn.Module):
    def forward(self, y):
        return y[:2], y[2:]


def test_what_is_read_from_a_views_base_is_not_the_views():
    found = {}
    for inplace in (False, True):
        model, kinds = Branches(inplace, Split()), found.setdefault(inplace, [])
        with hl.record(model, "split", ports="grad_output") as run, hl.attach(model) as line:
            line.backward("split", lambda module, into, out, kinds=kinds: kinds.extend(out))
            model(torch.ones(4, requires_grad=True) * 1).backward()
        kinds.extend(run["split:grad_output"])
        x = torch.ones(4, requires_grad=True)
        with hl.edit(model, "split:grad_output[1]", torch.zeros_like):
            model(x * 1).backward()
        kinds.append(x.grad)
    assert [grad.tolist() for grad in found[False]] == [
        [3.5, 3.5], [2.0, 2.0], [3.5, 3.5], [2.0, 2.0], [8.5, 8.5, 5.0, 5.0],
    ]  # fmt: skip
    assert all(map(torch.equal, found[True], found[False]))


def test_an_untraceable_write_gives_no_gradient_not_a_wrong_one(x):
    class Part(nn.Module):
        def forward(self, y):
            return y[:2]

    model = Part()

    def step(x):
        y = x * 1
        skip = 5 * y.sum()
        part = model(y)  # the root: its pass has ended when the write comes
        part.mul_(2)
        return part.sum() + skip

    x = x.requires_grad_()
    with pytest.warns(hl.HooklineWarning, match="not in place") as warned:
        with hl.record(model, ports="grad_output") as run:
            step(x).backward()
    assert ["never fired" in str(one.message) for one in warned] == [False, True]
    with pytest.raises(hl.NotRecordedError, match="cannot be told"):
        run[":grad_output"]
    with hl.edit(model, ":grad_output", torch.zeros_like) as line:
        line.options.quiet = True
        with pytest.raises(hl.AttachError, match="cannot be changed"):
            step(x).backward()


# -- leaves, and what outlives the pass ----------------------------------------------------------


@pytest.mark.parametrize("is_leaf", [True, False])
def test_an_input_shared_by_passes_keeps_no_hook_and_is_apart(is_leaf):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    leaf = torch.randn(3, 4, requires_grad=True)
    shared = leaf if is_leaf else leaf * 2
    with (
        hl.edit(model, "0:grad_input", hl.edits.scale(10.0)),
        hl.record(model, ports=("grad_input", "grad_output")) as run,
    ):
        for k in (1, 2):
            (k * model(shared).sum()).backward(retain_graph=True)
            leaf.grad = None
    assert not shared._backward_hooks
    first, second = (one["0:grad_input"] for one in run.passes)
    assert torch.equal(second, 2 * first)
    assert torch.equal(first, 10.0 * (run.passes[0]["0:grad_output"] @ model[0].weight))
    assert torch.equal(first, run.passes[0][":grad_input"])


def test_a_parameter_or_an_input_that_is_returned_keeps_no_hook(x):
    class Passing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return {"weight": self.weight, "x": x}

    model = Passing()
    x.requires_grad_()
    with hl.record(model, "", ports="grad_output", copy=True) as run:
        for k in (1, 2):
            out = model(x)
            (out["weight"] * k + out["x"] * k).sum().backward()
    found = [one[":grad_output"] for one in run.passes]
    assert [g["weight"].tolist() for g in found] == [[3.0] * 4, [6.0] * 4]
    assert [g["x"].sum().item() for g in found] == [12.0, 24.0]
    assert not model.weight._backward_hooks
    assert not x._backward_hooks


def test_a_list_among_the_arguments_stays_the_same_list(x):
    class Listing(nn.Module):
        def forward(self, many, pair):
            assert many is given
            many.append(pair[0] * 2)
            return many[0] + pair[1]

    value = nn.Linear(4, 4)(x)
    model, given = Listing(), [value]
    with hl.record(model, "", ports="grad_input") as run:
        model(given, (value, value)).sum().backward()
    assert given[0] is value
    assert len(given) == 2
    found = run[":grad_input"]
    assert list(found) == ["many", "pair"]
    assert len(found["many"]) == 1
    # In the list, which cannot be copied, over all uses; else through this pass alone.
    assert found["many"][0].unique().tolist() == [2.0]
    assert found["pair"][0] is found["pair"][1]
    assert found["pair"][0].unique().tolist() == [1.0]


# -- whatever the structure ----------------------------------------------------------------------


@dataclass
class Box:
    inside: object
    number: int = 3


atoms = st.sampled_from(["tensor", None, 3, "text"])
structures = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3),
        inner.map(Box),
    ),
    max_leaves=6,
)


def fill(shape, make):
    """The structure with tensors in the places of the word."""
    if isinstance(shape, dict):
        return {key: fill(part, make) for key, part in shape.items()}
    if isinstance(shape, list | tuple):
        return type(shape)(fill(part, make) for part in shape)
    if isinstance(shape, Box):
        return Box(fill(shape.inside, make))
    return make() if shape == "tensor" else shape


def tensors(value):
    if isinstance(value, dict):
        return [t for part in value.values() for t in tensors(part)]
    if isinstance(value, list | tuple):
        return [t for part in value for t in tensors(part)]
    if is_dataclass(value):
        return [t for field in fields(value) for t in tensors(getattr(value, field.name))]
    return [value] if torch.is_tensor(value) else []


class Through(nn.Module):
    """Takes one structure and returns another, computed of all that it took."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.shape = shape

    def forward(self, value, *, extra=None):
        total = sum(tensors(value), torch.zeros(2)) + sum(tensors(extra), torch.zeros(2))
        factors = iter(range(1, 100))
        return fill(self.shape, lambda: total * self.weight * next(factors))


class Between(nn.Module):
    def __init__(self, taken, given):
        super().__init__()
        self.taken, self.through = taken, Through(given)
        self.fails = False

    def forward(self, x):
        made = fill(self.taken, lambda: x * 1.5)
        out = self.through(made, extra=(x * 0.5,))
        if self.fails:
            raise ZeroDivisionError("in forward")
        return sum(tensors(out), x.sum(0))


@pytest.mark.filterwarnings("ignore:hl.record.*no gradient flowed back")  # to an unused parameter
@settings(max_examples=examples(60), deadline=None)
@given(
    structures,
    structures,
    st.sets(st.sampled_from(["grad_output", "grad_input", "grad"]), min_size=1),
    st.sampled_from(["", "forward", "backward"]),
)
def test_gradients_of_any_structure_are_right_and_leave_nothing(taken, out, ports, fails):
    model, x = Between(taken, out), torch.ones(2, requires_grad=True)

    def fail(grad):
        raise ZeroDivisionError("in backward")

    model.fails = fails == "forward"
    edit = {"forward": None, "backward": "through:grad_output", "": None}[fails]
    has_outputs = bool(tensors(fill(out, lambda: x)))
    line = hl.edit(model, edit, fail, ports="grad_output") if edit else None
    try:
        with hl.record(model, None, ports=tuple(ports)) as run:
            model(x).sum().backward()
    except ZeroDivisionError:
        assert fails == "forward" or (fails == "backward" and has_outputs)
    else:
        assert not fails or not has_outputs
        check(run, model, taken, out, ports, x)
    finally:
        if line is not None:
            line.options.quiet = True
            line.remove()
    assert not len(hl.inventory(model))
    assert not x._backward_hooks


def check(run, model, taken, out, ports, x):
    """The gradients by hand: the loss is linear in everything."""
    n_outputs = len(tensors(fill(out, lambda: x)))
    if "grad_output" in ports:
        found = tensors(run["through:grad_output"])
        assert [g.tolist() for g in found] == [[1.0, 1.0]] * n_outputs
    total = float(sum(range(1, n_outputs + 1)))
    if "grad_input" in ports and total:
        found = run["through:grad_input"]
        n_inputs = len(tensors(fill(taken, lambda: x)))
        assert len(tensors(found["value"])) == n_inputs
        assert all(g.tolist() == [2 * total] * 2 for g in tensors(found))
    if "grad" in ports and total:
        assert torch.equal(run["through.weight:grad"], model.through.weight.grad)


class Keeping(nn.Module):
    """Returns two tensors, and keeps the first, which a loss may use as well."""

    def forward(self, x):
        self.kept = x * 2
        return self.kept, x * 3


def test_an_output_that_is_kept_has_the_gradient_of_all_uses(x):
    model = nn.Sequential(nn.Linear(4, 4), Keeping())
    seen = []

    def step():
        first, second = model(x)
        (first.sum() + second.sum() + 5 * model[1].kept.sum()).backward()

    with hl.attach(model) as line, hl.record(model, "1:grad_output") as run:
        line.backward("1", lambda module, grad_input, grad_output: seen.append(grad_output))
        step()
    assert [float(grad.mean()) for grad in seen[0]] == [6.0, 1.0]
    assert [float(grad.mean()) for grad in run["1:grad_output"]] == [6.0, 1.0]
