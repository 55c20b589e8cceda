"""Without gradients: no_grad, inference mode, and both switched inside the model."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.torch_private.dynamo import OLD_DYNAMO

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
REASON = "it ran under torch.no_grad() or inference_mode(); run it with gradients enabled"


@pytest.mark.cell("no_grad, inference_mode", "record", "statistics", "edit", "features", "watch")
@pytest.mark.parametrize("mode", MODES)
def test_values_edits_and_features_are_as_with_gradients(mode, net, image):
    with hl.record(net, ports=("output", "input"), copy=True) as expected:
        net(image)
    with hl.edit(net, "layer1", hl.edits.scale(0.5)):
        edited = net(image).detach()
    file = io.StringIO()
    with MODES[mode]():
        with hl.record(net, ports=("output", "input"), copy=True) as run:
            assert torch.equal(net(image), expected["fc"])
        with hl.record(net, "fc", keep=lambda t: t.norm()) as norms, hl.watch(net, file=file):
            net(image)
        with hl.edit(net, "layer1", hl.edits.scale(0.5)):
            assert torch.equal(net(image), edited)
        features = hl.features(net, image, ["layer1"])
    for site, value in expected.items():
        assert torch.equal(run[site], value)
    assert torch.equal(norms["fc"], expected["fc"].norm())
    assert torch.equal(features["layer1"], expected["layer1"])
    assert f"mean {expected['fc'].mean().item():.4g}" in file.getvalue()


@pytest.mark.trap(26)
def test_what_inference_mode_recorded_can_be_used_with_autograd(net, image):
    by_hand = []
    handle = net.stem.register_forward_hook(lambda module, args, output: by_hand.append(output))
    with torch.inference_mode(), hl.record(net, "stem") as run:
        net(image)
    handle.remove()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        net.layer1(by_hand[0])
    value = run["stem"]
    if value.is_inference():  # a clone made outside is an ordinary tensor
        value = value.clone()
    net.layer1(value).sum().backward()
    assert net.layer1[0].conv.weight.grad is not None


@pytest.mark.trap(26)
def test_in_inference_mode_overwritten_values_were_copied(net, image):
    kept = []
    handle = net.layer1[0].bn.register_forward_hook(lambda m, args, output: kept.append(output))
    with torch.inference_mode(), hl.record(net, "layer1.0.bn") as run:
        net(image)
    handle.remove()
    with hl.record(net, "layer1.0.bn", copy=True) as expected:
        net(image)
    assert torch.equal(run["layer1.0.bn"], expected["layer1.0.bn"])
    assert torch.equal(kept[0], run["layer1.0.bn"].relu())
    with pytest.raises(RuntimeError, match="do not track version counter"):
        print(kept[0]._version)  # which would tell
    with torch.no_grad(), hl.record(net, "layer1.0.bn") as run:
        net(image)
    with pytest.raises(hl.OverwrittenError):
        run["layer1.0.bn"]


@pytest.mark.trap(26)
@pytest.mark.cell(
    "no_grad, inference_mode", "gradients", "edit gradients", "raw hooks", "clip",
    note="Hooks on gradients are not called. If you selected modules, a warning says why. The"
    " look-up of a gradient in the recording raises `NotRecordedError`.",
    refused="NotRecordedError",
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_no_gradient_flows_is_said_with_reason_and_remedy(mode, net, image):
    def raw():
        line = hl.attach(net)
        line.backward("fc", lambda *a: None)
        return line

    handle = net.fc.register_forward_hook(
        lambda module, args, output: output.register_hook(torch.zeros_like) and None
    )
    with MODES[mode](), pytest.raises(RuntimeError, match="doesn't require gradient") as failed:
        net(image)
    handle.remove()
    assert not hasattr(failed.value, "__notes__")  # that would name the module
    lines = [
        lambda: hl.record(net, "fc", ports="grad_output"),
        lambda: hl.record(net, "fc", ports="grad_input"),
        lambda: hl.edit(net, "fc:grad_output", hl.edits.scale(0)),
        lambda: hl.clip(net, "fc", norm=1.0, ports="grad_output"),
        raw,
    ]
    for make in lines:
        with pytest.warns(hl.HooklineWarning) as caught, make(), MODES[mode]():
            net(image)
        assert REASON in str(caught[0].message)
    with pytest.warns(hl.HooklineWarning), hl.record(net, "fc", ports="grad_output") as run:
        with MODES[mode]():
            net(image)
    with pytest.raises(hl.NotRecordedError, match="run it with gradients enabled"):
        run["fc:grad_output"]


class Frozen(nn.Module):
    """A backbone without gradients, or in inference mode, below a head with them."""

    def __init__(self, mode):
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.mode = mode

    def forward(self, x):
        with self.mode():
            x = self.backbone(x)
        return self.head(x.clone())


class Thawed(Frozen):
    """The other way round: gradients are switched on for the head alone."""

    def forward(self, x):
        with torch.no_grad():
            x = self.backbone(x)
            with torch.set_grad_enabled(True):
                return self.head(x)


@pytest.mark.cell(
    "`no_grad` or `enable_grad` inside forward", "record", "gradients", "edit", "edit gradients",
    note="The outputs of modules that run without gradients are recorded and edited, but have"
    " no gradient. A warning says so.",
)  # fmt: skip
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["no_grad", "inference_mode", "thawed"])
@pytest.mark.compiles
def test_where_the_model_switches_gradients_sites_have_theirs(kind, is_compiled):
    if OLD_DYNAMO and is_compiled and kind == "inference_mode":
        pytest.skip("torch before 2.13 fails to compile such a model, with or without hooks")
    torch.manual_seed(0)
    model = Thawed(None) if kind == "thawed" else Frozen(MODES[kind])
    x = torch.randn(4, 3, requires_grad=True)
    outer = torch.no_grad if kind == "thawed" else torch.enable_grad
    # No graph holds a switch to inference mode: it breaks there.
    options = {"backend": "aot_eager", "fullgraph": kind != "inference_mode"}
    call = torch.compile(model, **options) if is_compiled else model
    line = hl.record(model, ["backbone", "head"], ports=("output", "grad_output"))
    run = line.recording
    with outer():
        y = call(x)
    y.sum().backward()
    with pytest.warns(hl.HooklineWarning, match=r"1 of 4 sites .* backbone:grad_output: .*no_grad"):
        line.remove()
    assert torch.equal(run["head"], y.detach())
    assert torch.equal(run["head:grad_output"], torch.ones(4, 2))
    assert "backbone:grad_output" not in run
    assert torch.equal(run["backbone"], model.backbone(x).detach())
    model.zero_grad()
    with hl.edit(model, "head:grad_output", lambda g: g * 3):
        with outer():
            y = call(x)
        y.sum().backward()
    assert torch.equal(model.head.bias.grad, torch.full((2,), 12.0))
