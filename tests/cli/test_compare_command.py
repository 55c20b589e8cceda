"""`hookline compare`: exit codes, JSON, and lines for annotations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from page_data import data_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of the same net: float32, float64, another GELU, other names."""
    place = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    other = nn.Sequential(net[0], nn.GELU("tanh"), net[2])
    x = torch.randn(4, 8)
    named = nn.Sequential()
    named.add_module("body", net)
    runs = {"a": (net, x), "b": (other, x), "named": (named, x)}
    for name, (model, value) in runs.items():
        with hl.record(model, ["**", ":input"]) as run:
            model(value)
        run.save(place / name)
    with hl.record(net.double(), ["**", ":input"]) as run:
        net(x.double())
    run.save(place / "wide")
    return place


def compare(folders, *words):
    places = [str(folders / word) if (folders / word).exists() else word for word in words]
    return CliRunner().invoke(app, ["compare", *places])


def test_the_exit_code_is_one_beyond_noise(folders):
    equal = compare(folders, "a", "a")
    assert (equal.exit_code, equal.output.split(":")[0]) == (0, "5 sites")
    other = compare(folders, "b", "a")
    assert other.exit_code == 1
    assert "first beyond noise: 1 (relative" in other.output
    assert compare(folders, "a", "a", "--floor", "wide").exit_code == 0
    assert compare(folders, "wide", "a").exit_code == 0


def test_out_writes_a_page_that_holds_the_json(folders, tmp_path):
    done = compare(folders, "b", "a", "--out", str(tmp_path / "page"))
    assert done.exit_code == 1
    assert f"written: {tmp_path / 'page' / 'report.html'}" in done.output.replace("\n", "")
    text = (tmp_path / "page" / "report.html").read_text()
    shown = data_of(text)
    data = json.loads(compare(folders, "b", "a", "--json").stdout)
    assert {name: shown[name] for name in data} == data


def test_a_page_that_cannot_be_written_keeps_the_result(folders, tmp_path):
    (tmp_path / "file").touch()
    done = compare(folders, "a", "a", "--out", str(tmp_path / "file" / "page.html"))
    assert done.exit_code == 2
    assert done.stdout.startswith("5 sites: ")
    assert "its folder is a file" in done.stderr


def test_json_and_annotations_hold_a_line_for_each_site(folders):
    data = json.loads(compare(folders, "b", "a", "--json").stdout)
    assert data["suspect"] == "1"
    lines = compare(folders, "b", "a", "--annotations").stdout.splitlines()
    assert lines[0].startswith("::notice title=hookline compare::structure")
    errors = [line for line in lines if line.startswith("::error title=hookline compare::")]
    assert len(errors) == data["counts"]["differs"]
    assert "::1 differs: relative" in errors[0]


def test_names_are_mapped_and_mistakes_have_exit_code_two(folders):
    mapped = compare(folders, "a", "named", "--names", "body.0=0", "--names", "body.1=1",
                     "--names", "body.2=2")  # fmt: skip
    assert mapped.exit_code == 0
    assert compare(folders, "a", "named", "--names", "body").exit_code == 2
    assert compare(folders, "a", "nowhere").exit_code == 2


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """Runs of one sequence, alone and padded, without inputs; and files of these."""
    place = tmp_path_factory.mktemp("padded")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6))
    inputs = {
        "alone": {"input_ids": torch.tensor([[5, 6, 7]])},
        "left": {
            "input_ids": torch.tensor([[0, 5, 6, 7]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1]]),
        },
    }
    for name, given in inputs.items():
        with hl.record(net, "**") as run:
            net(given["input_ids"])
        run.save(place / name)
        save_file(given, place / f"{name}.safetensors")
    torch.save([inputs["alone"], inputs["alone"]], place / "two.pt")
    (place / "words.txt").write_text("a text\n")
    np.savez(place / "left.npz", **{name: array.numpy() for name, array in inputs["left"].items()})
    return place


def test_files_of_inputs_tell_the_tokens(padded):
    as_they_are = compare(padded, "alone", "left")
    assert (as_they_are.exit_code, "shapes" in as_they_are.output) == (1, True)
    for left in ("left.safetensors", "left.npz"):
        both = compare(padded, "alone", "left", "--tokens", "alone.safetensors", "--tokens", left)
        assert (both.exit_code, "3 sites" in both.output) == (0, True)
    assert compare(padded, "left", "left", "--tokens", "left.npz").exit_code == 0
    assert compare(padded, "left", "left", "--tokens", "none").exit_code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tokens", "rows"], "must be auto, none, or a file of inputs for both or for each, got"),
        (["--tokens", "left.npz"] * 3, "got 3 files"),
        (["--tokens", "words.txt"], "must be a file of tensors by name (.npz, .npy, .safetensors,"),
        (["--tokens", "two.pt"], "tokens must have a dict for each of 1 passes, got 2"),
        (["--dims", "rows"], "must be DIM or SITES=DIM with a dimension, sum, mean, max or min"),
        (["--dims", "0", "--dims", "**=1"], "must be one DIM for all, or SITES=DIM each time"),
        (["--dims", "0"], "dims must be left out where a and b are of one process"),
    ],
)
def test_malformed_options_say_the_form(padded, words, why):
    result = compare(padded, "alone", "alone", *words)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
