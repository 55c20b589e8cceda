"""`hookline anatomy`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from hookline.cli.app import app

CODE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
"""


def run(*arguments):
    return CliRunner().invoke(app, ["anatomy", *arguments])


@pytest.fixture
def name(tmp_path):
    file = tmp_path / "nets.py"
    file.write_text(CODE)
    return f"{file}:make"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fast path")
def test_it_prints_the_proven_names_and_gives_json(name):
    done = run(name, "random:2x5x8")
    assert done.exit_code == 0, done.output
    assert "resid_post" in done.output
    names = json.loads(run(name, "random:2x5x8", "--json").output)["parts"]
    assert {"resid_pre", "attn_out", "mlp_out", "resid_post"} <= {part["name"] for part in names}


def test_a_model_that_is_no_transformer_is_refused():
    done = run("demo:digits", "demo")
    assert done.exit_code == 2
    assert "must have a residual stream" in done.output


def test_a_model_without_an_embedding_needs_an_input(name):
    done = run(name)
    assert done.exit_code == 2
    assert "must be given an input" in done.output
