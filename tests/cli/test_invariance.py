"""`hookline invariance`: exit codes and JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hookline.cli.app import app

NETS = """
from torch import nn

class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)

def clean():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()

def faulty():
    return nn.Sequential(nn.Linear(8, 8), Centred()).eval()
"""


@pytest.fixture
def invariance(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)

    def run(name, *words):
        model = f"{tmp_path / 'nets.py'}:{name}"
        return CliRunner().invoke(app, ["invariance", model, "random:4x8", *words])

    return run


def test_the_exit_code_tells_whether_the_checks_hold(invariance):
    checks = ["--only", "twice", "--only", "alone"]
    assert invariance("clean", *checks).exit_code == 0
    faulty = invariance("faulty", *checks)
    assert faulty.exit_code == 1
    assert "rows see each other" in " ".join(faulty.stdout.split())
    assert invariance("faulty", "--only", "order").exit_code == 2


def test_json_holds_the_rows(invariance):
    data = json.loads(invariance("faulty", "--only", "alone", "--json").stdout)
    assert (data["ok"], data["rows"][0]["suspect"]) == (False, "1")
    assert data["input"].startswith("random, 4x8")
