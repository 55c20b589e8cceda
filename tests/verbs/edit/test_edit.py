"""edit and the ready-made edits."""

from __future__ import annotations

import re
from collections import UserDict, UserList, namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hookline as hl
from hookline.verbs.edit import edits
from second_thread import Meanwhile, ToldLock
from zoo import Two


def test_an_edit_changes_what_flows_on(net, image):
    with hl.edit(net, "layer1", lambda t: t * 0):
        edited = net(image)
    assert torch.equal(
        edited, net.fc(net.pool(net.layer2(net.layer1(net.stem(image)) * 0)).flatten(1))
    )
    assert not torch.equal(edited, net(image))


def test_an_edit_that_always_returns_none_is_warned_of(net, image):
    clean = net(image)
    with (
        pytest.warns(hl.HooklineWarning, match=r"nothing at layer1: the function returned None"),
        hl.edit(net, "layer1", lambda t: None) as line,
    ):
        assert torch.equal(net(image), clean)
    assert "layer1  Sequential      1" in str(line.report())
    assert "note: hl.edit changed nothing at layer1" in " ".join(str(line.report()).split())
    with (
        pytest.warns(hl.HooklineWarning, match=r"nothing at layer1:grad_output: the function"),
        hl.edit(net, "layer1:grad_output", lambda grad: None),
    ):
        net(image).sum().backward()


def test_an_edit_may_return_none_now_and_then(net, image):
    clean, numbers = net(image), iter((None, 2.0, None))

    def now_and_then(value):
        factor = next(numbers)
        return None if factor is None else value * factor

    with hl.edit(net, "layer1", now_and_then):
        same = [torch.equal(net(image), clean) for _ in range(3)]
    assert same == [True, False, True]


def test_a_change_may_ask_for_its_site(net, image):
    class Scale:
        def __call__(self, value):
            raise AssertionError("the change at the site is called in its place")

        def at(self, site):
            factor = {"layer1": 0.0, "fc:grad_output": 2.0}[str(site)]
            return lambda value: value * factor

    with hl.edit(net, ["layer1", "fc:grad_output"], Scale()):
        y = net(image)
        y.sum().backward()
    expected = net.fc(net.pool(net.layer2(net.layer1(net.stem(image)) * 0)).flatten(1))
    assert torch.equal(y, expected)
    assert (net.fc.bias.grad == 2 * len(image)).all()


def test_a_mapping_makes_one_line_with_one_report(net, image):
    changes = {
        "layer1": hl.edits.scale(0.0), nn.Linear: hl.edits.add(1.0),
        net.fc: hl.edits.scale(2.0), "fc.bias:grad": torch.zeros_like,
    }  # fmt: skip
    with hl.edit(net, changes) as line:
        y = net(image)
        y.sum().backward()
    zeros = net.layer1(net.stem(image)) * 0
    assert torch.equal(y, 2 * (net.fc(net.pool(net.layer2(zeros)).flatten(1)) + 1))
    assert not net.fc.bias.grad.any()
    fired = [(str(site), count) for site, count in line.report().fired]
    assert fired == [("layer1", 1), ("fc", 1), ("fc", 1), ("fc.bias:grad", 1)]
    assert not hl.inventory(net)


def test_a_mapping_is_attached_whole_or_not_at_all(net):
    with pytest.raises(hl.SelectionError, match="nothing_there"):
        hl.edit(net, {"layer1": hl.edits.scale(0), "nothing_there": hl.edits.scale(0)})
    with pytest.raises(hl.AttachError, match="must be a function of the value, got Tensor"):
        hl.edit(net, {"layer1": hl.edits.scale(0), "fc": torch.zeros(1)})

    class Fails:
        def __call__(self, value):
            return value

        def at(self, site):
            raise hl.StructureError("at this site")

    with pytest.raises(hl.StructureError, match="at this site"):
        hl.edit(net, {"layer1": hl.edits.scale(0), "fc": Fails()})
    assert not hl.inventory(net)


def test_a_mapping_goes_without_a_change_and_a_selector_with_one(net):
    for arguments, said in (
        (({"fc": hl.edits.scale(0)}, hl.edits.scale(0)), "got a mapping and a change"),
        (({},), "got an empty mapping"),
        (("fc",), "change must be a function of the value, got NoneType"),
    ):
        with pytest.raises(hl.AttachError, match=said):
            hl.edit(net, *arguments)


class Branches(nn.Module):
    """What the caller gave and what a layer made, each read by a second branch as well."""

    def __init__(self):
        super().__init__()
        self.given, self.linear, self.made = nn.Identity(), nn.Linear(3, 3), nn.Identity()
        self.seen = []

    def forward(self, x):
        hidden = self.linear(x)
        try:
            return self.given(x) + self.made(hidden)
        except hl.StructureError:
            self.seen.append((x.clone(), hidden.clone()))
            raise


def zeroed(value):
    return value.zero_()


def a_column(value):
    value[:, 0] = 0


def then_fails(value):
    value.mul_(2)
    raise hl.StructureError("wrote in place, and failed")


@pytest.mark.parametrize("write", [zeroed, a_column, then_fails])
@pytest.mark.parametrize("site", ["given", "made", "given:input"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_an_edit_that_writes_in_place_is_refused_and_undone(site, write, mode):
    model, x = Branches(), torch.randn(2, 3)
    with mode():
        x = x.clone()
        before, hidden = x.clone(), model.linear(x)
        with hl.edit(model, site, write), pytest.raises(hl.StructureError, match="in place"):
            model(x)
        assert not x.requires_grad
        assert torch.equal(x, before)
        assert all(map(torch.equal, model.seen[0], (before, hidden)))


def test_a_later_call_and_a_part_of_a_value_are_held_to_it_too(holder):
    model, calls = nn.Identity(), [a_column, lambda t: t + 1]
    x = torch.ones(2, 2)

    def by_turns(value):
        return calls.pop()(value)

    def part_zeroed(value):
        value["pair"].left.zero_()

    with hl.edit(model, "", by_turns):
        model(x)
        with pytest.raises(hl.StructureError, match=r"\(root\) wrote in place.*\n.*t \* 0"):
            model(x)
    assert x.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    with hl.edit(holder, "inner", part_zeroed):
        with pytest.raises(hl.StructureError, match="inner wrote in place"):
            holder(torch.ones(2))


@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(3, 2)])
def test_the_gradient_of_what_an_edit_wrote_to_is_refused(view):
    model, weight = nn.Identity(), torch.ones(2, 3, requires_grad=True)
    whole = weight * 2
    x = view(whole)
    with hl.edit(model, "", zeroed), pytest.raises(hl.StructureError, match="in place"):
        model(x)
    assert x.tolist() == view(torch.full((2, 3), 2.0)).tolist()
    for one in (x, whole):
        with pytest.raises(hl.StructureError, match="in place"):
            one.sum().backward()
    assert weight.grad is None


def test_weights_that_an_edit_wrote_to_are_put_back():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.weight = nn.Identity(), nn.Parameter(torch.ones(2, 2))

        def forward(self):
            return self.inner(self.weight) * 2

    model = Given()
    with torch.no_grad(), hl.edit(model, "inner", zeroed):
        with pytest.raises(hl.StructureError, match="in place"):
            model()
    assert model.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert model.weight.requires_grad


def test_ready_made_edits_write_to_nothing(image):
    for change in (
        hl.edits.scale(2.0), hl.edits.add(1.0), hl.edits.replace(0.0), hl.edits.noise(1.0),
        hl.edits.clamp(min=0),
    ):  # fmt: skip
        before, version = image.clone(), image._version
        assert change(image) is not image
        assert image._version == version
        assert torch.equal(image, before)


def test_inputs_can_be_edited_alone_and_among_others(net, image, holder):
    with hl.edit(net, "fc:input", hl.edits.scale(0)):
        assert torch.equal(net(image)[0], net.fc.bias)
    x = torch.ones(2)
    with hl.edit(holder, "inner:input.x", hl.edits.add(1.0)):
        assert holder(x)["pair"].left.tolist() == [3.0, 3.0]
    with hl.edit(holder, "inner:input", lambda given: {**given, "x": given["x"] * 0}):
        assert holder(x)["pair"].left.tolist() == [1.0, 1.0]
    with (
        hl.edit(holder, "inner:input.rest[0]", hl.edits.scale(0)),
        hl.record(holder, "inner:input") as run,
    ):
        holder(x)
    assert run["inner:input"]["rest"][0].tolist() == [0.0, 0.0]


def test_one_leaf_is_changed_and_the_rest_is_the_same(holder):
    x = torch.ones(2)
    with hl.edit(holder, "inner:output.pair.left", hl.edits.scale(0)):
        out = holder(x)
    assert out["pair"].left.tolist() == [0.0, 0.0]
    assert type(out["pair"]).__name__ == "Pair"
    assert out["out"].hidden.tolist() == [0.0, 0.0]
    assert out["text"] == "kept"


def test_one_call_is_edited_and_the_others_are_not(looped):
    x = torch.ones(1, 2)
    with hl.edit(looped, "block#1", hl.edits.scale(0)), hl.record(looped, "block") as run:
        for _ in range(2):
            looped(x)
    for one in run.passes:
        first, second, third = one.calls("block")
        assert torch.equal(first, looped.block(x))
        assert not second.any()
        assert torch.equal(third, looped.block(second))


def test_gradients_flow_through_an_edit(net, image):
    direction = torch.zeros(5, requires_grad=True)
    with hl.edit(net, "fc", hl.edits.add(direction)):
        net(image).sum().backward()
    assert direction.grad.tolist() == [2.0] * 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.mean(), "expected Tensor[2, 5] float32 on cpu, got Tensor[] float32"),
        (lambda t: t.double(), "float64"),
        (lambda t: (t, t), "got tuple(Tensor[2, 5], Tensor[2, 5])"),
        (lambda t: True, "got True"),
    ],
)
def test_an_edit_that_changes_the_structure_is_an_error(net, image, change, said):
    with hl.edit(net, "fc", change), pytest.raises(hl.StructureError) as caught:
        net(image)
    assert said in str(caught.value)
    assert "the edit at fc would change the value's structure" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.trap(25)
def test_part_of_a_tuple_returned_for_the_whole_is_an_error():
    class Unpacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.split = Two()

        def forward(self, x):
            product, total = self.split(x, x * 2)
            return product + total

    model, x = Unpacks(), torch.ones(2, 3)
    handle = model.split.register_forward_hook(lambda module, args, output: output[0])
    assert model(x).shape == (3,)  # a row plus a row
    handle.remove()
    with pytest.raises(hl.StructureError, match="split"):
        with hl.edit(model, "split", lambda output: output[0]):
            model(x)
    with hl.edit(model, "split:output[0]", lambda product: product * 10):
        assert torch.equal(model(x), 10 * x * x * 2 + x.tanh() + x * 2)


def test_what_is_no_function_is_refused(net):
    with pytest.raises(hl.AttachError, match=r"must be a function.*\n.*hl.edits.replace"):
        hl.edit(net, "fc", torch.zeros(1))


def test_scale_add_clamp(net, image):
    plain = net(image)
    for change, expected in (
        (hl.edits.scale(2.0), plain * 2),
        (hl.edits.scale(torch.tensor(0.5, dtype=torch.float64)), plain * 0.5),
        (hl.edits.add(torch.arange(5)), plain + torch.arange(5)),
        (hl.edits.clamp(min=0), plain.clamp(min=0)),
        (hl.edits.clamp(-0.1, 0.1), plain.clamp(-0.1, 0.1)),
    ):
        with hl.edit(net, "fc", change):
            assert torch.equal(net(image), expected)


def test_replace_puts_another_runs_value_there(net, image):
    with hl.record(net, "layer1") as run:
        plain = net(image)
    with hl.edit(net, "layer1", hl.edits.replace(run["layer1"])):
        assert torch.equal(net(torch.zeros_like(image)), plain)


def test_replace_survives_an_in_place_layer_behind():
    model = nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))
    with hl.edit(model, "0", hl.edits.replace(-1.0)):
        assert model(torch.ones(3)).tolist() == [0.0, 0.0, 0.0]


def test_noise_is_repeatable_and_has_a_generator_of_its_own(net, image):
    state = torch.get_rng_state()
    results = []
    for seed in (5, 5, 6):
        with hl.edit(net, "fc", hl.edits.noise(0.1, seed=seed)):
            results.append([net(image), net(image)])
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][0], results[0][1])
    assert not torch.equal(results[0][0], results[2][0])
    spread = (torch.stack(results[0]) - net(image)).std()
    assert 0.03 < spread < 0.3


def test_ready_made_edits_ask_for_a_leaf_of_a_nested_value(holder):
    for change in (hl.edits.scale(1), hl.edits.add(1), hl.edits.replace(1), hl.edits.clamp(0),
                   hl.edits.noise(1)):  # fmt: skip
        with hl.edit(holder, "inner", change), pytest.raises(hl.StructureError) as caught:
            holder(torch.ones(2))
            assert "(output, input): PATH:PORT.pair.left, " in str(caught.value)


def test_ready_made_edits_do_not_round_silently():
    model = nn.Sequential(nn.Identity())
    for change in (hl.edits.scale(torch.tensor(0.5)), hl.edits.add(0.5), hl.edits.replace(0.7),
                   hl.edits.noise(1.0), hl.edits.clamp(0.5), hl.edits.clamp(max=0.5),
                   hl.edits.clamp(torch.tensor(0.5), 9)):  # fmt: skip
        with hl.edit(model, "0", change), pytest.raises(hl.StructureError, match="cannot hold"):
            model(torch.tensor([4, 6]))
    with hl.edit(model, "0", hl.edits.scale(2)):
        assert model(torch.tensor([4, 6])).tolist() == [8, 12]
    with hl.edit(model, "0", hl.edits.clamp(max=5)):
        assert model(torch.tensor([4, 6])).tolist() == [4, 5]
    with hl.edit(model, "0", hl.edits.add(1j)):
        with pytest.raises(hl.StructureError, match="cannot hold complex"):
            model(torch.tensor([4.0, 6.0]))
        assert model(torch.tensor([4.0 + 0j])).tolist() == [4 + 1j]


def test_ready_made_edits_of_an_8_bit_float_say_what_to_do():
    model = nn.Sequential(nn.Identity())
    with hl.edit(model, "0", hl.edits.clamp(0, 1)):
        with pytest.raises(hl.StructureError, match=r"which is float8(.|\n)*t\.float\(\)"):
            model(torch.ones(2).to(torch.float8_e4m3fn))


@pytest.mark.trap(37)
def test_a_raw_recorder_before_the_edit_sees_the_unedited_value():
    model, kept = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), []
    handles = [
        model[0].register_forward_hook(lambda module, args, output: kept.append(output)),
        model[0].register_forward_hook(lambda module, args, output: output * 0),
    ]
    out = model(torch.ones(4, 3))
    for handle in handles:
        handle.remove()
    assert torch.equal(out, model[1](torch.zeros(4, 3)))
    assert kept[0].any()  # is not what the next module got
    with hl.record(model, "0") as run, hl.edit(model, "0", hl.edits.scale(0.0)):
        assert torch.equal(model(torch.ones(4, 3)), out)
    assert not run["0"].any()


def test_only_a_hook_prepended_later_comes_before_an_edit():
    model, seen = nn.Sequential(nn.Identity()), []

    def note(name):
        return lambda module, args, output: seen.append((name, output.item()))

    with hl.attach(model) as line:
        line.forward("0", note("line"))
        model[0].register_forward_hook(note("before"))
        with hl.edit(model, "0", hl.edits.add(1)), hl.attach(model) as inner:
            model[0].register_forward_hook(note("after"))
            inner.forward("0", note("prepended line"), prepend=True)
            model[0].register_forward_hook(note("prepended"), prepend=True)
            model(torch.zeros(1))
    assert seen[0] == ("prepended", 0)
    assert sorted(seen[1:]) == [("after", 1), ("before", 1), ("line", 1), ("prepended line", 1)]


@pytest.mark.parametrize("name", ["scale", "add"])
@pytest.mark.parametrize("shape", [(2,), (2, 1, 5), (3, 5)])
def test_a_tensor_that_does_not_broadcast_is_refused_by_name(net, image, name, shape):
    change = getattr(hl.edits, name)(torch.ones(shape))
    with hl.edit(net, "fc", change), pytest.raises(hl.StructureError) as caught:
        net(image)
    assert str(caught.value).startswith(
        f"the tensor given to hl.edits.{name} must broadcast to the value's shape [2, 5],"
        f" got {list(shape)}."
    )
    assert caught.value.__notes__ == ["hookline: raised by the hook at fc (Linear)"]
    with hl.edit(net, "fc", getattr(hl.edits, name)(torch.ones(2, 1))):
        net(image)


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((2, 1), "To put it at each place, give hl.edit: lambda t: new.expand_as(t).clone()."),
        ((5,), "To put it at each place, give hl.edit: lambda t: new.expand_as(t).clone()."),
        ((1,), "To put it at each place, give hl.edit: lambda t: new.expand_as(t).clone()."),
        ((5, 2), "Give a number, or a tensor of the value's shape."),
    ],
)
@pytest.mark.parametrize("site", ["fc", "fc:grad_output"])
def test_replace_takes_no_tensor_of_another_shape(net, image, site, shape, advice):
    with hl.edit(net, site, hl.edits.replace(torch.ones(shape))):
        with pytest.raises(hl.StructureError) as caught:
            net(image).sum().backward()
    assert str(caught.value).splitlines() == [
        "the tensor given to hl.edits.replace must have the value's shape [2, 5], got"
        f" {list(shape)}.",
        advice,
    ]
    for new in (2.0, torch.tensor(2.0), torch.full((2, 5), 2.0)):
        with hl.record(net, site) as run, hl.edit(net, site, hl.edits.replace(new)):
            loss = net(image).sum()
            if loss.requires_grad:  # else the output is the constant
                loss.backward()
        assert (run[site] == 2).all()


BROADCAST = {
    "replace": hl.edits.replace(torch.ones(2, 1)),
    "add": hl.edits.add(torch.ones(3, 1, 4)),
    "scale": hl.edits.scale(torch.ones(3, 2, 4)),
    "clamp": hl.edits.clamp(max=torch.ones(3, 1, 4)),
    "a function": lambda value: value.expand(3, 2, 4),
}


@pytest.mark.compiles
@pytest.mark.parametrize("site", ["0", "0:input", "0:grad_output"])
@pytest.mark.parametrize("change", BROADCAST.values(), ids=BROADCAST)
def test_compiled_code_takes_no_other_shape_either(fresh_dynamo, site, change):
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), backend="eager")
    with hl.edit(model, site, change), pytest.raises(hl.StructureError, match=r"\[2, 4\]"):
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()


Pair = namedtuple("Pair", ["left", "right"])


class Returns(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make):
        super().__init__()
        self.inner, self.make = nn.Identity(), make

    def forward(self, x):
        return self.make(self.inner(x))


UNUSUAL = {
    "set": lambda t: {t}, "frozenset": lambda t: frozenset({t}),
    "list of a user": lambda t: UserList([t]), "view of a dict": lambda t: {"a": t}.values(),
    "iterator": lambda t: iter([t]), "partial": lambda t: partial(torch.add, t),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_writes_to_tensors_in_unusual_containers_are_refused(name):
    model, x = Returns(UNUSUAL[name]), torch.ones(2)

    def write(value):
        x.zero_()

    with hl.edit(model, "", write), pytest.raises(hl.StructureError, match="in place"):
        model(x)
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["set", "frozenset", "list of a user"])
def test_editing_an_unusual_container_keeps_form_or_is_refused(name):
    model, x = Returns(UNUSUAL[name]), torch.ones(2)
    with hl.edit(model, "", lambda value: type(value)([t * 2 for t in value])):
        found = model(x)
    assert [t.tolist() for t in found] == [[2.0, 2.0]]
    assert type(found) is type(UNUSUAL[name](x))
    with hl.edit(model, "", lambda value: [t * 2 for t in value]):
        with pytest.raises(hl.StructureError, match=r"expected .* got list"):
            model(x)


@dataclass
class Held:
    """Not known to torch's pytrees."""

    a: object


REPLACED = {
    "named tuple": (lambda t: Pair(t, 1), lambda v: v._replace(left=v.left * 2)),
    "dataclass": (Held, lambda v: Held(v.a * 2)),
    "UserDict": (lambda t: UserDict(a=t), lambda v: UserDict(a=v["a"] * 2)),
    "values of a dict": (lambda t: {"a": t}.values(), lambda v: {"a": one(v) * 2}.values()),
    "iterator": (lambda t: iter([t]), lambda v: iter([t * 2 for t in v])),
    "generator": (lambda t: (t for t in [t]), lambda v: (t * 2 for t in v)),
    "zip": (lambda t: zip([t]), lambda v: zip([t[0] * 2 for t in v])),
    "partial": (lambda t: partial(torch.add, t), lambda v: partial(torch.add, v.args[0] * 2)),
}  # fmt: skip


def one(values):
    return next(iter(values))


def tensor_in(value):
    """The first tensor that a reader of the value gets."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, partial):
        return value.args[0]
    found = next(iter(value.values())) if isinstance(value, UserDict) else None
    return tensor_in(value.a if isinstance(value, Held) else one(value) if found is None else found)


class Reading(nn.Module):
    """Returns what a module after it makes of an unusual container."""

    def __init__(self, make):
        super().__init__()
        self.make = Returns(make)

    def forward(self, x):
        return tensor_in(self.make(x)) * 5


@pytest.mark.parametrize("name", REPLACED)
def test_what_replaces_an_unusual_container_is_what_flows_on(name):
    make, change = REPLACED[name]
    x, by_hand = torch.tensor([1.0, 2.0], requires_grad=True), Reading(make)
    by_hand.make.register_forward_hook(lambda module, args, output: change(output))
    expected = by_hand(x)
    model = Reading(make)
    with hl.edit(model, "make", change):
        found = model(x)
    assert torch.equal(found, expected)
    assert torch.equal(found, x * 10)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (found, expected)))


CHANGED = {
    "dict": (lambda t: {"a": t}, lambda v: v.update(a=v["a"] * 2)),
    "list": (lambda t: [t], lambda v: v.__setitem__(0, v[0] * 2)),
    "dataclass": (Held, lambda v: setattr(v, "a", v.a * 2)),
    "UserDict": (lambda t: UserDict(a=t), lambda v: v.update(a=v["a"] * 2)),
    "iterator": (lambda t: iter([t]), lambda v: all(True for _ in v) and None),
    "generator": (lambda t: (t for t in [t]), lambda v: all(True for _ in v) and None),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_a_container_that_an_edit_changes_or_uses_up_is_refused(name):
    make, change = CHANGED[name]
    model = Returns(make)
    with hl.edit(model, "", change), pytest.raises(hl.StructureError) as caught:
        model(torch.ones(2))
    assert str(caught.value).startswith(
        "the edit at (root) must return the new value, got None after it changed a container"
    )


def test_a_ready_made_edit_of_what_has_no_tensor_says_what_to_do():
    model = Returns(lambda t: iter([t]))
    with hl.edit(model, "", hl.edits.scale(2)), pytest.raises(hl.StructureError) as caught:
        model(torch.ones(2))
    assert str(caught.value).endswith(
        "Select a module that returns a tensor, or give hl.edit a function of your own."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (hl.edits.scale, "got hl.edits.scale, which makes one.\nCall it: hl.edits.scale(...)"),
        (lambda module, args, output: output, "the value alone, got a function that takes (module"),
        (lambda: None, "the value alone, got a function that takes ()"),
    ],
)
def test_what_cannot_be_called_with_the_value_alone_is_refused(looped, change, said):
    with pytest.raises(hl.AttachError, match=re.escape(said)):
        hl.edit(looped, "head", change)
    assert len(hl.inventory(looped)) == 0


@pytest.mark.parametrize("change", [torch.relu, nn.ReLU(), lambda t, k=2: t * k])
def test_any_function_of_one_value_is_an_edit(looped, change):
    with hl.edit(looped, "head", change), hl.record(looped, "head") as run:
        looped(torch.ones(1, 2))
    assert "head" in run


@pytest.mark.parametrize("make", [hl.edits.scale, hl.edits.add, hl.edits.replace, hl.edits.noise])
@pytest.mark.parametrize("given", ["a", None, object(), [1.0, 2.0]])
def test_an_edit_is_given_a_number_or_a_tensor(make, given):
    with pytest.raises(hl.AttachError, match=rf"hl.edits.{make.__name__} must be given a number"):
        make(given)


@pytest.mark.parametrize("bounds", [{"min": "a"}, {"min": 0, "max": [1.0]}])
def test_clamp_is_given_numbers_or_tensors(bounds):
    with pytest.raises(hl.AttachError, match=r"hl.edits.clamp must be given a number or a tensor"):
        hl.edits.clamp(**bounds)


@pytest.mark.parametrize("std", [torch.ones(2), 1j, torch.tensor(1j)])
def test_noise_is_given_one_real_number(std):
    with pytest.raises(hl.AttachError, match=r"a real number or a tensor of one element, got"):
        hl.edits.noise(std)


def test_noise_under_a_vmap_that_forbids_draws_says_what_to_do(net, image):
    run = torch.func.vmap(lambda row: net(row[None]))
    with (
        hl.edit(net, "stem", hl.edits.noise(0.1)),
        pytest.raises(hl.AttachError, match=r'Write vmap\(\.\.\., randomness="different"\)'),
    ):
        run(image)


def test_noise_of_a_negative_deviation_is_refused():
    with pytest.raises(hl.AttachError, match=r"must not be negative, got -1\.0\."):
        hl.edits.noise(-1)


@pytest.mark.parametrize("seed", ["0", 0.5])
def test_noise_is_given_an_integer_as_its_seed(seed):
    with pytest.raises(hl.AttachError) as caught:
        hl.edits.noise(1, seed=seed)
    assert str(caught.value) == (
        f"seed must be an integer or None, got {seed!r}.\nWrite hl.edits.noise(0.1, seed=0)."
    )


def test_clamp_takes_a_tensor_beside_a_number():
    change = hl.edits.clamp(torch.tensor([0.0, 2.0]), 3)
    assert change(torch.tensor([-1.0, 1.0])).tolist() == [0.0, 2.0]
    assert change(torch.tensor([5.0, 5.0])).tolist() == [3.0, 3.0]
    with pytest.raises(hl.StructureError, match=r"hl.edits.clamp must broadcast"):
        change(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_numbers_clamp_a_quantized_value():
    value = torch.quantize_per_tensor(torch.tensor([-1.0, 1.0]), 0.5, 0, torch.qint8)
    assert hl.edits.clamp(0.5)(value).dequantize().tolist() == [0.5, 1.0]


def test_clamp_is_given_a_bound():
    with pytest.raises(hl.AttachError, match=r"must be given a bound, got none.\n.*clamp\(min=0\)"):
        hl.edits.clamp()


class InRegion(nn.Module):
    """A layer in a checkpointed region."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x):
        return checkpoint(lambda t: self.fc(t).tanh(), x, use_reentrant=False)


def test_noise_drawn_in_two_threads_is_recomputed_alike(monkeypatch):
    lock, repeatable_generator = ToldLock(), edits.repeatable_generator
    monkeypatch.setattr(edits, "fork_safe_lock", lambda: lock, raising=False)
    noise = hl.edits.noise(1.0, seed=0)
    meanwhile = Meanwhile(lambda: noise(torch.zeros(2)), lock)

    def slowly(generator):
        found = repeatable_generator(generator)
        meanwhile()
        return found

    monkeypatch.setattr(edits, "repeatable_generator", slowly)
    model = InRegion()
    with hl.edit(model, "fc", noise):
        model(torch.ones(1, 2)).sum().backward()
    meanwhile.end()
    assert model.fc.weight.grad.abs().sum() > 0
