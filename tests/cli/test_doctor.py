"""`hookline doctor`: output, JSON, exit codes, and the input that it guesses."""

from __future__ import annotations

import json
from contextlib import chdir
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hookline.cli.app import app
from hookline.data import guess_input
from hookline.models import load_model

MODELS = """
import torch
from torch import nn

class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.used(x)

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
    def forward(self, x):
        return x * self.scale

def tokens():
    return nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 2))
def series():
    return nn.Sequential(nn.Conv1d(2, 3, 3))
def volume():
    return nn.Sequential(nn.Conv3d(1, 1, 3))
def picky():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(9, 9))
"""


@pytest.fixture
def doctor(tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)

    def run(*args: str) -> SimpleNamespace:
        with chdir(tmp_path):
            result = CliRunner().invoke(app, ["doctor", *args])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return SimpleNamespace(code=result.exit_code, out=result.stdout, err=result.stderr)

    return run


def test_it_exits_0_where_every_site_fires(doctor):
    done = doctor("demo:digits", "--at", "block*", "--ports", "output,grad_output")
    assert done.code == 0
    assert done.out.startswith(
        "hl.doctor on DigitsNet: 6 sites, 6 fire, 0 never; ran forward and backward"
    )
    assert "input: eight digits, 8x1x8x8 float32 (a guess: give yours after the model)" in done.out
    assert done.err == ""


def test_it_exits_1_where_one_does_not(doctor):
    done = doctor("mine.py:Idle")
    assert done.code == 1
    assert "not reached: (root) ran and did not call it" in done.out
    assert doctor("mine.py:Idle", "--at", "used").code == 0


def test_sites_are_named_as_in_inspect(doctor):
    done = doctor("demo:digits", "demo", "--at", "block1", "--at", "head:input", "--json")
    assert done.code == 0
    assert [one["site"] for one in json.loads(done.out)["sites"]] == ["block1", "head:input"]
    assert doctor("demo:digits", "block*").code == 2  # an input stands there, as in inspect


def test_json_is_json_alone(doctor):
    done = doctor("mine.py:Idle", "random:2x4", "--json")
    assert done.code == 1
    data = json.loads(done.out)
    assert [one["verdict"] for one in data["sites"]] == ["fires", "fires", "never"]
    assert data["input"] == "random, 2x4 float32"
    assert data["environment"]["mode"] == "eval"


def test_without_an_input_that_can_be_guessed_nothing_is_known(doctor):
    done = doctor("mine.py:Odd")
    assert done.code == 1
    assert "unknown" in done.out
    assert "none could be guessed: give one, such as random:" in done.out
    assert doctor("mine.py:Odd", "random:3").code == 0


def test_its_table_advises_in_words_of_commands(doctor):
    done = doctor("mine.py:Odd", "--json")
    assert json.loads(done.out)["sites"][0]["remedy"] == "give some: hookline doctor MODEL INPUT"
    done = doctor("demo:digits", "--at", "block1@gelu")
    words = " ".join(done.out.split())
    assert "hookline operations MODEL INPUT block1 lists what it calls" in words
    assert "hl.operations" not in words


def test_a_failure_advises_in_words_of_commands(doctor, tmp_path):
    save_file({"x": torch.ones(3), "y": torch.ones(3)}, tmp_path / "two.safetensors")
    words = " ".join(doctor("mine.py:Odd", "two.safetensors").out.split())
    assert "Give one array, or a file of arrays by the names that it takes." in words


def test_a_forward_that_fails_exits_1_and_names_the_module(doctor):
    done = doctor("mine.py:picky")
    assert done.code == 1
    assert "1 (Linear), which got Tensor[1, 4]" in done.out
    assert "a guess" in done.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo:digits", "--at", "blok"], "Did you mean 'block"),
        (["demo:digits", "--ports", "output,outptu"], "got 'outptu'"),
        (["demo:digits", "no-such.png"], "no-such.png"),
        (["nothing"], "does not name a model"),
    ],
)
def test_what_can_be_mended_exits_2(doctor, args, said):
    done = doctor(*args)
    assert done.code == 2
    assert done.err.startswith("hookline: ")
    assert said in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("tokens", [1, 8], torch.int64),
        ("series", [1, 2, 224], torch.float32),
        ("volume", [1, 1, 56, 56, 56], torch.float32),
        ("Idle", [1, 4], torch.float32),
    ],
)
def test_an_input_is_guessed_from_the_first_layer(tmp_path, name, shape, dtype):
    (tmp_path / "mine.py").write_text(MODELS)
    loaded = load_model(f"{tmp_path}/mine.py:{name}")
    with torch.device("meta"):  # the input is on the CPU, where the model is
        batch = guess_input(loaded)
    assert list(batch.args[0].shape) == shape
    assert batch.args[0].dtype is dtype
    loaded.model(*batch.args)


def test_guessing_draws_nothing_from_the_callers_randomness(tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)
    loaded = load_model(f"{tmp_path}/mine.py:tokens")
    before = torch.get_rng_state()
    assert torch.equal(guess_input(loaded).args[0], guess_input(loaded).args[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
def test_a_librarys_model_of_pictures_gets_a_grey_one():
    loaded = load_model("timm:resnet10t", weights="none")
    batch = guess_input(loaded)
    assert batch.description.startswith("a grey picture, 1x3x176x176")
    assert loaded.model(*batch.args).shape == (1, 1000)
