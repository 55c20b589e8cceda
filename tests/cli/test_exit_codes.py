"""The exit codes, as docs/command-line.md lists them."""

from __future__ import annotations

from contextlib import chdir

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from small_stores import write_store

NETS = """
from torch import nn
class Fails(nn.Linear):
    def forward(self, x):
        raise ValueError("too bad")
class Idle(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x):
        return self.used(x)
def fails():
    return Fails(2, 2)
def dead():
    layer = nn.Linear(8, 8)
    nn.init.constant_(layer.bias, -1e3)
    return nn.Sequential(layer, nn.ReLU())
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "broken.py").write_text("def")
    model = nn.Identity()
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    run.save(tmp_path / "run")
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nn.init.constant_(layers[0].bias, -1e3)
    with hl.record(layers) as dead:
        layers(torch.ones(4, 8))
    dead.save(tmp_path / "dead")
    write_store(str(tmp_path / "store"), {"x": torch.ones(3, 2)})
    write_store(str(tmp_path / "damaged"), {"x": torch.ones(3, 2)})
    shard = next(path for path in (tmp_path / "damaged").rglob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-4] + b"\0\0\0\0")
    return tmp_path


CODES = [
    (0, "summary nets.py:Idle"),
    (0, "summary nets.py:Idle random:1x2"),
    (1, "summary nets.py:fails random:1x2"),
    (0, "inspect nets.py:Idle random:1x2 --out out"),
    (1, "inspect nets.py:fails random:1x2 --out out"),
    (1, "inspect nets.py:Idle random:1x2 --at idle --out out"),
    (0, "inspect nets.py:dead random:4x8 --out out --fail-on error"),
    (1, "inspect nets.py:dead random:4x8 --out out --fail-on warning"),
    (0, "findings run"),
    (0, "findings run --fail-on note"),
    (0, "findings dead --fail-on error"),
    (1, "findings dead --fail-on warning"),
    (0, "profile nets.py:Idle random:1x2 --steps 1"),
    (1, "profile nets.py:fails random:1x2 --steps 1"),
    (0, "doctor nets.py:Idle random:1x2 --at used"),
    (1, "doctor nets.py:Idle random:1x2 --at idle"),
    (1, "doctor nets.py:fails random:1x2"),
    (0, "hooks nets.py:Idle"),
    (0, "store info store"),
    (0, "store verify store"),
    (1, "store verify damaged"),
    (0, "store export store --to out.npz --format npy"),
    (0, "view run --out page.html"),
]
WRONG = [
    "summary",
    "summary nothing",
    "summary broken.py:make",
    "summary nets.py:gone",
    "summary nets.py:Idle gone.npy",
    "summary nets.py:Idle random:1x2:float99",
    "summary nets.py:Idle --meta --weights gone.pt",
    "inspect nets.py:Idle random:1x2 --at nowhere",
    "inspect nets.py:Idle random:1x2 --out nets.py",
    "inspect nets.py:Idle random:1x2 --weights gone.pt",
    "inspect nets.py:Idle random:1x2 --plot --json",
    "profile nets.py:Idle random:1x2 --steps 0",
    "profile nets.py:Idle random:1x2 --trace gone/t.json",
    "doctor nets.py:Idle --ports bogus",
    "hooks gone.py:make",
    "replay gone.pt",
    "replay nets.py",
    "extract nets.py:Idle gone --at used --to s",
    "extract demo:digits demo --at head --to s --dtype foo",
    "extract demo:digits demo --at head --to s --engine foo",
    "extract demo:digits demo --at head --to s --batch-size 0",
    "findings gone",
    "findings run --fail-on never",
    "store info gone",
    "store verify gone",
    "store repair gone",
    "store merge gone other --to new",
    "store export store --to x --format foo",
    "view gone",
    "view nets.py",
    "gone",
]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "command"), CODES)
def test_what_a_command_found_is_its_exit_code(folder, code, command):
    with chdir(folder):
        done = CliRunner().invoke(app, command.split())
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit | None)
    is_quiet = command.startswith(("doctor", "findings")) or "--fail-on" in command
    assert bool(done.stderr) == (code == 1 and not is_quiet)


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_argument_is_2_and_says_what_to_do(folder, command):
    with chdir(folder):
        done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 2, done.output
    assert not done.stdout or "--trace" in command  # the profile was printed before its file
    if done.stderr.startswith("hookline: "):
        lines = done.stderr.strip().splitlines()
        assert 2 <= len(lines) <= 3, done.stderr
    else:
        assert "Usage:" in done.stderr


def test_options_are_named_as_on_the_command_line(folder):
    with chdir(folder):
        done = CliRunner().invoke(app, ["doctor", "nets.py:Idle", "--ports", "output,bogus"])
    assert done.stderr == (
        "hookline: --ports must be among input, output, grad_input, grad_output, grad, got"
        " 'bogus'.\n"
        "Give --ports output,grad_output, for instance.\n"
    )


def test_a_file_that_does_not_compile_is_named_once(folder):
    with chdir(folder):
        done = CliRunner().invoke(app, ["summary", "broken.py:make"])
    assert done.stderr == (
        "hookline: broken.py cannot be run: SyntaxError: invalid syntax (broken.py, line 1)."
        "\nMend the file.\n"
    )


def test_ctrl_c_is_130(folder, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hookline.cli.app.hl.inventory", interrupt)
    done = CliRunner().invoke(app, ["hooks", "demo:digits"])
    assert done.exit_code == 130
