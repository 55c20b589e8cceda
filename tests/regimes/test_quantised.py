"""Quantised models: torch's own eager quantisation, and torchao's tensors where it is installed."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import hookline as hl
from by_torch import How, assert_values_are_torchs, measured
from zoo import int8_net

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


@pytest.fixture
def x():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def dynamic():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.cell("dynamically quantised", "record", "edit", "raw hooks", "features", "watch")
def test_a_dynamically_quantised_model_is_a_model_as_any_other(dynamic, x, capsys):
    plain = dynamic(x)
    seen = []
    with (
        hl.record(dynamic, ["0", "2:input"]) as run,
        hl.attach(dynamic) as line,
        hl.watch(dynamic),
    ):
        line.forward("2", lambda module, args, output: seen.append(output))
        assert torch.equal(dynamic(x), plain)
    assert torch.equal(run["2:input"], run["0"].relu())
    assert torch.equal(seen[0], plain)
    assert torch.equal(hl.features(dynamic, x, "0")["0"], run["0"])
    with hl.edit(dynamic, "0", hl.edits.scale(0.0)):
        assert torch.equal(dynamic(x), dynamic[2](torch.zeros(4, 8)))
    assert "Linear" in capsys.readouterr().out


def test_a_type_of_the_same_name_is_shown_with_its_module(dynamic):
    with pytest.raises(hl.SelectionError, match=r"torch\.ao\.nn\.quantized\.dynamic\.modules"):
        hl.select(dynamic, nn.Linear)
    assert len(hl.select(dynamic, torch.ao.nn.quantized.dynamic.Linear)) == 2


@pytest.mark.cell(
    "dynamically quantised",
    "gradients",
    "clip",
    refused="SelectionError",
    note="Quantised layers have no parameters, so selecting gradients of parameters raises"
    " `SelectionError`.",
)
def test_there_are_no_parameters_packed_weights_are_explained(dynamic, x):
    for action in (
        lambda: hl.record(dynamic, "0", ports="grad"),
        lambda: hl.clip(dynamic, norm=1.0),
    ):
        with pytest.raises(hl.SelectionError, match="has no parameters"):
            action()
    with pytest.warns(hl.HooklineWarning, match="a quantised module holds its weights there"):
        with hl.edit(dynamic, "0._packed_params", lambda t: t):
            dynamic(x)


def test_a_copy_of_a_hooked_quantised_model_is_free_of_the_line(dynamic, x):
    with hl.record(dynamic, "0") as run:
        other = copy.deepcopy(dynamic)
        other(x)
        assert not len(hl.inventory(other))
        assert len(run.passes) == 0
        dynamic(x)
    assert torch.equal(run["0"], other[0](x))


@pytest.mark.cell(
    "dynamically quantised",
    "record",
    note="A quantised LSTM is recorded as a whole, without its inner modules.",
)
def test_a_quantised_lstm_is_recorded_whole(x):
    model = nn.ModuleDict({"lstm": nn.LSTM(8, 4)}).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lstm = torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)["lstm"]
    plain, (h, c) = lstm(x[None])
    with hl.record(lstm) as run:
        lstm(x[None])
    assert torch.equal(run[":output[0]"], plain)
    assert torch.equal(run[":output[1][0]"], h)
    assert torch.equal(run[":output[1][1]"], c)


class Static(nn.Module):
    def __init__(self):
        super().__init__()
        self.quant = torch.ao.quantization.QuantStub()
        self.conv = nn.Conv2d(1, 2, 3)
        self.dequant = torch.ao.quantization.DeQuantStub()

    def forward(self, x):
        return self.dequant(self.conv(self.quant(x)))


@pytest.fixture
def image():
    return torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def static(image):
    torch.manual_seed(0)
    model = Static().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = torch.ao.quantization.get_default_qconfig(torch.backends.quantized.engine)
        prepared = torch.ao.quantization.prepare(model)
        with hl.record(prepared, "conv") as run:  # beside the observers, which are hooks
            prepared(image)
        assert torch.equal(run["conv"], model.conv(image))
        return torch.ao.quantization.convert(prepared)


@pytest.mark.cell("statically quantised", "record", "statistics")
def test_quantised_values_are_recorded_and_lost_ones_are_named(static, image, tmp_path):
    plain = static(image)
    with (
        hl.record(static, ports=("input", "output")) as run,
        hl.record(static, "conv", keep=lambda t: t.dequantize().mean()) as means,
    ):
        assert torch.equal(static(image), plain)
    conv = run["conv"]
    assert (conv.is_quantized, conv.dtype) == (True, torch.quint8)
    assert torch.equal(conv.dequantize(), plain)
    assert torch.equal(means["conv"], plain.mean())
    run.save(tmp_path / "run")
    assert any(lost.startswith("conv: ") for lost in run.lost)
    assert "quint8" in str(hl.summary(static, image))


def retripled(value):
    """Three times a quantised value, plus one, in its own steps."""
    return torch.quantize_per_tensor(
        value.dequantize() * 3 + 1, value.q_scale(), value.q_zero_point(), value.dtype
    )


QUANTISED = How(lambda value: measured(value.dequantize()), ((retripled, retripled),))


@pytest.mark.cell("statically quantised", "record", "statistics", "edit", "features")
@pytest.mark.parametrize("path", ["quant", "conv", "dequant"])
def test_statically_quantised_values_are_those_of_torchs_hooks(static, image, path):
    kinds = {} if path == "dequant" else {"how": QUANTISED}
    assert_values_are_torchs(
        lambda: static, lambda model: model(image), path,
        ["record", "statistics", "edit", "features"], **kinds,
    )  # fmt: skip


@pytest.mark.cell(
    "statically quantised", "edit", note="The edit function must return a quantised tensor."
)
def test_a_quantised_value_is_edited_by_a_quantised_one_only(static, image):
    def zero(t):
        return torch.quantize_per_tensor(t.dequantize() * 0, t.q_scale(), t.q_zero_point(), t.dtype)

    with hl.edit(static, "conv", zero):
        assert not static(image).any()
    with hl.edit(static, "dequant", hl.edits.scale(0.0)):
        assert not static(image).any()
    for edit in (hl.edits.scale(0.0), hl.edits.add(1.0), hl.edits.noise(0.1)):
        with pytest.raises(hl.StructureError, match="quantised") as caught:
            with hl.edit(static, "conv", edit):
                static(image)
        assert "torch.quantize_per_tensor(" in str(caught.value)
    with pytest.raises(hl.StructureError, match=r"quint8 on cpu, got .* float32"):
        with hl.edit(static, "conv", lambda t: t.dequantize()):
            static(image)


def test_other_batches_of_a_static_model_are_compared(static, image):
    images = torch.cat([image, -image])
    runs = []
    for batch in (images, images.flip(0)[:1]):
        with hl.record(static, ["**", "(root):input"]) as run:
            static(batch)
        runs.append(run)
    comparison = hl.compare(*runs)
    assert comparison.ok
    assert comparison["conv"].verdict == "identical"
    assert hl.invariance(static, images, only=["alone"]).ok


@pytest.fixture
def torchao_model():
    return int8_net()


@pytest.mark.cell("torchao, int8 weights", "record", "edit", "gradients", "raw hooks")
def test_weights_of_subclasses_are_weights_frozen_are_said(torchao_model):
    model = torchao_model
    x = torch.randn(4, 64, requires_grad=True)
    plain = model(x)
    with (
        hl.record(model, ports=("output", "grad_output")) as run,
        hl.attach(model) as line,
    ):
        line.backward("0", lambda module, grad_input, grad_output: None)
        hooked = model(x)
        hooked.sum().backward()
    assert torch.equal(plain, hooked)
    assert torch.equal(run["2:grad_output"], torch.ones(4, 64))
    assert run["0:grad_output"].shape == (4, 64)
    with pytest.warns(hl.HooklineWarning, match="it is frozen: requires_grad is False"):
        with hl.record(model, "0", ports="grad") as run:
            model(x).sum().backward()
    assert list(run) == ["0.bias:grad"]
    with torch.no_grad(), hl.edit(model, "0", hl.edits.scale(0.0)):
        assert torch.equal(model(x), model[2](torch.zeros(4, 64)))


def test_a_summary_counts_the_bytes_that_int8_weights_take(torchao_model):
    table = hl.summary(torchao_model)
    weights, scales, biases = 2 * 64 * 64, 2 * 64 * 4, 2 * 64 * 4
    assert table.parameters == 2 * (64 * 64 + 64)
    assert weights + scales + biases <= table.parameter_bytes < 2 * weights


def test_torchao_weights_are_told_apart_and_extracted(torchao_model, tmp_path):
    model, x = torchao_model, torch.randn(4, 64)
    store = hl.extract(model, x, "0", to=tmp_path / "store")
    assert torch.equal(store["0"][:], model[0](x))
    runs, other = [], copy.deepcopy(model)
    other[2].weight.qdata.neg_()
    for net in (model, other):
        with hl.record(net) as run, torch.no_grad():
            net(x)
        runs.append(run)
    assert "weights of the model differ" in str(hl.compare(*runs).findings)


def test_torchao_weights_are_measured_by_what_they_stand_for(torchao_model):
    model, x = torchao_model, torch.randn(4, 64)
    weight = model[2].weight
    floats = {name: value.dequantize() for name, value in model.state_dict().items() if "w" in name}
    assert hl.compare(model.state_dict(), floats).counts["identical"] == 2
    with hl.check(model), hl.monitor(model, "2", ports="value") as seen, torch.no_grad():
        model(x)
    assert seen["2.weight:value"].std == pytest.approx(weight.dequantize().std(correction=0).item())
    weight.scale[3] = torch.nan
    with pytest.raises(hl.NonFiniteError, match=r"2\.weight .* 64 NaN of 4,096"):
        with hl.check(model):
            model(x)
