"""A recording notes the settings of torch of each pass, and keeps them in its folder."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.run_settings import Settings, ignores_mode
from hookline.files.sealed_json import seal_json

X = torch.ones(4, 3)


@pytest.fixture
def net():
    inner = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    return nn.Sequential(nn.Linear(3, 3), inner, nn.Linear(3, 2)).eval()


def settings_from(net):
    with hl.record(net) as run:
        net(X)
    return run.passes[0].settings


def test_modules_are_listed_where_their_mode_differs(net):
    assert settings_from(net).training == {"": False}
    net[1].train()
    settings = settings_from(net)
    assert settings.training == {"": False, "1": True}
    modes = [settings.is_training(path) for path in ("", "0", "1", "1.0", "2")]
    assert modes == [False, False, True, True, False]


def test_each_pass_has_its_own_and_equal_ones_are_one(net):
    with hl.record(net, "0") as run:
        net(X)
        net(X)
        net.train()
        with torch.inference_mode():
            net(X)
        net[0](X)
    first, second, third, outside = (record.settings for record in run.passes)
    assert first == second
    assert run._log.passes[0].settings is run._log.passes[1].settings
    assert (first.training, first.grad) == ({"": False}, "on")
    assert (third.training, third.grad) == ({"": True}, "inference")
    assert outside is None


def test_autocast_gradients_seed_and_flags_are_noted(net):
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    backend = torch.backends.mkldnn.matmul
    before = backend.fp32_precision
    backend.fp32_precision = "bf16"
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            settings = settings_from(net)
    finally:
        torch.use_deterministic_algorithms(False)
        backend.fp32_precision = before
    assert (settings.seed, settings.grad, settings.deterministic) == (7, "off", True)
    assert settings.autocast == {"cpu": "bfloat16"}
    assert settings.precision["CPU products"] == "bf16"
    assert settings.precision["CUDA products"] == "ieee"


def test_a_frozen_script_module_has_no_mode():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.inner = torch.jit.freeze(torch.jit.script(nn.Linear(3, 3).eval()))

        def forward(self, x):
            return self.inner(self.fc(x))

    outer = Outer()
    with hl.record(outer, "fc") as run:
        outer(X)
    assert run.passes[0].settings.training == {"": True, "inner": False}


def test_settings_come_back_from_the_folder_and_pickles(net, tmp_path):
    with hl.record(net) as run:
        net(X)
        net.train()(X)
    opened = hl.open(run.save(tmp_path / "run"))
    for other in (opened, pickle.loads(pickle.dumps(run))):
        mine = [record.settings for record in run.passes]
        assert [record.settings for record in other.passes] == mine
    assert hl.open(opened.save(tmp_path / "again")).passes[1].settings.training == {"": True}


def test_a_folder_without_settings_still_opens(net, tmp_path):
    with hl.record(net) as run:
        net(X)
    folder = run.save(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["settings"], manifest["passes"][0]["settings"]
    (folder / "manifest.json").write_bytes(seal_json({**manifest, "checksum": "0" * 16}))
    opened = hl.open(folder)
    assert opened.passes[0].settings is None
    assert hl.compare(opened, run).ok


def test_damaged_settings_are_refused(net, tmp_path):
    with hl.record(net) as run:
        net(X)
    folder = run.save(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["settings"] = [{"training": 1}]
    (folder / "manifest.json").write_bytes(seal_json({**manifest, "checksum": "0" * 16}))
    with pytest.raises(hl.FolderError, match="is damaged"):
        hl.open(folder)


def test_settings_are_plain_data():
    settings = Settings({"": True}, {"cuda": "float16"}, "on", 2**63, {"CPU products": "x"}, False)
    assert Settings.from_json(json.loads(json.dumps(settings.as_json()))) == settings


@pytest.mark.parametrize(
    ("name", "ignores"),
    [("Linear", True), ("GELU", True), ("Dropout", False), ("BatchNorm2d", False), ("Own", False)],
)
def test_kinds_of_torch_that_ignore_the_mode_are_known(name, ignores):
    assert ignores_mode(name) is ignores
