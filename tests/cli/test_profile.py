"""`hookline profile`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hookline.cli.app import app
from page_data import data_of


def run(*arguments):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


@pytest.mark.slow
def test_it_prints_the_modules_and_writes_the_files(tmp_path):
    trace, page = tmp_path / "trace.json", tmp_path / "profile.html"
    done = run("demo:digits", "demo", "--backward", "--trace", trace, "--out", page)
    assert done.exit_code == 0, done.output
    assert "block1" in done.output
    assert "Backward" in done.output
    assert "Median of a pass" in done.output
    assert "5 passes" in done.output
    assert json.loads(trace.read_text())["traceEvents"]
    assert data_of(page.read_text())["tables"][0]["rows"]["path"][0] == ""


def test_forward_alone_has_no_backward_and_depth_folds():
    done = run("demo:digits", "demo", "--steps", 1, "--depth", 0)
    assert done.exit_code == 0, done.output
    assert "Backward" not in done.output
    assert "DigitsNet" in done.output
    assert "block1" not in done.output
    assert "1 pass" in done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def forward(self, x): raise ValueError('too bad')", "ValueError: too bad"),
        ("def forward(self, x): return x.detach()", "must be one that requires a gradient"),
    ],
)
def test_a_model_that_fails_is_named(tmp_path, text, said):
    path = tmp_path / "net.py"
    path.write_text(f"from torch import nn\nclass Net(nn.Linear):\n    {text}\n"
                    "def make():\n    return Net(2, 2)\n")  # fmt: skip
    done = run(f"{path}:make", "random:1x2", "--backward")
    assert done.exit_code != 0
    assert said in " ".join(done.output.split()) + done.stderr
