"""While a model is traced: a line that is on is refused, before anything is baked in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.jit.frontend import NotSupportedError
from torch.nn.modules import module as tables

import hookline as hl

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _no_hooks_of_the_tracer():
    """Remove the hook that an export of torch 2.11 leaves after an error."""
    yield
    tables._global_buffer_registration_hooks.clear()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def exported(model, strict):
    return torch.export.export(model, (X,), strict=strict).module()


TRACERS = {
    "torch.export": lambda model: exported(model, strict=False),
    "torch.export, strict": lambda model: exported(model, strict=True),
    "torch.jit.trace": lambda model: torch.jit.trace(model, (X,)),
    "make_fx": lambda model: make_fx(model)(X),
}


def raw(model):
    line = hl.attach(model)
    line.forward(nn.Linear, lambda module, args, output: output * 2)
    return line


LINES = {
    "record": lambda model: hl.record(model, nn.Linear),
    "gradients": lambda model: hl.record(model, nn.Linear, ports=("grad_output", "grad_input")),
    "edit": lambda model: hl.edit(model, "head", hl.edits.scale(2.0)),
    "raw": raw,
    "watch": hl.watch,
}


def code(traced):
    return str(traced.graph).split("return")[0].count("aten")


@pytest.mark.slow
@pytest.mark.trap(29)
@pytest.mark.cell(
    "`torch.export`, `torch.jit.trace`, `make_fx`",
    "record",
    "gradients",
    "edit",
    "raw hooks",
    "watch",
    refused="AttachError",
    note="Tracing raises `AttachError` while hooks of hookline are on the model.",
)
@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_line_that_is_on_is_refused_model_and_tracer_unhurt(tracer, name, model, left_as_found):
    trace = TRACERS[tracer]
    before, expected = left_as_found(model), model(X)
    with pytest.raises(hl.AttachError) as caught, LINES[name](model):
        trace(model)
    assert str(caught.value).startswith(
        f"{tracer.partition(',')[0]} traces this model while a line is on, and would bake its hooks"
        " into the graph.\nTrace it outside of the block,"
    )
    assert left_as_found(model) == before
    torch.testing.assert_close(trace(model)(X), expected)


@pytest.mark.slow
@pytest.mark.trap(29)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_hook_by_hand_is_baked_in(tracer, model):
    expected = model(X)
    handle = model.head.register_forward_hook(lambda module, args, output: output * 2)
    traced = TRACERS[tracer](model)
    handle.remove()
    torch.testing.assert_close(traced(X), expected * 2)


@pytest.mark.slow
@pytest.mark.parametrize("port", ["output", "input", "grad_output", "grad_input"])
@pytest.mark.parametrize("tracer", [*TRACERS, "torch.fx.symbolic_trace"])
def test_to_trace_a_part_of_the_lines_model_is_refused_as_well(tracer, port, model):
    trace = {**TRACERS, "torch.fx.symbolic_trace": torch.fx.symbolic_trace}[tracer]
    part = model if tracer == "torch.fx.symbolic_trace" else model.inner
    where = "inner" if part is model else "inner.linear"
    with pytest.raises(hl.AttachError, match="traces this model while a line is on"):
        with hl.record(model, where, ports=port):
            trace(part)
    assert not len(hl.inventory(model))
    torch.testing.assert_close(trace(part)(X), part(X))


def test_a_pass_that_was_refused_is_none_and_the_line_goes_on(model):
    with hl.record(model, "head") as run:
        with pytest.raises(hl.AttachError):
            torch.jit.trace(model, (X,))
        expected = model(X)
    assert len(run.passes) == 1
    assert torch.equal(run["head"], expected.detach())


def test_a_traced_program_is_called_inside_a_module_with_a_line(model):
    traced = torch.jit.trace(model, (X,))
    whole = nn.Sequential(nn.Identity(), traced)
    with hl.record(whole, "0") as run:
        whole(X)
    assert torch.equal(run["0"], X)


@pytest.mark.trap(29)
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_named_script_module_is_refused_among_all_reported(model, how):
    fired = []
    scripted = torch.jit.script(model.inner) if how == "script" else torch.jit.trace(model.inner, X)
    scripted.linear._forward_hooks[0] = lambda *a: fired.append(a)
    scripted(X)
    assert not fired  # nobody says so
    whole = nn.Sequential(scripted, nn.Linear(4, 2))
    with pytest.raises(
        hl.AttachError, match="is a ScriptModule: torch refuses hooks on its modules"
    ):
        hl.record(whole, "0")
    with hl.record(whole) as run:
        whole(X)
    why = {str(site): reason for site, reason in run.report().why.items()}
    said = "a ScriptModule: torch refuses hooks on its modules, or never calls them"
    fix = "hook the Python model, before torch.jit.script or torch.jit.trace"
    assert why["0"] == why["0.linear"] == f"{said}; {fix}"
    assert run["1"].shape == (3, 2)


def test_scripting_under_a_line_is_torchs_error(model, left_as_found):
    torch.jit.script(model)  # torch leaves an attribute on it
    before = left_as_found(model)
    with hl.record(model):
        with pytest.raises(Exception, match="hookline"):  # the file in which it found our hook
            torch.jit.script(model)
        model(X)
    assert left_as_found(model) == before
    torch.testing.assert_close(torch.jit.script(model)(X), model(X))


@pytest.mark.slow
@pytest.mark.cell("fake tensors", "record", "gradients", "statistics", "edit", "watch", "clip")
def test_a_run_on_fake_tensors_is_recorded_as_shapes(model):
    with FakeTensorMode(allow_non_fake_inputs=True):
        with hl.record(model, ports=("output", "grad_output")) as run:
            model(X).sum().backward()
        with hl.record(model, "head", keep=lambda t: t.mean(dim=0)) as means:
            model(X)
        for change in (hl.edits.scale(2.0), hl.edits.replace(0.0), hl.edits.noise(0.1, seed=0)):
            with hl.edit(model, "head", change):
                assert model(X).shape == (3, 2)
        with hl.watch(model), hl.clip(model, norm=1.0) as clipping:
            model(X).sum().backward()
    assert {site: value.shape for site, value in run.items()}["inner.linear:grad_output"] == (3, 4)
    assert means["head"].shape == (2,)
    assert "without numbers" in str(clipping.report())
    assert model.head.weight.grad is None or model.zero_grad() is None


@pytest.mark.cell(
    "meta device", "record", "gradients", "statistics", "edit", "features", "watch", "clip"
)
def test_a_run_on_the_meta_device_is_recorded_as_shapes(model, tmp_path):
    model, x = model.to("meta"), X.to("meta")
    with hl.record(model, ports=("output", "grad_output", "grad")) as run:
        model(x).sum().backward()
    assert run["head"].is_meta
    assert run["inner:grad_output"].shape == (3, 4)
    assert "meta or fake tensors, which have no numbers" in " ".join(str(run.gradients()).split())
    assert not run.gradients().exploding
    run.save(tmp_path / "run")
    assert "head: Tensor[3, 2] float32 on meta, torch.strided" in run.lost
    assert "not saved" in repr(hl.open(tmp_path / "run")["head"])
    with hl.record(model, "head", keep=lambda t: t.mean(dim=0)) as means:
        model(x)
    assert means["head"].shape == (2,)
    for change in (
        hl.edits.scale(2.0), hl.edits.add(1.0), hl.edits.replace(0.0), hl.edits.noise(0.1),
        hl.edits.clamp(0, 1),
    ):  # fmt: skip
        with hl.edit(model, "head", change):
            assert model(x).is_meta
    assert hl.features(model, x, ["inner"])["inner"].is_meta
    with hl.watch(model), hl.clip(model, norm=1.0) as clipping:
        model(x).sum().backward()
    assert {row.clipped for row in clipping.report()} == {0}
    with (
        hl.record(model, "head", device="cpu"),
        pytest.raises(NotImplementedError, match="no data"),
    ):
        model(x)


@pytest.mark.parametrize("attach", [
    lambda model: hl.record(model, "inner"),
    lambda model: hl.record(model, "inner:grad_output"),
    lambda model: hl.edit(model, "inner", hl.edits.scale(2.0)),
])  # fmt: skip
def test_torch_jit_script_of_a_hooked_model_fails_with_a_note(model, attach):
    with pytest.raises((RuntimeError, NotSupportedError)) as raised, attach(model):
        torch.jit.script(model)
    (note,) = raised.value.__notes__
    assert note.startswith("hookline: torch.jit.script compiles the hooks on a model, too, and hl.")
    assert torch.equal(torch.jit.script(model)(X), model(X))
    with pytest.raises(RuntimeError) as raised, attach(model):
        raise RuntimeError("hookline is not the cause")
    assert not hasattr(raised.value, "__notes__")
