"""What a check keeps on disk shows the finding again, and runs the module again."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch
from typer.testing import CliRunner

import hookline as hl
from forked_children import child
from hookline.cli.app import app
from hookline.verbs.check import replay_file as situation_module
from hookline.verbs.check.replay_file import read_saved_call

NET = """
import torch
from torch import nn

class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x, *, minus=0.0):
        return (self.norm(self.drop(x)) * self.scale - minus).sqrt()

class Zero(nn.Module):
    def forward(self, x):
        return (0 * x).sqrt() + x

def make():
    return nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4))

def make_zero():
    return nn.Sequential(nn.Linear(4, 4), Zero())
"""


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    names: dict[str, object] = {}
    exec(compile(NET, str(tmp_path / "net.py"), "exec"), names)
    torch.manual_seed(0)
    return names


def kept(model, folder, x=None):
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model, keep=folder):
        model(torch.randn(3, 4) if x is None else x).sum().backward()
    return caught.value.finding


def test_a_relative_folder_is_of_where_it_was_given(net, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    model = net["make"]()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model, keep="nan"):
        monkeypatch.chdir(tmp_path / "other")
        model(torch.randn(3, 4))
    assert os.path.dirname(caught.value.finding.file) == str(tmp_path / "nan")


def test_the_module_runs_again_with_the_same_numbers(net, tmp_path):
    finding = kept(net["make"](), tmp_path / "nan")
    assert finding.file == str(tmp_path / "nan" / "step0-1.safetensors")
    saved = read_saved_call(finding.file)
    assert saved.finding == finding.with_(file=None)
    other = net["make"]()
    state = torch.get_rng_state()
    again = saved.run(other, hl.check)
    assert torch.equal(torch.get_rng_state(), state)
    assert (again.operation, again.function) == ("aten.sqrt.default", "sqrt")
    assert (again.n_nan, again.n_total) == (finding.n_nan, finding.n_total)
    assert 0 < finding.n_nan < finding.n_total


def test_a_backward_is_kept_with_its_gradients(net, tmp_path):
    finding = kept(net["make_zero"](), tmp_path)
    assert finding.kind == "backward"
    again = read_saved_call(finding.file).run(net["make_zero"](), hl.check)
    assert (again.kind, again.operation, again.path) == ("backward", "aten.div.Tensor", "1")


def test_a_poisoned_parameter_is_kept(net, tmp_path):
    model = net["make"]()
    with pytest.raises(hl.NonFiniteError) as caught, hl.check(model, keep=tmp_path):
        with torch.no_grad():
            model[2].weight[0, 0] = math.nan
        model[1].forward = lambda x: x
        model(torch.randn(3, 4))
    again = read_saved_call(caught.value.finding.file).run(net["make"](), hl.check)
    assert (again.kind, again.path, again.n_nan) == ("parameter", "weight", 1)


def test_a_second_finding_gets_a_file_of_its_own(net, tmp_path):
    one, other = kept(net["make"](), tmp_path), kept(net["make"](), tmp_path)
    assert one.file != other.file


def test_a_folder_that_cannot_be_written(net, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(hl.FolderError, match=r"keep= must be a folder"):
        hl.check(net["make"](), keep=tmp_path / "file" / "nan")
    with pytest.raises(hl.FolderError, match=r"keep= must be a folder"):
        hl.check(net["make"](), keep=3)


def test_a_file_of_another_kind(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("hello")
    for name in ("other.safetensors", "text", "missing"):
        with pytest.raises(hl.FolderError):
            read_saved_call(tmp_path / name)


def test_the_command_shows_the_finding_and_runs_the_module(net, tmp_path):
    finding = kept(net["make"](), tmp_path)
    shown = CliRunner().invoke(app, ["replay", finding.file])
    assert shown.exit_code == 0
    assert "made by sqrt" in shown.output
    again = CliRunner().invoke(app, ["replay", finding.file, f"{tmp_path}/net.py:make"])
    assert again.exit_code == 0, again.output
    assert "run again:" in again.output
    wrong = CliRunner().invoke(app, ["replay", finding.file, "demo:digits"])
    assert wrong.exit_code == 2
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "no")]).exit_code == 2


def test_an_argument_that_cannot_be_saved_hides_no_finding(net, tmp_path):
    class Root(torch.nn.Module):
        def forward(self, x, more):
            return x.log()

    endless: list[object] = []
    endless.append(endless)
    with (
        pytest.raises(hl.NonFiniteError) as caught,
        hl.check(Root(), keep=tmp_path / "nan") as line,
    ):
        line._line.root(torch.tensor([-1.0]), endless)
    assert caught.value.finding.function == "log"
    assert "no file is kept: RecursionError" in str(caught.value.finding)


@pytest.mark.processes
def test_a_child_that_writes_meanwhile_gets_another_file(net, tmp_path, monkeypatch):
    save, files = situation_module.save_file, []

    def save_later(*args, **options):
        monkeypatch.setattr(situation_module, "save_file", save)
        files.append(child(lambda: kept(net["make"](), tmp_path).file))
        save(*args, **options)

    monkeypatch.setattr(situation_module, "save_file", save_later)
    files.append(kept(net["make"](), tmp_path).file)
    assert [os.path.basename(one) for one in files] == [
        "step0-1.safetensors", "step0-1-1.safetensors",
    ]  # fmt: skip
    assert all(read_saved_call(one).finding.path == "1" for one in files)


def test_nothing_half_written_stays(net, tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hookline.verbs.check.replay_file.save_file", full)
    finding = kept(net["make"](), tmp_path / "nan")
    assert finding.file is None
    assert "No space left on device" in str(finding)
    assert list((tmp_path / "nan").iterdir()) == []


def body_of(file, change):
    """Write a copy of a kept file with another text in it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(file, framework="pt") as opened:
        body = json.loads(opened.metadata()["hookline"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    text = change(body)
    text = json.dumps(body) if text is None else text
    save_file(tensors, f"{file}.other", metadata={"hookline": text})
    return f"{file}.other"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: "[" * 100_000 + "]" * 100_000,
        lambda body: body["finding"].update(path=3),
        lambda body: body["finding"]["inputs"][0][3].__setitem__(0, float("inf")),
        lambda body: body.update(rng="0"),
        lambda body: body.update(inputs=[]),
    ],
)
def test_a_text_that_is_damaged_is_refused_in_one_line(net, tmp_path, change):
    other = body_of(kept(net["make"](), tmp_path).file, change)
    shown = CliRunner().invoke(app, ["replay", other])
    assert shown.exit_code == 2
    assert "damaged" in shown.output


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(hl.FolderError, match="regular file"):
        read_saved_call(tmp_path / "pipe")


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(autocast=[["cpu", "load"]]),
        lambda body: body.update(autocast=[["cpu", "nothing"]]),
        lambda body: body["state"].update(scale=body["rng"]),
        lambda body: body.update(inputs={"list": [[None, {"list": [], "type": "builtins.list"}]]}),
    ],
)
def test_what_the_module_cannot_run_on_is_said_in_one_line(net, tmp_path, change):
    other = body_of(kept(net["make"](), tmp_path).file, change)
    shown = CliRunner().invoke(app, ["replay", other, f"{tmp_path}/net.py:make"])
    assert shown.exit_code == 2, shown.output


def test_text_in_a_file_cannot_command_the_terminal(net, tmp_path):
    other = body_of(
        kept(net["make"](), tmp_path).file,
        lambda body: body["finding"].update(notes=["\x1b[2Jgone"], function="[bold]\x1b[31m"),
    )
    shown = CliRunner().invoke(app, ["replay", other])
    assert "\x1b" not in shown.output
    assert "[bold]" in shown.output


def test_a_name_of_a_folder_that_no_system_has():
    with pytest.raises(hl.FolderError, match="keep="):
        hl.check(torch.nn.Linear(2, 2), keep="a\0b")
