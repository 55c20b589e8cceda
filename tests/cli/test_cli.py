"""The commands, as a person types them: output, files, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from hookline.models import load_model
from warm import DYNAMO, run_python


def run(*args: object, cwd: Path) -> SimpleNamespace:
    """A command in this process: the same code, without the seconds that importing torch takes."""
    with chdir(cwd):
        result = CliRunner().invoke(app, list(map(str, args)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


def run_process(*args: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hookline", *map(str, args)],
        capture_output=True, text=True, cwd=cwd, check=False, env={**os.environ, **env},
    )  # fmt: skip


def complaint(done, code=2) -> str:
    assert done.returncode == code, done
    assert done.stderr.startswith("hookline: ")
    assert 1 <= len(done.stderr.strip().splitlines()) <= 3, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("demo")
    done = run_python("-m", "hookline", "demo", "--out", "out", cwd=cwd, of=DYNAMO)
    return done, cwd / "out"


@pytest.mark.slow
def test_the_demo_prints_the_table_and_writes_recording_and_page(demo):
    done, out = demo
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "block1" in done.stdout
    assert "ResidualBlock" in done.stdout
    assert "59,430" in done.stdout
    assert "99.8% right on 450" in done.stdout
    assert "Try next" in done.stdout
    recording = hl.open(out)
    assert recording[":output"].argmax(1).tolist() == list(range(8))
    assert (out / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_demo_may_be_run_again_over_its_own_folder(demo):
    _, out = demo
    assert run("demo", "--out", "out", cwd=out.parent).returncode == 0
    assert len(hl.open(out).passes) == 1
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_inspect_records_what_is_selected(tmp_path):
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(tmp_path / "d.png")
    done = run("inspect", "demo:digits", "d.png", "--at", "block*", "--at", "head:input",
               "--out", "r", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert list(hl.open(tmp_path / "r")) == ["block1", "block2", "block3", "head:input"]
    assert "%" in done.stdout
    assert "r/report.html" in done.stdout


def test_inspect_of_an_image_records_what_the_model_got(tmp_path):
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4).save(tmp_path / "d.png")
    done = run("inspect", "demo:digits", "d.png", "--out", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recording, model = hl.open(tmp_path / "r"), load_model("demo:digits").model
    assert [site for site in recording if ":" in site] == ["(root):input"]
    assert len(recording.sites) == 1 + len(hl.select(model))
    x = recording["(root):input"]
    with torch.no_grad():
        assert torch.allclose(model(x), recording["(root)"], atol=1e-5)


def test_inspect_takes_a_factory_and_random_input(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))\n"
    )
    done = run("inspect", "mine.py:make", "random:1x3x8x8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recording = hl.open(tmp_path / "hookline-run")
    assert torch.equal(recording["1"], recording["0"].relu())


def test_a_failing_forward_exits_1_with_the_module_and_what_ran(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(),"
        " nn.Linear(99, 1))\n"
    )
    done = run("inspect", "mine.py:make", "random:1x3x8x8", cwd=tmp_path)
    text = complaint(done, code=1)
    assert "2 (Linear), which got Tensor[1, 4, 6, 6]" in text
    assert text.endswith("The values before the failure were recorded.\n")
    assert "2 values in hookline-run/" in done.stdout
    recording = hl.open(tmp_path / "hookline-run")
    assert list(recording) == ["0", "1"]
    assert (tmp_path / "hookline-run" / "report.html").exists()


@pytest.mark.parametrize("command", ["inspect", "doctor", "profile"])
def test_a_model_that_ends_the_process_has_failed(tmp_path, command):
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n"
        "        sys.exit(0)\n"
    )
    done = run(command, "mine.py:Net", "random:1x3", cwd=tmp_path)
    assert "the model's code must not end the process, got sys.exit(0)" in complaint(done, code=1)


def test_an_input_shape_that_the_model_refuses_is_explained(tmp_path):
    done = run("inspect", "demo:digits", "random:1x3x8x8", cwd=tmp_path)
    text = complaint(done, code=1)
    assert "stem.conv (Conv2d), which got Tensor[1, 3, 8, 8]" in text
    assert text.endswith("No selected site ran before the failure, so nothing was written.\n")
    # It is said once, and of nothing that was recorded no word and no file is left.
    assert "Conv2d), which got" not in done.stdout
    assert "The run failed" not in done.stdout
    assert "hl.open" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_selection_that_never_fires_exits_1_and_writes_nothing(tmp_path):
    done = run("inspect", "demo:digits", "demo", "--at", "block1#7", "--out", "r", cwd=tmp_path)
    assert complaint(done, code=1) == (
        "hookline: nothing was recorded, so nothing was written.\n"
        "block1#7: the module ran once in a pass, so call #7 never came.\n"
    )
    assert "0 values" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_selection_that_never_fires_is_told_of(tmp_path):
    done = run("inspect", "demo:digits", "demo", "--at", "block1#7", "--at", "head", "--out", "r",
               cwd=tmp_path)  # fmt: skip
    assert complaint(done, code=0) == (
        "hookline: 1 of 2 sites never fired.\n"
        "block1#7: the module ran once in a pass, so call #7 never came.\n"
    )
    assert list(hl.open(tmp_path / "r")) == ["head"]


def test_plots_that_cannot_be_drawn_exit_1_after_the_recording(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nclass Silent(nn.Module):\n    def forward(self, x):\n"
        "        return None\n"
    )
    done = run("inspect", "mine.py:Silent", "random:1x3", "--plot", "--out", "r", cwd=tmp_path)
    assert "must hold a value that can be drawn, got none" in complaint(done, code=1)
    assert "1 value in r/" in done.stdout
    done = run("inspect", "demo:digits", "demo", "--at", "head#1", "--plot", cwd=tmp_path)
    assert "nothing was recorded" in complaint(done, code=1)


@pytest.fixture(scope="module")
def traps(tmp_path_factory):
    """Files that are none: folders, pipes, devices, loops and noise, under every suffix."""
    folder = tmp_path_factory.mktemp("traps")
    noise = np.random.default_rng(0).bytes(300)
    for suffix in ("npy", "npz", "pt", "safetensors", "txt", "png", "jpg", "py"):
        (folder / f"empty.{suffix}").touch()
        (folder / f"noise.{suffix}").write_bytes(noise)
        (folder / f"folder.{suffix}").mkdir()
        (folder / f"loop.{suffix}").symlink_to(f"loop.{suffix}")
        (folder / f"device.{suffix}").symlink_to("/dev/zero")
        os.mkfifo(folder / f"pipe.{suffix}")
    np.save(folder / "rows.npy", np.zeros((0, 1, 8, 8), np.float32))
    (folder / "bomb.pgm").write_bytes(b"P5\n30000 30000\n255\n")
    (folder / "names").mkdir()
    (folder / "names" / "broken.png").write_bytes(noise)
    return folder


NAMES = ["x" * 300, "x" * 300 + ".npy", "x" * 300 + "/a.png", "a\0b", "a\0.npy", "\udcff.npy",
         "\udcff", "", "  ", "/dev/zero", "/dev/null", "random:0x1x8x8", "rows.npy", "bomb.pgm",
         "names", "."]  # fmt: skip


def assert_refused(*args, cwd):
    complaint(run(*args, cwd=cwd))


@pytest.mark.slow
def test_whatever_is_given_as_input_is_refused_in_a_few_lines(traps):
    files = [path.name for path in traps.iterdir() if path.suffix != ".py"]
    for name in [*NAMES, *files]:
        assert_refused("inspect", "demo:digits", name, "--out", "never", cwd=traps)
    for name in NAMES:
        assert_refused("summary", "demo:digits", name, cwd=traps)
        assert_refused("doctor", "demo:digits", name, cwd=traps)
    assert not (traps / "never").exists()


def test_whatever_is_given_as_weights_is_refused_in_a_few_lines(traps):
    for name in [*NAMES, *(path.name for path in traps.iterdir())]:
        assert_refused("summary", "demo:digits", "--weights", name, cwd=traps)


def test_whatever_is_given_as_a_model_is_refused_in_a_few_lines(traps):
    files = [path.name for path in traps.glob("*.py")]
    for name in [*NAMES, *files]:
        assert_refused("summary", name, cwd=traps)
        assert_refused("summary", f"{name}:make", cwd=traps)
    assert_refused("hooks", "x" * 300 + ".py:make", cwd=traps)
    assert_refused("hooks", "\udcff.py:make", cwd=traps)


def test_a_folder_that_may_not_be_listed_is_refused(traps, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", refuse)
    done = run("inspect", "demo:digits", str(traps), cwd="/")
    assert "must be readable, got PermissionError" in complaint(done)


@pytest.mark.parametrize("words", [[], ["summary"], ["store", "info"]])
def test_h_is_short_for_help(words):
    texts = [CliRunner().invoke(app, [*words, option]).stdout for option in ("-h", "--help")]
    assert "Usage: " in texts[0]
    assert texts[0] == texts[1]


def test_the_version_is_printed(tmp_path):
    done = run("--version", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout == f"hookline {hl.__version__}, torch {torch.__version__}\n"


@pytest.mark.slow
def test_summary_prints_the_table_with_and_without_an_input(tmp_path):
    assert "59,430" in run("summary", "demo:digits", cwd=tmp_path).stdout
    with_input = run("summary", "demo:digits", "demo", cwd=tmp_path)
    assert "[8,1,8,8]" in with_input.stdout.replace(" ", "")
    assert "stem" not in run("summary", "demo:digits", "--depth", "0", cwd=tmp_path).stdout
    failed = run("summary", "demo:digits", "random:1x7x8x8", cwd=tmp_path)
    assert "stem.conv (Conv2d)" in complaint(failed, code=1)
    assert "stem.conv (Conv2d)" not in failed.stdout


def test_a_summary_without_weights_is_told_that_it_needs_none(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("hookline.models.from_torchvision.is_reachable", lambda url: False)
    text = complaint(run("summary", "torchvision:resnet18", cwd=tmp_path))
    assert text.splitlines()[1] == "Use --meta: a summary needs no weights."
    assert text.splitlines()[2].startswith("Use --weights none for random weights")
    done = run("summary", "torchvision:resnet18", "--meta", cwd=tmp_path)
    assert "11,689,512" in done.stdout
    inspected = complaint(run("inspect", "torchvision:resnet18", "random:1x3x8x8", cwd=tmp_path))
    assert "--meta" not in inspected


def test_summary_needs_no_memory_on_the_meta_device(tmp_path):
    (tmp_path / "big.py").write_text(
        "from torch import nn\ndef make():\n"
        "    return nn.Sequential(*[nn.Linear(100_000, 100_000) for _ in range(5)])\n"
    )
    done = run("summary", "big.py:make", "random:2x100000", "--meta", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "50,000,500,000" in done.stdout


def test_hooks_lists_what_is_on_a_model(tmp_path):
    assert "no hooks on 34 modules" in run("hooks", "demo:digits", cwd=tmp_path).stdout
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make():\n"
        "    model = nn.Sequential(nn.Linear(1, 1))\n"
        "    model[0].register_forward_hook(lambda *a: None)\n    return model\n"
    )
    done = run("hooks", "mine.py:make", cwd=tmp_path)
    assert "yours" in done.stdout
    assert "mine.py" in done.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["demo:digits", "demo", "--at", "blok1"], "Did you mean 'block1'"),
        (["demo:digits", "demo", "--at", "block1:outptu"], "got 'outptu'"),
        (["torchvision:resnet99", "demo"], "resnet"),
        (["nothing", "demo"], "does not name a model"),
        (["torchvision:resnet18", "random:1x3x8x8"], "--weights none"),
        (["demo:digits", "no-such.png"], "no-such.png"),
        (["demo:digits", "random:1xq"], "random:"),
        (["mine.py:make", "random:1"], "mine.py"),
        (["demo:digits", "demo", "--weights", "other.safetensors"], "other.safetensors"),
        (["demo:digits", "broken.png"], "broken.png"),
        (["demo:digits", "demo", "--out", "taken"], "holds other files"),
        (["demo:digits", "demo", "--out", "broken.png"], "must be a folder, got the file"),
        (["demo:digits", "demo", "--out", "/proc/nothing"], "cannot write"),
    ],
)
def test_bad_input_is_exit_code_2_and_at_most_three_lines(tmp_path, args, said):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    save_file({"wrong": torch.zeros(1)}, tmp_path / "other.safetensors")
    before = sorted(tmp_path.rglob("*"))
    assert said in complaint(run("inspect", *args, cwd=tmp_path))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_needs_pickle_is_refused(tmp_path):
    torch.save({"state_dict": Path("x")}, tmp_path / "old.pt")
    text = complaint(run("inspect", "demo:digits", "demo", "--weights", "old.pt", cwd=tmp_path))
    assert "old.pt" in text
    assert "needs unpickling" in text


def test_a_leaf_that_does_not_exist_is_said(tmp_path):
    done = run("inspect", "demo:digits", "demo", "--at", "head:output[3]", cwd=tmp_path)
    assert "head:output[3] has no leaf" in complaint(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_an_old_code_page_gets_other_characters_no_traceback(tmp_path):
    (tmp_path / "named.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.add_module('日本', nn.Conv2d(1, 2, 3))\n"
        "    def forward(self, x): return self._modules['日本'](x)\n",
        encoding="utf-8",
    )
    code = (
        "import sys; sys.stdout.reconfigure(encoding='ascii', errors='strict')\n"
        "from hookline.cli import main; main()"
    )
    arguments = ("inspect", "named.py:Net", "random:1x1x8x8", "--plot")
    done = run_python("-c", code, *arguments, cwd=tmp_path, of=DYNAMO)
    assert done.returncode == 0, done.stderr
    assert "\\u65e5\\u672c: 2 channels of 6x6" in done.stdout


@pytest.mark.processes
def test_a_missing_extra_is_named(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('no typer here')")
    done = run_process("demo", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert 'pip install ".[cli]"' in complaint(done, code=1)


def test_a_gradient_cannot_be_inspected_and_it_is_said(tmp_path):
    done = run("inspect", "demo:digits", "demo", "--at", "head:grad_output", cwd=tmp_path)
    assert "--at must name sites of the forward, got head:grad_output" in complaint(done)
    assert not (tmp_path / "hookline-run").exists()


@pytest.mark.slow
def test_inspect_draws_histograms_and_maps_when_asked(tmp_path):
    plain = run("inspect", "demo:digits", "demo", "--at", "block*", cwd=tmp_path).stdout
    drawn = run("inspect", "demo:digits", "demo", "--at", "block*", "--plot", cwd=tmp_path).stdout
    assert max(map(len, drawn.splitlines())) <= 80
    assert "log counts" not in plain
    assert "log counts" in drawn
    assert "block3: 40 channels of 4x4" in drawn
    assert sum("█" in line for line in drawn.splitlines()) >= 3
