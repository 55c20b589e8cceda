"""Lines: raw hooks, order, lifetime, and what is left behind (nothing)."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.verbs.attach.raw_line import attach
from thoroughness import tries


def test_raw_hooks_get_torchs_arguments(net, image):
    seen = []
    with hl.attach(net) as line:
        line.forward_pre("fc", lambda *a: seen.append(("pre", len(a), type(a[0]), type(a[1]))))
        line.forward_pre("fc", lambda *a: seen.append(("pre kw", len(a), a[2])), with_kwargs=True)
        line.forward("fc", lambda *a: seen.append(("fwd", len(a), tuple(a[2].shape))))
        line.forward("fc", lambda *a: seen.append(("fwd kw", len(a), a[2])), with_kwargs=True)
        net(image)
    assert seen == [
        ("pre", 2, nn.Linear, tuple),
        ("pre kw", 3, {}),
        ("fwd", 3, (2, 5)),
        ("fwd kw", 4, {}),
    ]


def test_a_linear_layer_is_seen_with_weight_bias_input_output():
    layer = nn.Linear(3, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    seen = {}

    def look(module, args, output):
        seen.update(weight=module.weight, bias=module.bias, input=args[0], output=output)

    with hl.attach(layer) as line:
        line.forward("", look)
        layer(torch.tensor([0.0, 1.0, 2.0]))
    assert seen["weight"].tolist() == [[1.0, 1.0, 1.0]]
    assert seen["bias"].tolist() == [0.0]
    assert seen["input"].tolist() == [0.0, 1.0, 2.0]
    assert seen["output"].item() == 3.0


def test_returned_values_replace():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(1, 2)
    with hl.attach(model) as line:
        line.forward_pre("0", lambda module, args: args[0] * 0)  # a single value is wrapped
        line.forward("1", lambda module, args, output: output + 100)
        y = model(x)
    assert torch.equal(y, model[1](model[0](x * 0)) + 100)


def test_kwargs_can_be_replaced(holder):
    with hl.attach(holder) as line:
        line.forward_pre(
            "inner", lambda module, args, kwargs: ((args[0] + 1,), {**kwargs, "scale": 3.0}),
            with_kwargs=True,
        )  # fmt: skip
        seen = []
        line.forward("inner", lambda module, args, kwargs, out: seen.append((args, kwargs)),
                     with_kwargs=True)  # fmt: skip
        holder(torch.zeros(2))
    ((args, kwargs),) = seen
    assert args[0].tolist() == [1.0, 1.0]
    assert kwargs["scale"] == 3.0
    assert "mask" in kwargs


def test_order_is_edits_hooks_recorders_however_attached():
    model = nn.Sequential(nn.Identity())
    order = []

    def note(name):
        return lambda module, args, output: order.append((name, output.item()))

    with hl.record(model, "0") as run:
        handle = model[0].register_forward_hook(note("foreign"))
        with hl.attach(model) as line:
            line.forward("0", note("hook"))
            line.forward("0", note("first hook"), prepend=True)
            with hl.edit(model, "0", hl.edits.add(1.0)), hl.edit(model, "0", hl.edits.scale(10.0)):
                model(torch.tensor(1.0))
        handle.remove()
    assert order == [("first hook", 20.0), ("foreign", 20.0), ("hook", 20.0)]
    assert run["0"].item() == 20.0


def test_foreign_hooks_keep_their_order_and_stay():
    model = nn.Sequential(nn.Identity())
    handles = [model[0].register_forward_hook(lambda *a, k=k: None) for k in range(3)]
    before = list(model[0]._forward_hooks.items())
    with hl.record(model, "0"), hl.edit(model, "0", hl.edits.scale(1)):
        model(torch.zeros(1))
    assert list(model[0]._forward_hooks.items()) == before
    for handle in handles:
        handle.remove()


def test_always_call_runs_when_the_module_raises(net):
    seen = []
    with pytest.raises(RuntimeError), hl.attach(net) as line:
        line.forward("fc", lambda *a: seen.append("ordinary"))
        line.forward("fc", lambda module, args, output: seen.append(output), always_call=True)
        net.fc(torch.zeros(1, 3))
    assert seen == [None]


@pytest.mark.parametrize("returned", [True, "", (), 3])
def test_a_forward_hook_that_returns_nonsense_is_an_error(net, image, returned):
    with hl.attach(net) as line:
        line.forward("fc", lambda module, args, output: returned)
        with pytest.raises(hl.StructureError, match="must return an output with tensors") as caught:
            net(image)
    assert "hookline: raised by the hook at fc:forward (Linear)" in caught.value.__notes__


@pytest.mark.parametrize(
    ("returned", "with_kwargs", "said"),
    [
        ([torch.zeros(2, 4)], False, "would become one argument"),
        (True, False, "in place of"),
        ((torch.zeros(2, 4),), True, r"Return \(args, kwargs\)"),
    ],
)
def test_a_pre_hook_that_returns_nonsense_is_an_error(net, image, returned, with_kwargs, said):
    with hl.attach(net) as line:
        line.forward_pre("fc", lambda *a: returned, with_kwargs=with_kwargs)
        with pytest.raises(hl.StructureError, match=said):
            net(image)


@pytest.mark.slow
def test_nothing_is_left_after_a_thousand_lines(net, image, left_as_found):
    net(image)
    before = left_as_found(net)
    with hl.record(net):
        net(image)
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    for _ in range(tries(1000, gate=300)):
        with hl.record(net, "layer1.**", ports=("input", "output")):
            net(image)
        line = hl.attach(net)
        line.forward(nn.Conv2d, print)
        line.forward_pre("fc", print, with_kwargs=True)
        line.options.quiet = True
        line.remove()
    gc.collect()
    assert left_as_found(net) == before
    assert sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()) <= tensors


def test_nothing_is_left_when_the_body_raises_at_any_module(net, image, left_as_found):
    before = left_as_found(net)
    everything = [str(site) for site in hl.select(net)]
    for path in everything:

        def fail(module, args, output):
            raise ValueError("here")

        with pytest.raises(ValueError, match="here"), hl.record(net), hl.attach(net) as line:
            line.forward(path if path != "(root)" else "", fail)
            net(image)
        assert left_as_found(net) == before


@pytest.mark.trap(45)
def test_nothing_is_left_when_attaching_fails_half_way(net, left_as_found):
    before = left_as_found(net)
    net.add_module("scripted", torch.jit.script(nn.Sequential(nn.ReLU())))
    with pytest.raises(hl.AttachError, match=r"ScriptModule.*\n.*before torch.jit.script"):
        hl.record(net, ["fc", "scripted"])
    del net._modules["scripted"]
    assert left_as_found(net) == before
    with pytest.raises(hl.SelectionError):
        hl.record(net, ["fc", "nowhere"])
    assert left_as_found(net) == before


@pytest.mark.slow
def test_nothing_is_left_when_attaching_is_interrupted_anywhere(net, left_as_found, interrupted):
    before = left_as_found(net)
    modules = ("hookline.verbs.attach.raw_line", "hookline.engine.line.registration")
    for step in range(1, 2000):
        line = attach(net)
        line.options.quiet = True
        if not interrupted(step, modules, lambda line=line: line.forward(nn.Conv2d, print)):
            line.remove()
            break
        # What an interrupt leaves, the end of the line takes off.
        with line:
            pass
        assert left_as_found(net) == before
    assert 20 < step < 2000


def test_a_line_that_has_ended_takes_no_more_hooks(net):
    line = hl.attach(net)
    line.options.quiet = True
    line.remove()
    line.remove()
    with pytest.raises(hl.AttachError, match="has ended"):
        line.forward("fc", print)


def test_a_line_cannot_be_entered_twice(net, image):
    line = hl.edit(net, "fc", hl.edits.scale(0))
    with line:
        net(image)
        with pytest.raises(hl.AttachError, match="is on already"), line:
            pass
    with pytest.raises(hl.AttachError, match="has ended"), line:
        pass


def test_a_scripted_child_is_left_out_of_wide_choices_and_said(net, image):
    net.scripted = torch.jit.script(nn.ReLU())
    with hl.record(net) as run:
        net(image)
    assert "fc" in run
    with pytest.raises(hl.NotRecordedError, match="a ScriptModule"):
        run["scripted"]
    assert hl.summary(net, image).failure is None


def test_a_copy_of_a_hooked_model_runs_free_and_sheds_the_hooks(net, image):
    with hl.record(net) as run, hl.edit(net, "fc", hl.edits.scale(0)):
        copied = copy.deepcopy(net)
        pickled = pickle.loads(pickle.dumps(net))
        for other in (copied, pickled):
            assert other(image).abs().sum() > 0  # not edited
            assert not hl.inventory(other)  # after its first run
        assert len(run.passes) == 0
        assert net(image).abs().sum() == 0


def test_a_hooked_model_can_be_saved_and_loaded_whole(net, image):
    buffer = io.BytesIO()
    with hl.record(net) as run:
        torch.save(net, buffer)
        net(image)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(image), net(image))
    assert len(run.passes) == 1


def test_a_line_keeps_no_model_alive_after_its_end(image):
    model = nn.Sequential(nn.Conv2d(3, 2, 1))
    with hl.record(model) as run, hl.attach(model) as line:
        line.forward("0", lambda *a: None)
        model(image)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None
    assert run["0"].shape == (2, 2, 8, 8)
    assert "fired" in " ".join(str(line.report()).split())


def test_only_models_can_be_hooked():
    loaded = SimpleNamespace(model=torch.nn.Linear(2, 2))
    for call in (hl.record, hl.inventory):
        with pytest.raises(hl.AttachError, match=r"Give the model in its attribute \.model, "):
            call(loaded)
    with pytest.raises(
        hl.AttachError, match=r"must be given a model .* or tensors by name, got int"
    ):
        hl.attach(3)
    with pytest.raises(hl.AttachError, match=r"got dict\(a=3\)\.\nGive .*tensors: {'a': a}"):
        hl.attach({"a": 3})
    with pytest.raises(hl.AttachError, match="must be a function, got int"):
        hl.attach(nn.Linear(1, 1)).forward("", 3)


def test_hooks_on_tensors_are_selected_by_their_names():
    a, b = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    seen = []
    with hl.attach({"a": a, "b": b}) as line:
        line.grad("a", lambda grad: grad * 10)
        line.accumulated("b", lambda tensor: seen.append(tensor.grad.tolist()))
        (a.sum() + b.sum()).backward()
    assert a.grad.tolist() == [10.0, 10.0]
    assert seen == [[1.0, 1.0, 1.0]]
    assert re.findall(r"^  (\S+) +\S+ +1$", str(line.report()), re.M) == ["a:grad", "b:grad"]


NAMED = {"a": torch.ones(2, requires_grad=True)}
NEED_A_MODEL = {
    "clip": lambda model: hl.clip(model, value=1.0),
    "features": lambda model: hl.features(model, torch.ones(2), "a"),
    "watch": hl.watch,
}


@pytest.mark.parametrize("verb", NEED_A_MODEL)
def test_verbs_that_need_a_model_refuse_tensors_by_name(verb):
    says = rf"hl\.{verb} must be given a model \(an nn.Module\), got tensors by name\.\n.*record"
    with pytest.raises(hl.AttachError, match=says):
        NEED_A_MODEL[verb](NAMED)
    with pytest.raises(hl.AttachError, match=r"got int\.\nGive the model itself\.$"):
        NEED_A_MODEL[verb](3)


@pytest.mark.parametrize("verb", ["attach", "edit", "record"])
def test_verbs_that_take_tensors_by_name_say_so(verb):
    function = getattr(hl, verb)
    annotation = inspect.signature(function).parameters["model"].annotation
    assert "Mapping[str, Tensor]" in annotation
    assert "Or tensors by name" in function.__doc__


def test_raw_hooks_do_not_take_parts_of_values(net):
    for selector in ("fc:input", "fc:output[0]"):
        with pytest.raises(hl.SelectionError, match="must be given modules"):
            hl.attach(net).forward(selector, print)


def test_a_raw_hook_can_wait_for_one_call(looped):
    seen = []
    with hl.attach(looped) as line:
        line.forward("block#1", lambda module, args, output: seen.append(output))
        looped(torch.ones(1, 2))
    expected = looped.block(looped.block(torch.ones(1, 2)))
    assert len(seen) == 1
    assert torch.equal(seen[0], expected)
