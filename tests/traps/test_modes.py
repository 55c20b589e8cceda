"""Traps of raw hooks in modes: inference mode, autocast, torch.func, tracing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl

X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))


class Keep:
    value = None

    def __call__(self, module, args, output):
        self.value = output


@pytest.mark.trap(26)
def test_a_tensor_hook_under_no_grad_fails_naming_no_module(model):
    handle = model[0].register_forward_hook(
        lambda module, args, output: output.register_hook(torch.zeros_like) and None
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match="doesn't require gradient") as failed:
        model(X)
    handle.remove()
    assert not hasattr(failed.value, "__notes__")
    with pytest.warns(hl.HooklineWarning, match=r"0:grad_output.*no_grad\(\) or inference_mode"):
        with torch.no_grad(), hl.record(model, "0", ports=("output", "grad_output")) as run:
            model(X)
    assert "0" in run
    with pytest.raises(hl.NotRecordedError, match="run it with gradients enabled"):
        run["0:grad_output"]


@pytest.mark.trap(26)
def test_a_record_of_inference_mode_is_rewritten_without_a_trace(model):
    kept, weight = Keep(), torch.ones(3, requires_grad=True)
    model[1] = nn.ReLU(inplace=True)
    expected = model[0](X).detach()
    handle = model[0].register_forward_hook(kept)
    with torch.inference_mode():
        model(X)
    handle.remove()
    assert torch.equal(kept.value, expected.relu())  # and it has no version that would tell
    with pytest.raises(RuntimeError, match="do not track version counter"):
        print(kept.value._version)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        kept.value * weight
    with torch.inference_mode(), hl.record(model, "0") as run:
        model(X)
    assert torch.equal(run["0"], expected)  # copied in time
    (run["0"].clone() * weight).sum().backward()
    assert torch.equal(weight.grad, expected.sum(0))


@pytest.mark.trap(27)
def test_a_norm_inside_a_hook_under_autocast_is_of_sixteen_bits(model):
    big, kept = X * 3e4, []
    handle = model[0].register_forward_hook(lambda m, args, output: kept.append(output.norm()))
    with torch.autocast("cpu", torch.float16):
        model(big)
        handle.remove()
        with hl.record(model, "0") as whole, hl.record(model, "0", keep=lambda t: t.norm()) as run:
            model(big)
    exact = whole["0"].float().norm()
    assert exact.isfinite()
    assert not torch.isclose(kept[0].float(), exact, rtol=1e-5)
    assert torch.isclose(run["0"], exact, rtol=1e-6)


@pytest.mark.trap(28)
@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_record_of_a_transform_is_a_wrapper_of_a_gone_level(model, transform):
    kept = Keep()
    handle = model[0].register_forward_hook(kept)
    run_it = {
        "grad": lambda: torch.func.grad(lambda x: model(x).sum())(X),
        "vmap": lambda: torch.func.vmap(model)(X),
    }[transform]
    run_it()
    handle.remove()
    assert torch._C._functorch.is_functorch_wrapped_tensor(kept.value)
    with hl.record(model, "0") as run:
        run_it()
    assert not torch._C._functorch.is_functorch_wrapped_tensor(run["0"])
    assert torch.equal(run["0"], model[0](X))


@pytest.mark.trap(29)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("tracer", ["export", "jit.trace"])
def test_export_and_jit_trace_bake_hooks_in(model, tracer):
    trace = {
        "export": lambda: torch.export.export(model, (X,)).module(),
        "jit.trace": lambda: torch.jit.trace(model, X),
    }[tracer]
    handle = model[0].register_forward_hook(lambda module, args, output: output * 0)
    traced = trace()
    handle.remove()
    assert not torch.equal(traced(X), model(X))  # the hook is off, and goes on for ever
    with pytest.raises(hl.AttachError, match="trac"), hl.edit(model, "0", hl.edits.scale(0.0)):
        trace()
    assert torch.equal(trace()(X), model(X))


@pytest.mark.trap(29)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_hook_that_is_put_on_a_script_module_never_fires():
    scripted, kept = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), Keep()
    handle = scripted[0].register_forward_hook(kept)
    scripted(X)
    handle.remove()
    assert kept.value is None
    with pytest.raises(hl.AttachError, match="never calls them"):
        hl.record(scripted, "0")
