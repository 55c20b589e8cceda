"""--json: one JSON document on stdout, and nothing else there."""

from __future__ import annotations

import json
import re

import pytest
import torch
import typer
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from package_source import SRC
from small_stores import write_store

FAILING = """
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        raise ValueError("too bad")
def make():
    return Net(2, 2)
"""

TALKING = """
from torch import nn
print("imported")
class Net(nn.Linear):
    def forward(self, x):
        print("ran")
        return super().forward(x)
def make():
    print("made")
    return Net(2, 2)
"""


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments), "--json"])


def commands_below(command, name=""):
    """Each command with its whole name."""
    parts = getattr(command, "commands", {})
    below = [each for part in parts for each in commands_below(parts[part], f"{name} {part}")]
    return below or [(name.strip(), command)]


def test_the_docs_list_the_commands_that_give_json():
    text = (SRC.parents[1] / "docs/command-line.md").read_text("utf-8")
    (sentence,) = re.findall(r"(.*) take the option `--json`", text)
    commands = commands_below(typer.main.get_command(app))
    have = [name for name, command in commands if "as_json" in {p.name for p in command.params}]
    assert sorted(re.findall("`(.*?)`", sentence)) == sorted(have)


def test_usage_brackets_what_may_be_left_out_once():
    for name, command in commands_below(typer.main.get_command(app)):
        usage = command.get_usage(command.context_class(command, info_name=name))
        assert "[[" not in usage


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        (["summary", "demo:digits"], {"model", "ran", "rows", "parameters"}),
        (["summary", "demo:digits", "demo"], {"flops", "without_formula", "rows"}),
        (["profile", "demo:digits", "demo", "--steps", "2"], {"input", "total", "rows", "notes"}),
        (["doctor", "demo:digits"], {"input", "ok", "sites"}),
        (["hooks", "demo:digits"], {"modules", "hooks"}),
        (["env"], {"versions", "devices", "extras"}),
    ],
)
def test_stdout_is_json_alone(arguments, keys):
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert keys <= data.keys()


@pytest.mark.parametrize("command", ["doctor", "operations", "hooks"])
def test_what_a_model_prints_goes_to_stderr(tmp_path, command):
    path = tmp_path / "net.py"
    path.write_text(TALKING)
    done = run(command, f"{path}:make", *["random:1x2"] * (command != "hooks"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)
    said = ["imported", "made", *["ran"] * (command != "hooks")]
    assert list(dict.fromkeys(done.stderr.split())) == said


@pytest.mark.slow
def test_an_inspection_names_its_files(tmp_path):
    done = run("inspect", "demo:digits", "demo", "--at", "block*", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["folder"] == str(tmp_path / "run")
    assert [row["site"] for row in data["sites"]] == list(map(str, hl.open(data["folder"]).sites))
    assert data["n_values"] == len(data["sites"])
    assert data["classes"][0]["probability"] > 0
    assert data["summary"]["rows"]


def test_a_store_has_its_sites_and_job():
    folder = "memory://as-json"
    write_store(folder, {"x": torch.tensor([[1.0, float("nan")], [2.0, 3.0]])})
    done = run("store", "info", folder)
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["items"] == 2
    (site,) = data["sites"]
    assert (site["site"], site["dtype"]) == ("x", "float32")


@pytest.mark.parametrize("command", ["summary", "profile", "inspect"])
def test_a_model_that_fails_gives_json_and_exit_code_1(tmp_path, command):
    path = tmp_path / "net.py"
    path.write_text(FAILING)
    options = ["--out", tmp_path / "run"] if command == "inspect" else []
    done = run(command, f"{path}:make", "random:1x2", *options)
    assert done.exit_code == 1
    data = json.loads(done.stdout)
    assert "too bad" in (data.get("failure") or data["summary"]["failure"])
    assert "too bad" in done.stderr


def test_a_wrong_argument_leaves_stdout_empty(tmp_path):
    done = run("summary", "demo:nothing")
    assert (done.exit_code, done.stdout) == (2, "")
    done = CliRunner().invoke(app, ["inspect", "demo:digits", "demo", "--plot", "--json"])
    assert done.exit_code == 2
    assert "--plot must be left out with --json, got both." in done.stderr
