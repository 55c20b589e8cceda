"""What identifies a model and a function: equal for equal ones, in another process, too."""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.model_fingerprint import (
    RecordedModel,
    _sample_blocks,
    function_identity,
    model_identity,
    recorded_model,
)
from thoroughness import tries
from warm import run_python


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def test_a_copy_is_the_same_model_and_a_changed_number_is_not():
    model = net()
    found = model_identity(model)
    assert found == model_identity(copy.deepcopy(model)) == model_identity(net())
    with torch.no_grad():
        model[0].bias[1] += 1e-6
    assert model_identity(model)["weights"] != found["weights"]
    assert model_identity(model)["structure"] == found["structure"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda model: model.add_module("2", nn.ReLU()), "structure"),
        (lambda model: model[1].running_mean.add_(1), "weights"),
        (lambda model: model.half(), "weights"),
    ],
)
def test_structure_buffers_and_dtypes_count(change, key):
    model = net()
    before = model_identity(model)
    change(model)
    assert model_identity(model)[key] != before[key]


def test_hooks_and_modes_do_not_count():
    model = net()
    before = model_identity(model)
    model.eval()
    model[0].register_forward_hook(lambda *_: None)
    model[0].weight.requires_grad_(False)
    assert model_identity(model) == before


def mean(value):
    return value.mean(1)


FUNCTIONS = {
    "none": None,
    "mean": mean,
    "lambda": lambda t: t.mean(1),
    "other dim": lambda t: t.mean(2),
    "default": lambda t, dim=1: t.mean(dim),
    "other default": lambda t, dim=2: t.mean(dim),
    "partial": functools.partial(torch.mean, dim=1),
    "other partial": functools.partial(torch.mean, dim=2),
    "torch": torch.relu,
    "module": nn.Linear(2, 2),
}


def closing_over(n):
    return lambda t: t[:n]


def test_functions_that_do_something_else_are_told_apart():
    found = [function_identity(function) for function in FUNCTIONS.values()]
    found += [function_identity(closing_over(n)) for n in (1, 2)]
    found += [function_identity(closing_over(torch.ones(n))) for n in (1, 2)]
    assert len(set(found)) == len(found)
    assert function_identity(closing_over(2)) == function_identity(closing_over(2))


def test_a_function_that_is_moved_into_another_stays_the_same():
    def outer():
        return lambda t: t.mean((2, 3))

    moved = lambda t: t.mean((2, 3))  # noqa: E731
    assert function_identity(moved) == function_identity(outer())


@pytest.mark.processes
def test_another_process_finds_the_same():
    code = (
        "from test_model_fingerprint import *;"
        " print([function_identity(f) for k, f in FUNCTIONS.items()"
        " if k != 'module'], model_identity(net()))"
    )
    here = Path(__file__).parent
    places = os.pathsep.join([str(here.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": places}  # of what this file imports
    # Each with another seed of hashes.
    found = [run_python("-c", code, cwd=here, env=env, of=("torch", k)).stdout for k in range(2)]
    assert found[0].startswith("[")
    assert found[0] == found[1]
    assert " at 0x" not in found[0]


_WITH_SETS = """
from hookline.engine.model_fingerprint import function_identity
names = {"alpha", "beta", "gamma", "delta"}
print(function_identity(lambda t: t if t in {"one", "two", "three", "four"} else t.sum()))
def closed(names):
    return lambda t: t in names
print(function_identity(closed(names)))
"""


def between(start, stop):
    return lambda t: t[:, start:stop]


def scaled(weight):
    return lambda t: t * weight


class Scaled:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, t):
        return t * self.weight

    def method(self, t):
        return t * self.weight


def long_array(at):
    return np.eye(1, 5000, at)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (between(1, 23), between(12, 3)),
        (lambda t: t[:, 1:12], lambda t: t[:, 11:2]),
        (lambda t: t[:, 1:2], lambda t: t[:, 1.0:2]),
        (scaled(long_array(2500)), scaled(long_array(2501))),
        (scaled({"w": torch.zeros(5000)}), scaled({"w": torch.from_numpy(long_array(2500))})),
        (scaled(torch.zeros(2, dtype=torch.int32)), scaled(torch.zeros(2))),
        (Scaled(1).method, Scaled(2).method),
        (Scaled(1), Scaled(2)),
        (hl.edits.scale(1), hl.edits.scale(2)),  # whose number lies in a slot
    ],
)
def test_functions_that_differ_have_different_identities(one, other):
    assert function_identity(one) != function_identity(other)


def test_objects_with_equal_attributes_are_the_same():
    assert function_identity(Scaled(1).method) == function_identity(Scaled(1).method)
    assert function_identity(Scaled(torch.ones(2))) == function_identity(Scaled(torch.ones(2)))


@pytest.mark.processes
def test_the_order_of_a_set_is_not_part_of_a_function():
    said = {
        run_python("-c", _WITH_SETS, of=("torch", seed)).stdout for seed in range(tries(3, gate=2))
    }
    assert said.pop()
    assert not said


def test_a_function_may_close_over_itself_and_over_nothing_yet():
    def again(t):
        return again(t[0]) if t.ndim > 3 else later(t)

    assert function_identity(again) == function_identity(again)
    later = torch.relu
    assert isinstance(function_identity(again), str)
    itself = Scaled(None)
    itself.weight = types.SimpleNamespace(of=itself)
    assert isinstance(function_identity(itself), str)


# -- code and attributes --------------------------------------------------------------------------


class Plain(nn.Module):
    limit = 3

    def __init__(self, scale=1.0):
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.scale = scale
        self.names = ["a", "b"]
        self._hidden = object()
        self.config = types.SimpleNamespace(scale=scale)

    def forward(self, x):
        return self.fc(x) * self.scale


class Child(Plain):
    @functools.cached_property
    def doubled(self):
        return self.scale * 2


def decorated(function):
    @functools.wraps(function)
    def call(*args):
        return function(*args)

    return call


def test_plain_attributes_are_texts_by_class_and_name():
    attributes = model_identity(nn.Sequential(Plain(1.0), Plain(1.0)))["attributes"]
    assert attributes["Plain.scale"] == "1.0"
    assert attributes["Plain.names"] == "['a', 'b']"
    assert attributes["Linear.in_features"] == "2"
    assert not {"Plain._hidden", "Plain.config", "Plain.training"} & set(attributes)
    first, second = (
        model_identity(nn.Sequential(Plain(1.0), Plain(scale)))["attributes"]["Plain.scale"]
        for scale in (2.0, 3.0)
    )
    assert first.startswith("fingerprint ")
    assert first != second


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("forward", lambda self, x: self.fc(x)),
        ("forward", decorated(lambda self, x: self.fc(x))),
        ("limit", 4),
        ("half", property(lambda self: self.scale / 2)),
        ("make", classmethod(lambda cls: cls())),
        ("helper", staticmethod(lambda x: x)),
    ],
)
def test_the_code_of_a_class_and_of_its_bases_counts(monkeypatch, name, member):
    before = model_identity(Child())["code"]
    assert set(before) == {"Child"}
    assert model_identity(Child())["code"] == before
    monkeypatch.setattr(Plain, name, member, raising=False)
    assert model_identity(Child())["code"] != before


def test_code_within_a_decorator_counts(monkeypatch):
    fingerprints = set()
    for function in (lambda self, x: self.fc(x), lambda self, x: self.fc(x) + 1):
        monkeypatch.setattr(Plain, "forward", decorated(function))
        fingerprints.add(model_identity(Plain())["code"]["Plain"])
    assert len(fingerprints) == 2


def test_the_classes_of_torch_have_no_code():
    assert model_identity(net())["code"] == {}


# -- the model of a recording or a run ------------------------------------------------------------


def test_a_recorded_model_has_one_fingerprint_of_all():
    recorded = recorded_model(Plain())
    assert recorded == RecordedModel.from_json(json.loads(json.dumps(recorded.as_json())))
    torch.manual_seed(1)
    others = [recorded_model(model) for model in (Plain(), Child(), nn.Linear(2, 2))]
    assert len({recorded.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert len(recorded.fingerprint) == 16
    assert RecordedModel.from_json(None) is None


def test_a_recorded_model_has_the_arguments_of_its_modules():
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.25))
    recorded = recorded_model(torch.compile(model, backend="eager"))
    assert recorded.modules == {
        "": "Sequential()",
        "0": "Linear(in_features=2, out_features=3, bias=True)",
        "1": "Dropout(p=0.25, inplace=False)",
    }
    row = recorded.as_json()
    assert RecordedModel.from_json(row).modules == recorded.modules
    del row["modules"]  # as hookline before 0.2.0 wrote it
    assert RecordedModel.from_json(row).modules == {}
    assert RecordedModel.from_json(row) == recorded


def test_versions_are_those_of_packages_in_use(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(__version__="9.9"))
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    versions = recorded_model(net()).versions
    assert versions["torch"] == str(torch.__version__)
    assert versions["timm"] == "9.9"
    assert {"hookline", "python"} < set(versions)
    assert "transformers" not in versions


def test_torchs_wrappers_around_a_model_do_not_count():
    model = net()
    wrapped = nn.DataParallel(model)
    assert recorded_model(wrapped) == recorded_model(model)


def test_a_sample_of_large_tensors_sees_both_ends():
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB
    seen = {model_identity(model, sampled=True)["weights"]}
    with torch.no_grad():
        for at in (0, 2**20 - 1):
            model.weight.view(-1)[at] += 1
            seen.add(model_identity(model, sampled=True)["weights"])
    assert len(seen) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int8, torch.bool])
def test_a_sample_has_so_many_bytes_in_any_dtype(dtype):
    tensor = torch.zeros(3 * 2**20, dtype=dtype)
    assert _sample_blocks(tensor).nbytes == 2**20
    assert _sample_blocks(tensor[: 2**17]).shape == tensor[: 2**17].shape


def test_lazy_and_meta_models_are_no_error():
    assert recorded_model(nn.LazyLinear(2)) is None
    assert isinstance(recorded_model(nn.Linear(2, 2, device="meta")), RecordedModel)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_buffer_counts_by_its_indices_and_values(layout):
    def weights_of(dense):
        model = nn.Linear(2, 2, bias=False)
        nn.init.ones_(model.weight)
        model.register_buffer("mask", dense.to_sparse(layout=layout))
        return model_identity(model)["weights"]

    eye = torch.eye(3)
    digests = {weights_of(dense) for dense in (eye, 2 * eye, eye.flip(0), eye.clone())}
    assert len(digests) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.GRUCell])
def test_weights_that_a_quantised_module_packs_count(kind):
    def weights_of(seed):
        torch.manual_seed(seed)
        layers = nn.Sequential(kind(4, 300))
        return model_identity(torch.ao.quantization.quantize_dynamic(layers, {kind}))["weights"]

    assert weights_of(0) == weights_of(0) != weights_of(1)


def test_each_number_of_a_quantised_tensor_counts():
    def weights_of(middle):
        model, numbers = nn.Module(), torch.zeros(3000)  # repr shows the first and last three
        numbers[1500] = middle
        model.register_buffer("w", torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8))
        return model_identity(model)["weights"]

    assert weights_of(1.0) == weights_of(1.0) != weights_of(2.0)
