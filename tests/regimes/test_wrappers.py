"""Models in wrappers, models that others have changed, and modules that do things their own way."""

from __future__ import annotations

import copy
import pickle
import re
import types

import pytest
import torch
import torch.fx
from torch import nn
from torch.testing import assert_close

import hookline as hl
from by_torch import (
    Part,
    assert_gradients_are_torchs,
    assert_values_are_torchs,
    clipped_by_torch,
    hooked_by_torch,
    results_of,
    seen_by_torch,
    triple,
    tripled,
)
from zoo import ROWS, Delegating, Recursive, rows_net


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x) + 1


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.ReLU(), Block())


@pytest.fixture
def x():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.cell("AveragedModel (EMA, SWA)", "record", "gradients", "edit")
def test_an_averaged_model_is_a_copy_with_the_original_paths(model, x):
    averaged = torch.optim.swa_utils.AveragedModel(model)
    with (
        hl.edit(averaged, "1", hl.edits.scale(2.0)),
        hl.record(averaged, ["0", "1"], ports=("output", "grad_output")) as run,
    ):
        model(x)  # the original is another model
        averaged(x).sum().backward()
    assert torch.equal(run["1"], run["0"].relu() * 2)
    assert len(run) == 4
    line = hl.record(model, "0")
    made_inside = torch.optim.swa_utils.AveragedModel(model)
    made_inside(x)
    assert not len(hl.inventory(made_inside))
    with pytest.warns(hl.HooklineWarning, match="did not run"):
        line.remove()


@pytest.mark.cell("torch.fx.GraphModule", "record", "gradients", "edit", "raw hooks", "features")
def test_a_traced_model_has_the_paths_of_the_modules_it_calls(model, x):
    traced = torch.fx.symbolic_trace(model)
    with (
        hl.record(traced, ports=("output", "grad_output")) as run,
        hl.attach(traced) as line,
    ):
        line.backward("0.linear", lambda module, grad_input, grad_output: None)
        y = traced(x)
        y.sum().backward()
    assert torch.equal(y, model(x))
    assert torch.equal(run["0.linear"], model[0].linear(x))
    assert "0" not in run  # its code was written into the graph
    with hl.edit(traced, "1", hl.edits.scale(0.0)):
        assert torch.equal(traced(x), model[2](torch.zeros(4, 3)))
    assert torch.equal(hl.features(traced, x, "1")["1"], run["1"])


@pytest.mark.trap(29)
@pytest.mark.cell(
    "`torch.fx.symbolic_trace`",
    "record",
    "gradients",
    "edit",
    "raw hooks",
    refused="AttachError",
    note="Tracing raises `AttachError` where it would also trace hooks of hookline.",
)
def test_tracing_is_refused_as_hooks_would_become_code(model, x):
    handle = model[0].register_forward_hook(lambda module, args, output: output * 0)
    baked = torch.fx.symbolic_trace(model)
    handle.remove()
    assert "mul" in baked.code  # of the raw hook, for ever
    for ports in ("output", "input", "grad_output", "grad_input"):
        with (
            pytest.raises(hl.AttachError, match=r"torch\.fx\.symbolic_trace traces"),
            hl.record(model, "0", ports=ports),
        ):
            torch.fx.symbolic_trace(model)
    with pytest.raises(hl.AttachError, match="Trace it outside"):
        with hl.edit(model, "0", hl.edits.scale(0.0)):
            torch.fx.symbolic_trace(model)
    with pytest.raises(hl.AttachError, match=r"torch\.fx\.symbolic_trace traces"):
        with hl.attach(hl.EVERYWHERE) as line:
            line.forward(Block, lambda module, args, output: None)
            torch.fx.symbolic_trace(model)
    with (
        pytest.raises(hl.AttachError, match=r"torch\.fx\.symbolic_trace traces"),
        hl.record(model[0], "linear"),
    ):
        torch.fx.symbolic_trace(model)  # the line's root is inside of what is traced
    assert "mul" not in torch.fx.symbolic_trace(model).code
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.cell(
    "a feature extractor made by `torch.fx`", "record",
    note="The extractor calls only the leaf modules of the original model. Hooks on its other"
    " modules are not called, and a warning says so.",
)  # fmt: skip
def test_a_traced_copy_calls_innermost_modules_and_reports_which(model, x):
    traced = torch.fx.symbolic_trace(model)
    with (
        pytest.warns(hl.HooklineWarning, match="by a copy that torch.fx traced"),
        hl.record(model, ["0", "0.linear"]) as run,
    ):
        traced(x)
    assert torch.equal(run["0.linear"], model[0].linear(x))
    with pytest.raises(hl.NotRecordedError, match="the model itself was not called"):
        run["0"]


class Adding(nn.Module):
    """Its __call__ does something of its own around nn.Module's."""

    def __init__(self, *, calls_super):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls_super = calls_super

    def __call__(self, *args):
        return (super().__call__(*args) if self.calls_super else self.forward(*args)) + 1

    def forward(self, x):
        return self.linear(x)


@pytest.mark.cell(
    "modules with their own `__call__`",
    "record",
    note="`hl.record` records what `forward` returns. If `__call__` does not call"
    " `super().__call__`, hooks on the module are not called, and a warning says so.",
)
def test_a_call_of_its_own_is_seen_from_within_or_explained(x):
    wrapped = Adding(calls_super=True)
    with hl.record(wrapped) as run:
        y = wrapped(x)
    assert torch.equal(run[":output"] + 1, y)
    bare = nn.Sequential(Adding(calls_super=False))
    with (
        pytest.warns(hl.HooklineWarning, match=r"Adding has a __call__ of its own.*super\(\)"),
        hl.record(bare, ["0", "0.linear"]) as run,
    ):
        bare(x)
    assert list(run) == ["0.linear"]


@pytest.mark.cell("a forward replaced on the instance", "record", "gradients", "edit", "raw hooks")
@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_forward_that_was_replaced_is_seen_and_stays(model, x, when):
    linear, seen = model[0].linear, []
    old = linear.forward

    def replace():
        linear.forward = types.MethodType(lambda self, x: old(x) * 2, linear)

    if when == "before":
        replace()
    with (
        hl.record(model, "0.linear", ports=("output", "grad_output", "input")) as run,
        hl.edit(model, "0.linear:input", hl.edits.scale(2.0)),
        hl.attach(model) as line,
    ):
        line.forward("0.linear", lambda module, args, output: seen.append(output))
        if when == "inside":
            replace()
        model(x).sum().backward()
    assert torch.equal(run["0.linear"], old(2 * x) * 2)
    assert torch.equal(seen[0], run["0.linear"])
    assert torch.equal(run["0.linear:input"], 2 * x)
    assert "forward" in vars(linear)


class Guarding(Delegating):
    """Lets nobody set what looks like a hook, too."""

    def __setattr__(self, name, value):
        if "hook" in name:
            raise RuntimeError(f"{name} may not be set")
        super().__setattr__(name, value)


class Holding(nn.Module):
    """Parameters and modules in torch's containers."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.ones(3))})
        self.blocks = nn.ModuleList([nn.Linear(3, 3)])
        self.heads = nn.ModuleDict({"main": nn.Linear(3, 3)})

    def forward(self, x):
        return self.heads["main"](self.blocks[0](x)) * self.scales[0] + self.named["shift"]


@pytest.mark.cell(
    "modules with their own `__getattr__`, `__setattr__`", "record", "gradients", "edit"
)
def test_modules_with_attributes_of_their_own_are_hooked(model, x, left_as_found):
    delegating = Guarding(model)
    before = left_as_found(delegating)
    with (
        hl.record(delegating, ports=("output", "grad_output", "grad")) as run,
        hl.edit(delegating, "inner.0", lambda t: t),
    ):
        y = delegating(x)
        y.sum().backward()
    assert torch.equal(run[":output"], y)
    assert torch.equal(run["inner.0.linear.weight:grad"], model[0].linear.weight.grad)
    assert left_as_found(delegating) == before


def holding_step(model):
    out = model(ROWS[:, :3])
    out.square().sum().backward()
    return [out]


@pytest.mark.cell(
    "modules inside `ModuleList`, `ModuleDict`, `ParameterList`, `ParameterDict`",
    "record",
    "statistics",
    "edit",
    "raw hooks",
    "watch",
)
@pytest.mark.cell(
    "modules inside `ModuleList`, `ModuleDict`, `ParameterList`, `ParameterDict`",
    "features",
    "patch",
    "gradients",
    "edit gradients",
    "clip",
)
@pytest.mark.parametrize("path", ["blocks.0", "heads.main"])
def test_what_containers_hold_is_as_under_torchs_hooks(path):
    def holding():
        torch.manual_seed(0)
        return Holding()

    assert_values_are_torchs(holding, holding_step, path)
    assert_gradients_are_torchs(holding, holding_step, f"{path}:grad_output")


@pytest.mark.trap(33)
@pytest.mark.cell(
    "modules inside `ModuleList`, `ModuleDict`, `ParameterList`, `ParameterDict`",
    "record",
    "gradients",
    "clip",
)
def test_containers_are_no_sites_and_what_they_hold_are(x):
    model, bare = Holding(), Holding()
    bare.load_state_dict(model.state_dict())
    bare.blocks.register_forward_hook(lambda *_: pytest.fail("a list has no forward"))
    bare(x).sum().backward()
    nn.utils.clip_grad_norm_(bare.scales.parameters(), 1e-3)
    with hl.record(model, ports=("output", "grad")) as run, hl.clip(model, "scales", norm=1e-3):
        model(x).sum().backward()
    for parameter, expected in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    assert {"blocks.0", "heads.main", "scales.0:grad", "named.shift:grad"} <= set(run)
    for name, held in (("scales", ":grad"), ("named", ":grad"), ("blocks", ".*"), ("heads", ".*")):
        with pytest.raises(hl.SelectionError, match=rf": {re.escape(repr(name + held))}\.$"):
            hl.select(model, name)
        assert hl.select(model, name + held)


@pytest.mark.cell("packed sequences", "record", "gradients", "edit")
def test_packed_sequences_are_a_structure_with_leaves():
    lstm = nn.LSTM(4, 3)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with hl.record(lstm, ports=("output", "input", "grad_output")) as run:
        output, (h, _) = lstm(packed)
        output.data.sum().backward()
    assert torch.equal(run[":output[0].data"], output.data)
    assert torch.equal(run[":output[1][0]"], h)
    assert torch.equal(run[":grad_output"][0].data, torch.ones(5, 3))
    with hl.edit(lstm, ":output[0].data", hl.edits.scale(0.0)):
        edited, _ = lstm(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(edited)
    assert not padded.any()
    assert lengths.tolist() == [3, 2]


class Packing(nn.Module):
    """Two recurrent layers on sequences of their own lengths, which are packed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.LSTM(4, 3), nn.GRU(3, 2)

    def forward(self, rows):
        packed, _ = self.first(nn.utils.rnn.pack_sequence([rows[:3], rows[3:]]))
        return self.second(packed)[0].data


# What a recurrent layer returns for a packed sequence: that, and the last states.
DATA = Part(
    "[0].data",
    lambda output: output[0].data,
    lambda output, new: (output[0]._replace(data=new), *output[1:]),
)
STATE = Part(
    "[1][0]",
    lambda output: output[1][0],
    lambda output, new: (output[0], (new, *output[1][1:])),
)


def packed_step(model):
    out = model(ROWS)
    out.square().sum().backward()
    return out


@pytest.mark.cell("packed sequences", "record", "statistics", "edit", "features")
@pytest.mark.parametrize("path", ["first", "second"])
def test_packed_values_are_those_of_torchs_hooks(path):
    verbs = ["record", "statistics", "edit", "features"]
    assert_values_are_torchs(Packing, packed_step, path, verbs, part=DATA)


@pytest.mark.cell("packed sequences", "record", "statistics", "features")
def test_states_of_packed_sequences_are_those_of_torchs_hooks():
    verbs = ["record", "statistics", "features"]
    assert_values_are_torchs(Packing, packed_step, "first", verbs, part=STATE)


@pytest.mark.cell("packed sequences", "gradients", "edit gradients", "clip")
@pytest.mark.parametrize("path", ["first", "second"])
def test_gradients_of_packed_sequences_are_those_of_torchs_hooks(path):
    def step(model):
        packed_step(model)

    verbs = ["gradients", "edit gradients", "clip"]
    site = f"{path}:grad_output[0].data"
    assert_gradients_are_torchs(Packing, step, site, verbs, part=DATA)


@pytest.mark.cell(
    "modules that call themselves recursively", "record", "gradients", "edit", "raw hooks"
)
def test_a_module_that_calls_itself_is_one_pass_calls_apart(x):
    model, seen = Recursive(), []
    with (
        hl.record(model, ports=("output", "grad_output")) as run,
        hl.edit(model, "linear#1", hl.edits.scale(0.0)),
        hl.attach(model) as line,
    ):
        line.forward("", lambda module, args, output: seen.append(output))
        model(x).sum().backward()
    assert len(run.passes) == 1
    one = model.linear(x)
    assert [torch.allclose(got, one * n) for got, n in zip(seen, (1, 1, 2), strict=True)] == [
        True, True, True,
    ]  # fmt: skip
    assert len(run.calls(":output")) == len(run.calls("linear:grad_output")) == 3
    assert not run.calls("linear")[1].any()


def test_lines_come_and_go_while_a_model_runs_or_is_walked(model, x):
    lines = [hl.record(model, module) for module in model.modules()]
    for module in model.modules():
        with hl.record(model, module) as run:
            model(x)
        assert len(run) == 1
    inside = []

    def attach(module, args, output):
        with hl.record(model, "1") as run:
            model[1](output)
        inside.append(run["1"])

    with hl.attach(model) as line:
        line.forward("0", attach)
        y = model(x)
    for one in lines:
        one.remove()
    assert torch.equal(inside[0], model[0](x).relu())
    assert torch.equal(y, model(x))
    assert [len(one.recording.passes) for one in lines] == [7] * 6
    assert not len(hl.inventory(model))


@pytest.mark.trap(22)
@pytest.mark.cell("deep copies of a model with hooks", "record", "gradients", "edit", "raw hooks")
def test_a_copy_made_inside_the_block_sheds_its_inert_hooks(model, x):
    seen = []
    handle = model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    copy.deepcopy(model)(x)
    assert seen.pop() is not None  # of a model that did not run
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(model)
    handle.remove()
    with (
        hl.record(model, ports=("output", "grad_output", "grad")) as run,
        hl.edit(model, "0", hl.edits.scale(0.0)),
        hl.attach(model) as line,
    ):
        line.forward("1", lambda module, args, output: seen.append(output))
        other = copy.deepcopy(model)
        text = str(hl.inventory(other))
        assert "inert (of a copy)" in text
        assert all(e.function.startswith("inert") for e in hl.inventory(other))
        assert not any(e.function.startswith("inert") for e in hl.inventory(model))
        other(x).sum().backward()
        assert not len(hl.inventory(other))
        assert len(run.passes) == 0
        assert not seen
        loaded = pickle.loads(pickle.dumps(model))
        loaded(x)
        assert not len(hl.inventory(loaded))
        model(x).sum().backward()
    assert torch.equal(other(x), model(x))
    assert len(run.passes) == len(seen) == 1


def squared(model):
    out = model(ROWS)
    out.square().sum().backward()
    return out


@pytest.mark.cell(
    "deep copies of a model with hooks", "record", "statistics", "gradients", "edit",
    "edit gradients", "raw hooks", "clip",
)  # fmt: skip
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_own_numbers_and_the_original_the_lines(copied):
    model = rows_net()
    bare = results_of(model, squared)
    with seen_by_torch(model, "0") as came, hooked_by_torch(model, "0:grad_output") as grads:
        results_of(model, squared)
    changed = {}
    with seen_by_torch(model, "0", change=tripled):
        changed["edit"] = changed["raw"] = results_of(model, squared)
    with hooked_by_torch(model, "0:grad_output", triple):
        changed["edit gradients"] = results_of(model, squared)
    bound = grads[0].norm().item() / 4
    with hooked_by_torch(model, "0:grad_output", lambda g: clipped_by_torch([g], norm=bound)[0]):
        changed["clip"] = results_of(model, squared)

    def raw():
        line = hl.attach(model)
        line.forward("0", lambda module, args, output: tripled(output))
        return line

    lines = {
        "edit": lambda: hl.edit(model, "0", tripled), "raw": raw,
        "edit gradients": lambda: hl.edit(model, "0:grad_output", triple),
        "clip": lambda: hl.clip(model, "0:grad_output", norm=bound),
    }  # fmt: skip
    for verb, line in lines.items():
        with line():
            other = copied(model)
            assert_close(results_of(other, squared), bare)
            assert_close(results_of(model, squared), changed[verb])
        assert_close(results_of(other, squared), bare)
        assert not all(map(torch.equal, changed[verb], bare))
    with (
        hl.record(model, "0", ports=("output", "grad_output")) as run,
        hl.record(model, "0", keep=torch.mean) as numbers,
    ):
        other = copied(model)
        with torch.no_grad():
            other[0].bias += 1
        results_of(other, squared)
        assert_close(results_of(model, squared), bare)
    assert len(run.passes) == 1
    assert_close([run["0"], run["0:grad_output"], numbers["0"]], [*came, *grads, came[0].mean()])


@pytest.mark.parametrize(
    "backward",
    [
        lambda model, x: torch.autograd.grad(model(x).sum(), model[2].linear.weight),
        lambda model, x: model(x).sum().backward(inputs=[model[2].linear.weight]),
        lambda model, x: torch.func.functional_call(
            model, {k: v.detach().requires_grad_() for k, v in model.named_parameters()}, x
        ).sum().backward(),
    ],
    ids=["autograd.grad", "inputs=", "functional_call"],
)  # fmt: skip
def test_a_backward_that_passes_a_parameter_by_is_a_reason(model, x, backward):
    for verb in (
        lambda: hl.record(model, "0.linear.weight:grad"),
        lambda: hl.clip(model, "0.linear.weight", norm=1.0),
    ):
        with pytest.warns(hl.HooklineWarning) as caught, verb():
            backward(model, x)
        said = str(caught[0].message)
        assert "backward(inputs=...)" in said
        assert "autograd.grad" in said
        assert "functional_call" in said


@pytest.mark.slow
def test_torchvisions_extractor_calls_the_innermost_modules():
    from hookline.models import load_model

    resnet = load_model("torchvision:resnet18", weights="none").model
    from torchvision.models.feature_extraction import create_feature_extractor

    x = torch.zeros(1, 3, 32, 32)
    with pytest.raises(hl.AttachError, match="attach to the result of the tracing"):
        with hl.record(resnet, "layer1.0"):
            create_feature_extractor(resnet, ["layer1"])
    extractor = create_feature_extractor(resnet, ["layer1"])
    with torch.no_grad():
        with hl.record(resnet, "layer1.1.conv2") as run:
            extractor(x)
        expected = hl.features(resnet, x, "layer1.1.conv2")
    assert torch.equal(run["layer1.1.conv2"], expected["layer1.1.conv2"])
