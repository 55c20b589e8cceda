"""Kinds of tensors: nested, sparse, complex, quantized, 8-bit, empty, viewed in unusual ways."""

from __future__ import annotations

import io
from math import nan

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import hookline as hl
from by_torch import (
    clipped_by_torch,
    hooked_by_torch,
    measured,
    printed,
    printed_of,
    raw_hook,
    seen_by_torch,
    triple,
    tripled,
)
from zoo import Tagged

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*are deprecated"),
]

BASE = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
COMPLEX = torch.complex(BASE, BASE.flip(0))


def nested(layout):
    return torch.nested.nested_tensor([BASE[:2], BASE[:3]], layout=layout)


SAVED = {
    "complex": COMPLEX.clone,
    "complex128": lambda: COMPLEX.to(torch.complex128),
    "conjugated view": COMPLEX.conj,
    "negated view": lambda: COMPLEX.conj().imag,
    "float8": lambda: BASE.to(torch.float8_e4m3fn),
    "float8 e5m2": lambda: BASE.to(torch.float8_e5m2),
    "bool": lambda: BASE > 0,
    "uint16": lambda: torch.arange(16).reshape(4, 4).to(torch.uint16),
    "empty": lambda: torch.zeros(0, 4),
    "scalar": lambda: torch.tensor(1.5),
    "transposed": BASE.t,
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: BASE[:1].expand(4, 4),
    "strided": lambda: BASE[::2, ::2],
}
LOST = {
    "sparse": lambda: BASE.relu().to_sparse(),
    "sparse rows": lambda: BASE.relu().to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(BASE, 0.1, 0, torch.qint8),
    "complex32": lambda: COMPLEX.to(torch.complex32),
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "mkldnn": BASE.to_mkldnn,
}


# Of which `hl.watch` prints no mean: what is not floating, or torch has no numbers of.
WITHOUT_MEAN = {
    "complex", "complex128", "conjugated view", "bool", "uint16", "sparse", "sparse rows",
    "quantized", "complex32", "mkldnn",
}  # fmt: skip


class Same(nn.Module):
    def forward(self, x):
        return x


def wide(tensor):
    """The numbers of any tensor, comparable."""
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype is torch.complex32:
        return torch.view_as_real(tensor).float()
    return tensor if tensor.is_complex() else tensor.double()


@pytest.mark.cell(
    "sparse, complex, quantised, 8-bit, nested, empty and viewed tensors", "record", "features",
    "watch",
    note="`hl.record` keeps these tensors unchanged. `run.save` of a recording `run` skips"
    " sparse, quantised, nested and complex32 tensors, and lists them in `run.lost`.",
)  # fmt: skip
@pytest.mark.parametrize("name", [*SAVED, *LOST])
def test_a_tensor_is_recorded_as_saved_or_named_as_lost(name, tmp_path):
    value, model = {**SAVED, **LOST}[name](), nn.Sequential(Same())
    file = io.StringIO()
    with hl.record(model, "0") as run, hl.watch(model, "0", file=file):
        model(value)
    if name in WITHOUT_MEAN:
        assert "mean" not in file.getvalue()
    else:
        expected = printed_of(wide(value)) if name != "empty" else (nan, nan)
        assert_close(printed(file.getvalue()), [expected], rtol=1e-3, atol=1e-6, equal_nan=True)
    with hl.record(model, "0", copy=True, device="cpu") as copied:
        model(value)
    for found in (run["0"], copied["0"], hl.features(model, value, ["0"])["0"]):
        assert (found.dtype, found.layout, type(found)) == (value.dtype, value.layout, type(value))
        assert torch.equal(wide(found), wide(value))
    if name in SAVED and name != "empty":
        assert copied["0"].data_ptr() != value.data_ptr()
    run.save(tmp_path / "run")
    opened = hl.open(tmp_path / "run")
    assert bool(run.lost) == (name in LOST)
    if name in LOST:
        assert "not saved" in repr(opened["0"])
        assert str(value.dtype).removeprefix("torch.") in run.lost[0]
    else:
        assert opened["0"].dtype is value.dtype
        assert torch.equal(wide(opened["0"]), wide(value))


@pytest.mark.parametrize("name", [*SAVED, *LOST])
def test_dtype_is_for_floating_tensors_and_leaves_the_others(name):
    value, model = {**SAVED, **LOST}[name](), nn.Sequential(Same())
    with hl.record(model, "0", dtype=torch.float64) as run:
        if name == "mkldnn":
            with pytest.raises(NotImplementedError, match="Mkldnn") as caught:
                model(value)
            assert "raised by the hook at 0 (Same)" in str(caught.value.__notes__)
            return
        model(value)
    expected = torch.float64 if value.is_floating_point() else value.dtype
    assert run["0"].dtype is expected
    assert torch.equal(wide(run["0"]), wide(value))


EDITS = {
    "scale": (hl.edits.scale(2.0), lambda t: t * 2),
    "add": (hl.edits.add(1.0), lambda t: t + 1),
    "replace": (hl.edits.replace(0.5), lambda t: torch.full_like(t, 0.5)),
    "noise": (hl.edits.noise(0.1, seed=0), None),
    "clamp": (hl.edits.clamp(-0.5, 0.5), lambda t: t.clamp(-0.5, 0.5)),
}
# What torch can do with a kind; where it cannot, the edit is refused.
WORKS = {
    "complex": {"scale", "add", "replace", "noise"},
    "complex128": {"scale", "add", "replace", "noise"},
    "conjugated view": {"scale", "add", "replace", "noise"},
    "complex32": {"scale", "add", "replace", "noise"},
    "float8": {"replace"}, "float8 e5m2": {"replace"},
    "bool": set(), "uint16": set(), "quantized": {"clamp"},
    "sparse": {"scale"}, "sparse rows": {"scale"}, "mkldnn": {"scale"},
    "nested": {"scale", "add"}, "jagged": {"scale", "add", "clamp"},
}  # fmt: skip


@pytest.mark.cell(
    "sparse, complex, quantised, 8-bit, nested, empty and viewed tensors",
    "edit",
    note="If torch lacks the operation of an edit, such as an addition, for a kind of tensor,"
    " the edit raises `StructureError`.",
)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", [*SAVED, *LOST])
def test_an_edit_is_right_or_refused_and_keeps_the_kind(name, edit):
    value, model = {**SAVED, **LOST}[name](), nn.Sequential(Same())
    change, expected = EDITS[edit]
    with hl.edit(model, "0", change):
        if edit not in WORKS.get(name, set(EDITS)):
            with pytest.raises(hl.StructureError):
                model(value)
            return
        found = model(value)
    assert (found.dtype, found.layout, type(found)) == (value.dtype, value.layout, type(value))
    if expected is not None and edit != "replace":
        torch.testing.assert_close(wide(found), wide(expected(value)))


def test_the_refusal_of_an_edit_names_the_kind_and_a_way():
    model, value = nn.Sequential(Same()), SAVED["float8"]()
    with hl.edit(model, "0", hl.edits.scale(2.0)), pytest.raises(hl.StructureError) as caught:
        model(value)
    assert str(caught.value).startswith(
        "hl.edits.scale cannot change Tensor[4, 4] float8_e4m3fn on cpu, which is float8_e4m3fn:"
    )
    assert str(caught.value).endswith("lambda t: (t.float() * 2).to(t.dtype).")
    with hl.edit(model, "0", lambda t: (t.float() * 2).to(t.dtype)):
        assert torch.equal(model(value).float(), value.float() * 2)


@pytest.mark.cell(
    "sparse, complex, quantised, 8-bit, nested, empty and viewed tensors",
    "gradients",
    "edit gradients",
    "clip",
    "statistics",
)
@pytest.mark.parametrize("port", ["grad_output", "grad_input"])
def test_complex_gradients_are_autograds_and_their_norms_whole(port):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), Same())
    x = COMPLEX.clone().requires_grad_()
    hidden = model[0](x)
    (expected,) = torch.autograd.grad(hidden.abs().square().sum(), hidden)
    with hl.record(model, "1", ports=port) as run, hl.record(model, ports="grad") as weights:
        model(x).abs().square().sum().backward()
    torch.testing.assert_close(run[f"1:{port}"], expected)
    torch.testing.assert_close(
        weights.gradients()["0.weight:grad"].ratio,
        (model[0].weight.grad.norm() / model[0].weight.detach().norm()).item(),
    )
    norm = torch.linalg.vector_norm(expected).item()
    with hl.clip(model, "1", norm=norm / 2, ports=port) as line:
        with (
            hl.record(model, "1", ports=port) as run,
            hl.record(model, "1", ports=port, keep=lambda g: g.norm()) as norms,
        ):
            model(x).abs().square().sum().backward()
    torch.testing.assert_close(line.report().rows[0].largest, norm)
    torch.testing.assert_close(run[f"1:{port}"], expected / 2, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norms[f"1:{port}"].item(), norm / 2, rtol=1e-4, atol=0)
    with hl.edit(model, f"1:{port}", lambda g: g * 1j), hl.record(model, "1", ports=port) as run:
        model(x).abs().square().sum().backward()
    torch.testing.assert_close(run[f"1:{port}"], expected * 1j)


class Pooled(nn.Module):
    """A linear layer on a nested tensor, and a loss of it."""

    def __init__(self):
        super().__init__()
        self.linear, self.act = nn.Linear(4, 3), nn.ReLU()

    def forward(self, x):
        return self.act(self.linear(x))


def total(value):
    return sum(part.square().sum() for part in value.unbind())


@pytest.mark.cell(
    "nested tensors", "record", "gradients", "statistics", "edit", "features", "watch",
    note="The strided and the jagged layout work. `run.save` of a recording `run` skips nested"
    " tensors, and lists them in `run.lost`.",
)  # fmt: skip
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_values_and_gradients_of_nested_tensors_are_their_parts(layout):
    torch.manual_seed(0)
    model, x = Pooled(), nested(layout)
    sites = ["linear", "act"]
    apart = []
    for part in (BASE[:2], BASE[:3]):
        with hl.record(model, sites, ports=("output", "grad_output")) as run:
            model(part).square().sum().backward()
        apart.append(dict(run.items()))
    with hl.record(model, sites, ports=("output", "grad_output")) as run:
        total(model(x)).backward()
    for site, value in run.items():
        assert value.is_nested
        assert value.layout is layout
        for found, of in zip(value.unbind(), apart, strict=True):
            torch.testing.assert_close(found, of[site])
    with hl.record(model, "linear", keep=lambda t: [part.mean() for part in t.unbind()]) as run:
        model(x)
    torch.testing.assert_close(run["linear"], [of["linear"].mean() for of in apart])
    with hl.edit(model, "act", hl.edits.scale(2.0)), hl.record(model, "act") as run:
        model(x)
    torch.testing.assert_close(run["act"].unbind()[1], apart[1]["act"] * 2)
    with hl.watch(model, file=io.StringIO()):
        assert hl.features(model, x, ["linear"])["linear"].is_nested


def parts(value):
    return [part.detach().clone() for part in value.unbind()]


def numbers(value):
    """What `keep=` computes of a nested tensor."""
    return measured(torch.cat([part.flatten() for part in value.unbind()]))


def nested_step(model, layout):
    """Run a model forward and backward; the parts of what it returns, and its gradients."""
    model.zero_grad()
    out = model(nested(layout))
    total(out).backward()
    return [*parts(out), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.cell("nested tensors", "record", "statistics", "edit", "features", "watch")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("path", ["linear", "act"])
def test_nested_values_are_those_of_torchs_hooks(layout, path):
    torch.manual_seed(0)
    model, file = Pooled(), io.StringIO()
    with seen_by_torch(model, path) as came, hooked_by_torch(model, f"{path}:grad_output") as grads:
        bare = nested_step(model, layout)
    with (
        hl.record(model, path, ports=("output", "grad_output")) as run,
        hl.record(model, path, keep=numbers) as kept,
        hl.watch(model, path, file=file),
    ):
        assert_close(nested_step(model, layout), bare)
    assert_close(parts(run[path]), parts(came[0]))
    assert_close(parts(run[f"{path}:grad_output"]), parts(grads[0]))
    assert_close(kept[path], numbers(came[0]))
    assert_close(parts(hl.features(model, nested(layout), path)[path]), parts(came[0]))
    text = file.getvalue().replace("< ", "")
    flat = [torch.cat([part.flatten() for part in one.unbind()]) for one in (came[0], grads[0])]
    assert_close(printed(text), [printed_of(one) for one in flat], rtol=1e-3, atol=1e-6)
    with seen_by_torch(model, path, change=tripled):
        expected = nested_step(model, layout)
    with hl.edit(model, path, tripled):
        assert_close(nested_step(model, layout), expected)
    assert not all(map(torch.equal, expected, bare))


@pytest.mark.cell(
    "nested tensors",
    "edit gradients",
    "raw hooks",
    note="Backward hooks, and changes of gradients by `hl.edit` or `hl.clip`, work in the"
    " jagged layout only.",
)
@pytest.mark.parametrize("site", ["act:grad_output", "act:grad_input"])
def test_jagged_gradients_are_changed_as_by_torchs_hooks(site):
    torch.manual_seed(0)
    model = Pooled()
    bare = nested_step(model, torch.jagged)
    with hooked_by_torch(model, site, triple):
        expected = nested_step(model, torch.jagged)
    with hl.edit(model, site, triple):
        assert_close(nested_step(model, torch.jagged), expected)
    with hl.attach(model) as line:
        raw_hook(line, site)
        assert_close(nested_step(model, torch.jagged), expected)
    assert not all(map(torch.equal, expected, bare))


@pytest.mark.cell(
    "nested tensors",
    "edit gradients",
    "raw hooks",
    note="Backward hooks, and changes of gradients by `hl.edit` or `hl.clip`, work in the"
    " jagged layout only.",
)
def test_gradients_of_jagged_tensors_are_changed_and_hooked():
    torch.manual_seed(0)
    model, x, given = Pooled(), nested(torch.jagged), []
    with hl.attach(model) as line:
        line.backward("act", lambda module, grad_input, grad_output: given.append(grad_input))
        with hl.record(model, "act:grad_input") as run:
            total(model(x)).backward()
    for found, expected in zip(given[0][0].unbind(), run["act:grad_input"].unbind(), strict=True):
        assert torch.equal(found, expected)
    assert model.linear.weight.grad.any()
    model.zero_grad()
    with hl.edit(model, "act:grad_output", lambda g: g * 0):
        total(model(x)).backward()
    assert not model.linear.weight.grad.any()


def with_holes():
    """A jagged tensor of parts of a larger one, which lie apart in its memory."""
    starts, lengths = torch.tensor([0, 1]), torch.tensor([2, 3])
    return torch.nested.narrow(torch.stack([BASE, BASE]), 1, starts, lengths, layout=torch.jagged)


@pytest.mark.cell(
    "nested tensors",
    "clip",
    note="Backward hooks, and changes of gradients by `hl.edit` or `hl.clip`, work in the"
    " jagged layout only.",
)
@pytest.mark.parametrize("make", [lambda: nested(torch.jagged), with_holes])
@pytest.mark.parametrize(
    "options", [{"norm": 0.1}, {"norm": 0.1, "norm_type": 1.0}, {"value": 0.1}]
)
def test_gradients_of_jagged_tensors_are_clipped_as_elements(make, options):
    model, x = nn.ModuleDict({"act": nn.ReLU()}), make().requires_grad_()
    model.forward = lambda x: model["act"](x * 2)
    with hl.record(model, "act:grad_output") as run:
        total(model(x)).backward()
    parts = run["act:grad_output"].unbind()
    (clipped,) = clipped_by_torch([torch.cat([part.flatten() for part in parts])], **options)
    with (
        hl.clip(model, "act:grad_output", **options) as line,
        hl.record(model, "act:grad_output") as run,
    ):
        x.grad = None  # torch cannot add to it
        total(model(x)).backward()
    found = run["act:grad_output"].unbind()
    torch.testing.assert_close(torch.cat([part.flatten() for part in found]), clipped)
    assert line.report().clipped == 1


JAGGED_LINES = {
    "an edit": lambda model: hl.edit(model, "linear", tripled),
    "an edit of a gradient": lambda model: hl.edit(model, "linear:grad_output", triple),
    "a norm": lambda model: hl.clip(model, "linear:grad_output", norm=0.1),
    "a bound": lambda model: hl.clip(model, "linear:grad_output", value=0.1),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", JAGGED_LINES)
def test_compiled_jagged_gradients_are_those_of_eager_mode(name):
    torch.manual_seed(0)
    model, seen = Pooled(), []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        with hl.record(model, ["linear", "act"], ports=("output", "grad_output")) as found:
            total(run(nested(torch.jagged))).backward()
        bare = model.linear.weight.grad.clone()
        model.zero_grad()
        with JAGGED_LINES[name](model):
            total(run(nested(torch.jagged))).backward()
        assert not torch.allclose(model.linear.weight.grad, bare)
        seen.append(([parts(value) for value in found.values()], model.linear.weight.grad))
    assert_close(seen[1], seen[0])


@pytest.mark.parametrize("options", [{"norm": 0.1}, {"value": 0.1}])
def test_gradients_of_the_older_layout_are_not_clipped(options):
    model = Pooled()
    with (
        hl.clip(model, "act:grad_output", **options),
        pytest.raises(hl.StructureError, match=r"layout=torch\.jagged"),
    ):
        total(model(nested(torch.strided))).backward()


def test_what_torch_cannot_do_with_the_older_layout_is_refused():
    model, x = Pooled(), nested(torch.strided)
    with hl.edit(model, "act:grad_output", lambda g: g * 0):
        with pytest.raises(hl.StructureError, match=r"Make the tensor with layout=torch\.jagged"):
            total(model(x)).backward()
    with hl.attach(model) as line:
        line.backward("act", lambda *a: None)
        with pytest.raises(hl.AttachError, match="act takes a nested tensor, of which torch makes"):
            model(x)


def test_a_raw_backward_hook_on_a_sparse_input_is_refused():
    class Product(nn.Module):
        def forward(self, a):
            return a @ torch.ones(4, 1)

    model, x = Product(), BASE.relu().to_sparse().requires_grad_()
    with hl.attach(model) as line:
        line.backward("", lambda *a: None)
        with pytest.raises(hl.AttachError, match="takes a sparse_coo tensor, of which torch makes"):
            model(x)
    with hl.attach(model) as line:
        line.backward_pre("", lambda module, grad_output: None)
        model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_table_of_gradients_holds_nested_ones(layout):
    torch.manual_seed(0)
    model = Pooled()
    with hl.record(model, "act", ports="grad_output") as run:
        y = model(nested(layout))
        total(y).backward()
    expected = torch.cat([2 * part.detach().flatten() for part in y.unbind()]).norm()
    torch.testing.assert_close(run.gradients()["act:grad_output"].norm, expected.item())


class Boxed(torch.Tensor):
    """A subclass by `__torch_dispatch__`, which has no numbers of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def opened(value):
            return value.inner if isinstance(value, Boxed) else value

        flat = torch.utils._pytree.tree_map(opened, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Boxed, function(*flat[0], **flat[1]))


@pytest.mark.cell(
    "tensor subclasses", "record", "gradients", "statistics", "edit", "edit gradients", "raw hooks"
)
@pytest.mark.parametrize("kind", [Tagged, Boxed])
def test_a_subclass_is_recorded_as_one_with_right_gradients(kind, net, image):
    def of(value):
        return value.inner if kind is Boxed else value

    x = image.clone().as_subclass(Tagged) if kind is Tagged else Boxed(image)
    with hl.record(net, "fc", ports=("output", "grad_output", "grad_input")) as expected:
        net(image).square().sum().backward()
    with hl.record(net, "fc", ports=("output", "grad_output", "grad_input")) as run:
        net(x).square().sum().backward()
    assert type(run["fc"]) is kind
    for site, value in expected.items():
        torch.testing.assert_close(
            torch.Tensor(of(run[site])) if kind is Tagged else of(run[site]), value
        )
    with hl.record(net, "fc", keep=lambda t: t.mean(), copy=True) as run:
        net(x)
    torch.testing.assert_close(float(of(run["fc"])), expected["fc"].mean().item())
    with hl.edit(net, "fc", hl.edits.scale(2.0)):
        assert type(net(x)) is kind
    net.zero_grad()
    with hl.edit(net, "fc:grad_output", lambda g: g * 0), hl.attach(net) as line:
        line.backward("fc", lambda *a: None)
        net(x).sum().backward()
    assert not of(net.fc.weight.grad).any()


class WritesInside(nn.Module):
    """Writes to the tensor inside of a value."""

    def __init__(self):
        super().__init__()
        self.part = nn.Tanh()

    def forward(self, x):
        y = self.part(x)
        y.inner.add_(1)
        return y


def test_a_write_to_the_inner_tensor_of_a_subclass_needs_a_copy():
    x = Boxed(torch.zeros(2))
    with torch.no_grad():
        for copy, expected in ((False, 1.0), (True, 0.0)):
            model = WritesInside()
            with hl.record(model, "part", copy=copy) as run:
                model(x)
            assert run["part"].inner.tolist() == [expected] * 2  # docs/recording.md says so


class Weights(nn.Module):
    """Returns a parameter as it is, a sparse one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse())

    def forward(self):
        return self.weight


class Times(nn.Module):
    """A product with such a parameter."""

    def __init__(self):
        super().__init__()
        self.weights = Weights()

    def forward(self, x):
        return torch.sparse.mm(self.weights(), x).sum()


def test_a_sparse_leafs_gradient_is_told_to_be_at_the_parameter():
    model, x = Times(), torch.rand(3, 2)
    with (
        pytest.warns(hl.HooklineWarning, match="weights:grad_output has no gradient: .*'grad'"),
        hl.record(model, "weights", ports=("grad_output", "grad")) as run,
    ):
        model(x).backward()
    assert run["weights:grad_output"] is None
    assert torch.equal(run["weights.weight:grad"].to_dense(), model.weights.weight.grad.to_dense())
    with hl.edit(model, "weights:grad_output", hl.edits.scale(2.0)) as line:
        line.options.quiet = True
        with pytest.raises(hl.AttachError, match="cannot be changed: it is a leaf of a layout"):
            model(x)
