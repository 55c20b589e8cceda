"""Modes of torch that are set around a line: none is changed, and none changes what is seen."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hookline as hl
from by_torch import assert_gradients_are_torchs, assert_values_are_torchs
from zoo import ROWS, rows_net

PORTS = ("output", "input", "grad_output", "grad_input", "grad")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(5))


def recorded(model, x=X, **options):
    model.zero_grad()
    with hl.record(model, ports=PORTS, **options) as run:
        model(x.clone().requires_grad_()).square().sum().backward()
    return dict(run.items())


def same(found, expected):
    assert list(found) == list(expected)
    for site, value in expected.items():
        assert torch.equal(found[site], value) if value is not None else found[site] is None
    return True


class Logged(TorchFunctionMode):
    """A mode that sees each function, and leaves it alone."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """A mode that sees each operation, and leaves it alone."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
    "deterministic": deterministic,
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(), lambda tensor: tensor
    ),
    "default device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "function mode": Logged,
    "dispatch mode": Dispatched,
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.cell(
    "anomaly mode, deterministic algorithms, hooks on saved tensors, default device and"
    " dtype, `TorchFunctionMode`, `TorchDispatchMode`",
    "record", "gradients", "statistics", "edit", "edit gradients", "raw hooks", "features", "watch",
    "clip",
)  # fmt: skip
@pytest.mark.parametrize("name", MODES)
def test_what_is_seen_and_changed_is_the_same_in_the_mode(name, model, left_as_found):
    def actions():
        found = [recorded(model), recorded(model, copy=True), recorded(model, keep=torch.sum)]
        file, given = io.StringIO(), []
        changes = [
            hl.edits.scale(1 / 3), hl.edits.add(0.1), hl.edits.replace(0.7), hl.edits.clamp(0, 1),
            hl.edits.noise(0.1, seed=3),
        ]  # fmt: skip
        for change in changes:
            with (
                hl.edit(model, "1", change),
                hl.edit(model, "2:grad_output", hl.edits.scale(1 / 3)),
            ):
                found.append(recorded(model))
        with hl.attach(model) as line, hl.watch(model, file=file):
            line.backward(
                "**", lambda module, grad_input, grad_output: given.append(grad_output[0])
            )
            recorded(model)
        with hl.clip(model, norm=0.01) as line:
            found.append(recorded(model))
        shown = "".join(part.split("  ")[0] for part in file.getvalue().splitlines())
        found.append({**dict(enumerate(given)), "features": hl.features(model, X, ["1"])["1"]})
        return found, shown, str(line.report())

    before = left_as_found(model)
    expected, shown, report = actions()
    with MODES[name]():
        found, shown_there, report_there = actions()
    model.zero_grad()
    for one, other in zip(found, expected, strict=True):
        assert same(one, other)
    assert (shown_there, report_there) == (shown, report)
    assert left_as_found(model) == before


def step(model):
    out = model(ROWS)
    out.square().sum().backward()
    return [out]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.cell(
    "anomaly mode, deterministic algorithms, hooks on saved tensors, default device and"
    " dtype, `TorchFunctionMode`, `TorchDispatchMode`",
    "record", "gradients", "statistics", "edit", "edit gradients", "patch", "raw hooks", "features",
    "watch", "clip",
)  # fmt: skip
@pytest.mark.parametrize("name", MODES)
def test_in_the_mode_all_is_as_under_torchs_hooks_without_it(name):
    def in_mode(model):
        with MODES[name]():
            return step(model)

    assert_values_are_torchs(rows_net, in_mode, "0", plain=(rows_net, step))
    for site in ("0:grad_output", "2:grad_input"):
        assert_gradients_are_torchs(rows_net, in_mode, site, plain=(rows_net, step))


def test_a_recording_is_opened_under_another_default_device(model, tmp_path):
    with hl.record(model, ports=("output", "grad")) as run:
        model(X).sum().backward()
    run.save(tmp_path / "run")
    with torch.device("meta"):
        opened = hl.open(tmp_path / "run")
        assert torch.equal(opened["1"], run["1"])
        assert str(opened.gradients()) == str(run.gradients())
        assert opened.stack("1").device.type == "cpu"


def test_tokens_are_edited_by_number_under_a_default_device():
    embed = torch.nn.Embedding(9, 4)
    ids = torch.tensor([[1, 2, 3], [4, 5, 0]])
    model = torch.nn.Sequential(embed)
    model.forward = lambda input_ids, attention_mask=None: embed(input_ids)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    with hl.edit(model, "0", hl.edits.scale(0), at=-1):
        plain = model(**inputs)
        with torch.device("meta"):
            assert torch.equal(model(**inputs), plain)
    assert plain[1, 1].eq(0).all()
    assert plain[1, 2].ne(0).all()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(X)


def test_stores_are_written_and_read_under_a_default_device(model, tmp_path):
    whole = hl.extract(model, X, "1", tmp_path / "whole")
    ids, embed = torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.nn.Embedding(9, 4)
    with torch.device("meta"):
        store = hl.extract(model, X, "1", tmp_path / "s")
        assert torch.equal(store["1"][:], whole["1"][:])
        assert sum(map(len, store.shuffled("1", batch_size=3))) == len(X)
        stream = hl.extract(model, Stream(), "1", tmp_path / "stream")
        assert torch.equal(stream["1"][:], whole["1"][:])
        tokens = hl.extract(embed, ids, "", tmp_path / "t", mask=lambda ids: ids != 0)
        assert tokens.tokens[:].tolist() == [1, 2, 3]
        assert tokens[""].padded([0, 1])[1].tolist() == [[True, True], [True, False]]
        with hl.record(model, "1", to=tmp_path / "loop") as line:
            model(X)
        assert len(line.store["1"]) == len(X)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("mode", ["default device", "default dtype"])
@pytest.mark.compiles
def test_compiled_code_meets_hooklines_numbers_on_any_default(mode, model):
    def actions(call):
        with hl.edit(model, "1", hl.edits.scale(1 / 3)):
            with hl.record(model, "1", ports=("output", "grad_output")) as run:
                call(X).sum().backward()
        return dict(run.items())

    torch.compiler.reset()
    expected = actions(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(X)
    with MODES[mode]():
        found = actions(compiled)
    assert list(found) == list(expected)
    for site in expected:
        torch.testing.assert_close(found[site], expected[site])
    torch.compiler.reset()


@pytest.mark.cell(
    "forward-mode AD", "record", "edit",
    note="Recorded values have no tangent. `hl.record(..., detach=False,"
    " keep=torch.autograd.forward_ad.unpack_dual)` records it, too.",
)  # fmt: skip
def test_dual_numbers_are_recorded_whole_where_that_is_asked_for(model):
    tangent = torch.ones_like(X)
    model.requires_grad_(False)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(X, tangent)
        expected = forward_ad.unpack_dual(model[0](x))
        with hl.record(model, "0", detach=False, keep=forward_ad.unpack_dual) as run:
            model(x)
        with hl.record(model, "0") as plain:
            model(x)
        with hl.edit(model, "0", hl.edits.scale(2.0)):
            edited = forward_ad.unpack_dual(model(x)).tangent
        twice = forward_ad.unpack_dual(model[1:](model[0](x) * 2)).tangent
    assert torch.equal(run["0"].primal, expected.primal)
    assert torch.equal(run["0"].tangent, expected.tangent)
    assert torch.equal(plain["0"], expected.primal)
    assert torch.equal(edited, twice)


def test_raw_backward_hooks_on_several_dual_numbers_are_refused():
    model = nn.Bilinear(2, 2, 1)
    a = torch.ones(1, 2, requires_grad=True)
    with hl.attach(model) as line, forward_ad.dual_level():
        line.backward("", lambda *_: None)
        dual = forward_ad.make_dual(a, torch.ones(1, 2))
        with pytest.raises(hl.AttachError, match="several tensors, and in forward-mode AD"):
            model(dual, a * 2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_still_finds_a_nan_behind_a_line(model):
    with torch.autograd.detect_anomaly(), hl.record(model, ports=PORTS) as run:
        y = model(X.clone().requires_grad_())
        with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
            (y * 0).sqrt().mul(0).sum().backward()
    assert run["2"].shape == (3, 2)


def test_deterministic_algorithms_still_refuse_inside_a_model(model):
    class Random(nn.Module):
        def forward(self, x):
            out = x.new_zeros(4)
            return out.put_(torch.tensor([0, 0]), x[:2], accumulate=False)

    whole = nn.Sequential(Random())
    with deterministic(), hl.record(whole, "0"), pytest.raises(RuntimeError, match="put_ does not"):
        whole(torch.ones(4))


def test_a_mode_that_counts_functions_sees_the_models_in_order(model):
    with Logged() as alone:
        model(X)
    with hl.record(model), Logged() as mode:
        model(X)
    ours = [function for function in mode.seen if function in alone.seen]
    assert ours == alone.seen
