"""`hl.compare`: what can be compared, what is said first, and what is refused."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import hookline as hl
from hookline.verbs.compare import prefetch
from hookline.verbs.compare.read_sides import read_side
from ported_transformer import IDS, net, run_of


def kinds(comparison):
    return [finding.kind for finding in comparison.findings]


def text_of(comparison, kind):
    return [finding.text for finding in comparison.findings if finding.kind == kind]


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))


def test_weights_of_one_live_model_are_not_read(mlp, monkeypatch):
    twin = copy.deepcopy(mlp)
    a, b, other = run_of(mlp, X), run_of(mlp, X), run_of(twin, X)
    read = []
    monkeypatch.setattr("hookline.recordings.recording.recorded_model", read.append)
    assert hl.compare(a, b).ok
    assert not read
    assert hl.compare(a, other).ok
    assert read == [mlp, twin]


def test_equal_runs_are_identical_and_nothing_is_said(mlp):
    comparison = hl.compare(run_of(mlp, X), run_of(mlp, X))
    assert comparison.ok
    assert set(comparison.counts.items()) >= {("identical", 8), ("differs", 0)}
    assert comparison.findings == []
    assert comparison.suspect is comparison.first is None


def test_the_inputs_are_told_before_a_layer(mlp):
    comparison = hl.compare(run_of(mlp, X + 1), run_of(mlp, X))
    assert comparison.first.site == "(root):input"
    assert comparison.suspect is None
    assert kinds(comparison)[0] == "inputs"
    assert "the inputs differ: (root):input (relative" in comparison.findings[0].text


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, mask=None, position_ids=None):
        return self.fc(x if mask is None else x * mask)


def test_an_argument_on_one_side_alone_is_named():
    model = Masked()
    mask = torch.ones(4, 8)
    plain, masked = (run_of(model, X, **given) for given in ({}, {"mask": mask}))
    comparison = hl.compare(plain, masked)
    assert text_of(comparison, "inputs") == ["the inputs differ: (root):input.mask (only in b)"]
    assert not comparison.ok
    other = run_of(model, X, mask=mask, position_ids=torch.arange(8))
    assert "position_ids (only in a)" in text_of(hl.compare(other, masked), "inputs")[0]


def test_inputs_that_were_not_recorded_are_asked_for(mlp):
    runs = []
    for _ in range(2):
        with hl.record(mlp) as run:
            mlp(X)
        runs.append(run)
    (text,) = text_of(hl.compare(*runs), "inputs")
    assert 'hl.record(model, ["**", "(root):input"])' in text
    with hl.record(mlp, ["**", "(root):input"]) as again:
        mlp(X)
    assert hl.compare(again, again).findings == []


def test_weights_structure_and_versions_are_told(mlp, monkeypatch, tmp_path):
    port = copy.deepcopy(mlp)
    with torch.no_grad():
        port[2].weight += 1
    run = run_of(mlp, X)
    comparison = hl.compare(run_of(port, X), run)
    (text,) = text_of(comparison, "model")
    assert text.startswith("weights of the model differ: compare two state dicts")
    port[1] = nn.GELU("tanh")
    (text,) = text_of(hl.compare(run_of(port, X), run), "model")
    assert text == (
        "structure and weights of the model differ: 1 is GELU(approximate='tanh') in a, and"
        " GELU(approximate='none') in b, and compare two state dicts to see which"
    )
    run_of(port, X).save(tmp_path / "port")  # a folder knows its modules' arguments, too
    assert text_of(hl.compare(tmp_path / "port", run), "model") == [text]
    port[1] = nn.Tanh()
    (text,) = text_of(hl.compare(run_of(port, X), run), "model")
    assert "differ: 1 is Tanh in a, and GELU in b, and compare" in text
    other = hl.compare(run_of(nn.Sequential(*port, nn.Identity()), X), run)
    assert "only in a: 3:input, 3" in text_of(other, "names")[0]


def test_a_model_that_is_gone_is_said_not_to_be_compared(mlp):
    def ported(step):
        port = copy.deepcopy(mlp)
        port[2].weight.data += step
        return run_of(port, X)

    (text,) = text_of(hl.compare(ported(1.0), run_of(mlp, X)), "model")
    assert text.startswith("the model of a no longer exists, so structure and weights were not")
    (text,) = text_of(hl.compare(ported(1.0), ported(0.0)), "model")
    assert text.startswith("the models of a and b no longer exist, so")
    assert text_of(hl.compare(ported(0.0), run_of(mlp, X)), "model") == []  # all values are equal


def test_a_module_is_told_from_what_feeds_it(mlp):
    class Port(nn.Sequential):
        def forward(self, x):
            return self[2](self[1](self[0](x)) * 1.1)

    port = Port(*copy.deepcopy(mlp))
    run = run_of(mlp, X)
    comparison = hl.compare(run_of(port, X), run)
    assert (comparison.first.site, comparison.suspect) == ("2:input", "")
    assert "made in the forward of (root)" in comparison.findings[-1].text
    outputs = hl.compare(run_of(port, X, ports="output"), run_of(mlp, X, ports="output"))
    assert (outputs.first.site, outputs.suspect) == ("2", "2")
    assert 'record ports=("input", "output")' in outputs.findings[-1].text


def test_gradients_are_compared_like_values(mlp):
    runs = []
    for factor in (1.0, 2.0):
        model = copy.deepcopy(mlp)
        with hl.record(model, ["**", ":input"], ports=("output", "grad_output", "grad")) as run:
            (model(X) * factor).sum().backward()
        runs.append(run)
    comparison = hl.compare(*runs)
    assert comparison.first.site == "(root):grad_output"
    assert comparison["2"].verdict == "identical"
    assert comparison["0.weight:grad"].norm_ratio == pytest.approx(0.5)
    assert comparison.suspect is None
    without = hl.compare(runs[0], run_of(mlp, X, ports="output"))
    (text,) = text_of(without, "names")
    assert "b has no gradients there" in text
    assert 'ports=("output", "grad_output")' in text


def test_checkpoints_are_compared_as_they_are_rounded(mlp):
    weights = mlp.state_dict()
    assert hl.compare(copy.deepcopy(mlp).bfloat16().state_dict(), weights).ok
    trained = {name: value + 1e-6 * value.abs().max() for name, value in weights.items()}
    assert not hl.compare(trained, weights).ok
    up = torch.tensor(math.inf)
    assert hl.compare({name: value.nextafter(up) for name, value in weights.items()}, weights).ok
    assert "inputs" not in kinds(hl.compare(trained, weights))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.fc(x))


def test_arrays_have_the_names_of_sites():
    model, x = Twice(), torch.randn(3, 4)
    with hl.record(model, ports=("input", "output", "grad_output", "grad")) as run:
        for _ in range(2):
            model(x).sum().backward()
    arrays = {entry.key: entry.read() for entry in read_side(run, "a").entries}
    assert {"(root):input#pass0", "fc:input#1#pass1", "fc.weight:grad#pass0"} <= arrays.keys()
    backward = dict(reversed(arrays.items()))
    for sides in ((run, arrays), (arrays, run), (backward, run)):
        comparison = hl.compare(*sides)
        assert comparison.counts["identical"] == len(arrays) == 22
        assert not comparison.findings
        assert [row.site for row in comparison] == list(arrays)
    backward["fc#0#pass0"] = backward["fc:input#1#pass0"] = arrays["fc#0#pass0"] * 1.1
    assert hl.compare(backward, run).suspect == "fc"
    renamed = {key.replace("fc", "lin"): value for key, value in backward.items()}
    comparison = hl.compare(run, renamed, names={"lin": "fc"})
    assert comparison.counts["identical"] == 20
    arrays["(root):input#pass0"] = x + 1
    assert "the inputs differ" in hl.compare(arrays, run).findings[0].text


class WithColon(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("a:input", nn.Linear(4, 4))

    def forward(self, x):
        return self.get_submodule("a:input")(x)


def test_names_with_colons_may_be_those_of_modules():
    model, x = WithColon(), torch.randn(3, 4)
    with hl.record(model) as run:
        output = model(x)
    assert hl.compare(run, {"a:input": output}).counts["identical"] == 1
    assert hl.compare(run, {"b:input": output}, names={"b:input": "a:input"}).ok
    assert hl.compare(run, {"?": output, "x:y": output}, names={"?": "a:input"}).ok


@pytest.mark.parametrize("kind", ["dict", "safetensors", "pt", "wrapped", "of a module", "npz"])
def test_weights_of_any_name_and_file_are_rounded_once(tmp_path, kind):
    torch.manual_seed(0)
    lstm = nn.LSTM(8, 8, 2)
    sides = []
    for number, error in enumerate((0.05, 0.0)):
        states = {
            name: (value + error * value * torch.randn_like(value)).bfloat16()
            for name, value in lstm.state_dict().items()
        }
        place = tmp_path / f"{number}.{kind if kind in ('safetensors', 'npz') else 'pt'}"
        if kind == "safetensors":
            save_file(states, place)
        elif kind == "npz":
            np.savez(
                place, **{name: value.float().half().numpy() for name, value in states.items()}
            )
        else:
            torch.save({"model": states} if kind == "wrapped" else states, place)
        if kind == "of a module":
            torch.save(nn.ParameterDict({"scale": states["weight_hh_l0"]}).state_dict(), place)
        sides.append(states if kind == "dict" else place)
    comparison = hl.compare(*sides)
    odd = [row.site for row in comparison if row.verdict == "noise"]
    assert not odd
    assert not comparison.ok
    assert hl.compare(sides[0], sides[0]).ok


def test_files_of_arrays_and_other_frameworks(mlp, tmp_path):
    weights = mlp.state_dict()
    save_file(weights, tmp_path / "a.safetensors")
    np.savez(tmp_path / "b.npz", **{name: value.numpy() for name, value in weights.items()})
    torch.save({"state_dict": weights}, tmp_path / "c.pt")
    np.save(tmp_path / "d.npy", X.numpy())
    sides = [weights, *(tmp_path / name for name in ("a.safetensors", "b.npz", "c.pt"))]
    for side in sides:
        assert hl.compare(side, weights).counts["identical"] == 4
        assert hl.compare(weights, str(side) if side is not weights else side).ok
    assert hl.compare(tmp_path / "d.npy", tmp_path / "d.npy").ok

    class Array:  # as of JAX: neither a tensor nor of NumPy
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return self.values

    assert hl.compare({"x": Array(X.numpy())}, {"x": X}).ok
    assert not hl.compare({"x": np.ones(3)}, {"x": np.zeros(3)}).ok
    assert hl.compare({"loss": 0.5, "x": [X]}, {"loss": 0.5, "x": [X]}).counts["identical"] == 2


def test_nested_lists_as_of_json_are_arrays():
    rows = [[1, 2.5], [3, 4]]
    comparison = hl.compare({"a": rows, "b": [[1], [2, 3]]}, {"a": torch.tensor(rows).double()})
    assert comparison["a"].form == "[2, 2] float64"
    assert comparison.counts["identical"] == 1
    assert hl.compare({"a": rows}, {"a": torch.zeros(2, 2)}).first.site == "a"


def test_a_recording_is_compared_with_the_arrays_of_its_sites(mlp):
    run = run_of(mlp, X, ports="output")
    arrays = {key: run[key].numpy() for key in ("(root)", "0", "1", "2")}
    comparison = hl.compare(run, arrays)
    assert comparison.counts["identical"] == 4
    assert hl.compare(arrays, run).rows[-1].site == "(root)"


def test_folders_stores_and_curves(mlp, tmp_path):
    run = run_of(mlp, X)
    run.save(tmp_path / "run")
    assert hl.compare(tmp_path / "run", run).counts["identical"] == 8
    stores = []
    for number in range(2):
        model = copy.deepcopy(mlp)
        with torch.no_grad():
            model[2].weight.mul_(1 + number)
        hl.extract(model, torch.cat([X, X]), ["0", "2"], tmp_path / f"store{number}")
        stores.append(hl.open(tmp_path / f"store{number}"))
    comparison = hl.compare(*stores)
    assert comparison["0"].verdict == "identical"
    assert comparison.first.site == "2"
    assert hl.compare(stores[0], stores[0]).ok
    curves = []
    for steps in (3, 5):
        with hl.monitor(mlp, "0", ports="output") as seen:
            for step in range(steps):
                mlp(X * (1 + step))
        curves.append(seen)
    assert hl.compare(*curves)["0/std"].verdict == "identical"
    assert hl.compare(*curves)["0/std"].form == "3 steps"


def test_passes_and_calls_are_compared_one_by_one(mlp):
    runs = []
    for last in (0.0, 1.0):
        with hl.record(mlp, ["**", ":input"]) as run:
            for shift in (0.0, last):
                mlp(X + shift)
        runs.append(run)
    comparison = hl.compare(*runs)
    assert comparison["2#pass0"].verdict == "identical"
    assert comparison.first.site == "(root):input#pass1"
    first, second = (run.passes[0] for run in runs)
    assert hl.compare(first, second).ok
    relu = nn.ReLU()
    looped = nn.Sequential(relu, nn.Linear(8, 8), relu)
    run = run_of(looped, X)
    calls = [row.site for row in hl.compare(run, run) if row.site.startswith("0#")]
    assert calls == ["0#0", "0#1"]


def test_names_are_mapped_by_a_function_or_a_dict(mlp):
    port = nn.ModuleDict({"up": mlp[0], "act": mlp[1], "down": mlp[2]})
    port.forward = lambda x: port["down"](port["act"](port["up"](x)))
    ours, theirs = run_of(mlp, X), run_of(port, X)
    table = {"up": "0", "act": "1", "down": "2"}
    for names in (table, lambda path: table.get(path, path)):
        comparison = hl.compare(ours, theirs, names=names)
        assert comparison.counts["identical"] == 8
        assert comparison["1"].other == "act"


def test_a_model_compares_with_the_module_that_wraps_it(mlp):
    wrapped = nn.ModuleDict({"body": mlp})
    wrapped.forward = lambda x: wrapped["body"](2 * x) + 1
    whole, alone = run_of(wrapped, X), run_of(mlp, 2 * X)
    for root in ("", "(root)"):
        for comparison in (
            hl.compare(whole, alone, names={root: "body"}),
            hl.compare(alone, whole, names={"body": root}),
        ):
            assert comparison.counts["identical"] == len(comparison) == 8
            assert "inputs" not in {finding.kind for finding in comparison.findings}
            assert "(root)" in comparison.findings[-1].text  # it is on one side only


@pytest.mark.slow
def test_a_measured_floor_is_narrower_than_that_of_the_dtype():
    model = net()
    run, exact = run_of(model), run_of(copy.deepcopy(model).double())
    floor = hl.compare(run, exact)
    port = copy.deepcopy(model)
    with torch.no_grad():
        port.blocks[1].mlp.up.bias += 1e-6
    assert hl.compare(run_of(port), run).ok
    assert hl.compare(run_of(port), run, floor=floor).suspect.startswith("blocks.1.mlp.")
    assert hl.compare(run, run, floor=floor).ok


def test_what_changed_after_it_was_recorded_is_not_comparable():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
    with hl.record(model, "**") as run:
        model(X)
    comparison = hl.compare(run, run)
    assert comparison["0"].verdict == "not comparable"
    assert "copy=True" in comparison["0"].why
    assert not comparison.ok


def test_other_shapes_dtypes_and_structures_are_said(mlp):
    small = hl.compare(run_of(mlp, X[:2]), run_of(mlp, X), tokens=None)
    assert small["0"].verdict == "not comparable"
    assert small["0"].why == "shapes [2, 8] and [4, 8]"
    assert "8 values not comparable, other shapes" in text_of(small, "values")[0]
    assert small.first is None
    assert not small.ok
    half = hl.compare(run_of(copy.deepcopy(mlp).half(), X.half()), run_of(mlp, X))
    assert text_of(half, "dtypes") == ["8 values float16 in a and float32 in b"]
    masks = hl.compare({"mask": torch.ones(3, dtype=torch.bool)}, {"mask": torch.ones(3)})
    assert masks["mask"].why == "dtypes bool and float32"
    parts = hl.compare({"x": (X, X)}, {"x": (X,)})
    assert [row.site for row in parts] == ["x:output[0]"]
    assert "1 value only in a: x:output[1]" in text_of(parts, "names")
    assert hl.compare({"x": (X, None)}, {"x": X})["x:output[0]"].verdict == "identical"


def test_what_could_not_be_compared_before_the_suspect_is_told():
    runs = []
    for n_hidden, factor in ((4, 1.0), (5, 2.0)):
        net = nn.Sequential(nn.Linear(3, n_hidden), nn.Flatten(), nn.AdaptiveAvgPool1d(2))
        with hl.record(net, copy=True) as run, torch.no_grad():
            net(factor * torch.ones(2, 3))
        runs.append(run)
    comparison = hl.compare(*runs)
    assert comparison.suspect == "2"
    (said,) = text_of(comparison, "site")
    assert said.endswith("; 2 values before it could not be compared")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_side_alone_differs(bad):
    a, b = ({"x": torch.tensor([number, 1.0])} for number in (bad, 1.0))
    for pair in ((a, b), (b, a)):
        (row,) = hl.compare(*pair)
        assert (row.verdict, row.why) == ("differs", "1 element NaN or infinite in one of the two")
    assert hl.compare(a, a).ok


def test_other_integers_are_never_noise():
    a, b = ({"ids": torch.tensor([number, 2])} for number in (2**60, 2**60 + 1))
    row = hl.compare(a, b)["ids"]
    assert (row.verdict, row.why) == ("differs", "1 of 2 integers not equal")
    assert hl.compare(a, a).ok


def test_the_models_and_recordings_are_left_as_they_were(mlp):
    run = run_of(mlp, X)
    before = {key: run[key].clone() for key in run}
    state = torch.get_rng_state()
    hl.compare(run, run_of(mlp, X))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(run[key], value) for key, value in before.items())


def refusals():
    x = {"layers.0.up": X}
    return {
        "a model": (nn.Linear(2, 2), x, {}, "a must be a recording.*got Linear.*hl.shadow"),
        "a number": (x, 3, {}, "b must be a recording"),
        "nothing": ({}, x, {}, "a must hold values, got none"),
        "names that are no texts": ({1: X}, x, {}, "keys of a must be names, got 1"),
        "nothing aligns": (x, {"blocks.0.up": X}, {}, r"names in common.*blocks.0.up.*\n.*names="),
        "no tensors": ({"x": "text"}, {"x": None}, {}, "must have numbers in common"),
        "names": (x, x, {"names": 3}, "names must be a function or a dict, got int"),
        "no name": (x, x, {"names": {}.get}, "names must return a name, got None"),
        "an unknown name": (x, x, {"names": {"h": "layers"}}, "keys that are names of b, got 'h'"),
        "an unknown value": (x, x, {"names": {"layers": "h"}}, "values that are names of a"),
        "two of one name": ({"a": X}, {"a": X, "b": X}, {"names": lambda _: "a"}, "apart"),
        "a floor": (x, x, {"floor": 1e-3}, "floor must be a Comparison, got float"),
    }  # fmt: skip


@pytest.mark.parametrize("case", list(refusals()))
def test_what_cannot_be_compared_is_refused(case):
    a, b, options, message = refusals()[case]
    with pytest.raises(hl.InputError, match=f"(?s){message}"):
        hl.compare(a, b, **options)


def test_several_passes_beside_one_are_refused(mlp):
    with hl.record(mlp, "**") as several:
        mlp(X)
        mlp(X)
    with hl.record(mlp, "**") as single:
        mlp(X)
    with pytest.raises(hl.InputError, match=r"got several in b alone.\nGive .* b.passes\[0\]"):
        hl.compare(single, several)
    assert hl.compare(single, several.passes[1]).ok


def test_two_kinds_and_missing_files_are_refused(mlp, tmp_path):
    with hl.monitor(mlp, ports="output") as seen:
        mlp(X)
    with pytest.raises(hl.InputError, match="same kind of thing, got a recording and curves"):
        hl.compare(run_of(mlp, X), seen)
    with pytest.raises(hl.FolderError):
        hl.compare(tmp_path / "nothing", {})
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(hl.InputError, match="must be a safetensors file"):
        hl.compare(tmp_path / "bad.safetensors", {"x": X})


def test_a_value_with_one_mask_alone_is_no_difference():
    assert hl.compare(run_of(net()), run_of(net(), IDS)).ok


def test_arrays_get_no_advice_for_recordings():
    (finding,) = hl.compare({"a": np.ones(3)}, {"a": np.zeros(3)}).findings
    assert finding.text == "first beyond noise: a (relative inf)"


@pytest.mark.compiles
@pytest.mark.parametrize("is_first", [True, False])
def test_a_compiled_run_is_told_in_the_order_of_the_eager_one(mlp, is_first):
    torch.compiler.reset()
    port = copy.deepcopy(mlp)
    with torch.no_grad():
        port[0].weight.mul_(1.01)
    compiled = run_of(torch.compile(port, backend="eager"), X)
    sides = compiled, run_of(mlp, X)
    comparison = hl.compare(*sides if is_first else sides[::-1])
    assert comparison.first.site == "0"
    assert comparison.rows[-1].site == "(root)"


# -- settings of torch ---------------------------------------------------------------------------


@pytest.fixture
def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


def test_training_mode_is_told_first_if_values_differ(normed):
    evaluated, trained = run_of(normed, X), run_of(normed.train(), X + 1)
    comparison = hl.compare(trained, evaluated)
    assert kinds(comparison)[:2] == ["modes", "inputs"]
    assert comparison.findings[0].text == "a ran in training mode, b in eval mode"
    back = hl.compare(evaluated, trained)
    assert back.findings[0].text == "b ran in training mode, a in eval mode"


def test_modules_in_another_mode_are_named_if_it_matters(normed):
    evaluated = run_of(normed, X)
    normed[1].train()
    normed[2].train()
    text = text_of(hl.compare(run_of(normed, X), evaluated), "modes")
    assert text == ["in training mode in a, and in eval mode in b: 1"]
    normed[1].eval()
    assert text_of(hl.compare(run_of(normed, X + 1), evaluated), "modes") == []


def test_autocast_gradients_and_seeds_are_told(mlp):
    plain = run_of(mlp, X)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.float16):
        coarse = run_of(mlp, X * 2)
    with hl.record(mlp) as graphed:
        mlp(X * 2)
    comparison = hl.compare(coarse, plain)
    text = "autocast was float16 on cpu in a, and off in b"
    assert text_of(comparison, "modes") == [text]
    assert text_of(comparison, "seeds") == ["torch's seed was 5 in a, and 0 in b"]
    assert kinds(comparison)[0] == "modes"
    text = "gradients were on in a, and off in b"
    assert text_of(hl.compare(graphed, plain), "modes") == [text]
    assert hl.compare(run_of(mlp, X), plain).findings == []


# -- memory ---------------------------------------------------------------------------------------


def resident(name):
    """A size of this process in bytes: `VmRSS`, or its peak `VmHWM`."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(f"{name}:")[1].split()[0])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_memory_holds_a_few_values_of_many(tmp_path, monkeypatch):
    n_sites, size = 48, 2**19
    monkeypatch.setattr(prefetch, "_RELEASE_BYTES", 2**22)
    model = nn.Sequential(*(nn.Identity() for _ in range(n_sites)))
    for name, noise in (("a", 1e-6), ("b", 0.0)):
        with hl.record(model, "*", keep=lambda x, noise=noise: torch.randn(size) + noise) as run:
            model(torch.zeros(1))
        run.save(tmp_path / name)
    del run
    hl.compare(tmp_path / "a", tmp_path / "a")  # what is loaded at first use
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = resident("VmRSS")
    found = hl.compare(tmp_path / "a", tmp_path / "b")
    assert found.counts["differs"] == n_sites
    assert resident("VmHWM") - before < 16 * 4 * size  # of 96 values


def test_tensors_that_no_folder_holds_are_not_comparable(tmp_path):
    class Sparse(nn.Module):
        def forward(self, x):
            return x, x.to_sparse()

    model = Sparse()
    for name, x in (("a", torch.eye(2)), ("b", torch.eye(2))):
        with hl.record(model, "(root)") as run:
            model(x)
        run.save(tmp_path / name)
    for a in (run, hl.open(tmp_path / "a")):
        compared = hl.compare(a, hl.open(tmp_path / "b"))
        assert compared["(root):output[0]"].verdict == "identical"
        assert compared["(root):output[1]"].why == "not saved in its folder"
        assert not compared.ok
