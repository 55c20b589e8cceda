"""hookline view, as a person types it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import chdir
from types import SimpleNamespace
from urllib.request import ProxyHandler, build_opener

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hookline as hl
from hookline.cli import main
from hookline.cli.app import app
from hookline.views.page import LimitedServer
from page_data import core_of
from warm import talking


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    return run.save(tmp_path_factory.mktemp("runs") / "run")


def run(*args: object, cwd) -> SimpleNamespace:
    with chdir(cwd):
        result = CliRunner().invoke(app, list(map(str, args)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return SimpleNamespace(returncode=result.exit_code, stdout=result.stdout, stderr=result.stderr)


@pytest.fixture
def opened(monkeypatch):
    """The addresses that were opened in a browser."""
    addresses = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", addresses.append)
    return addresses


@pytest.fixture
def at_once(monkeypatch):
    """A server that ends as soon as it runs."""
    monkeypatch.setattr(LimitedServer, "serve", lambda self: self.close())


@pytest.mark.processes
def test_it_serves_until_ctrl_c_and_says_where(folder):
    command = ["-m", "hookline", "view", str(folder), "--port", "0", "--no-open"]
    with talking(*command) as (process, _, written):
        lines = [written.readline() for _ in range(3)]
        (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", "".join(lines))
        # urlopen keeps the proxy that an earlier test was behind.
        with build_opener(ProxyHandler({})).open(address, timeout=30) as answer:
            assert "ReLU" in core_of(answer.read().decode())["types"]
        code = process.wait(signal.SIGINT)
        assert "Traceback" not in written.read()
    assert code in (0, 130, -signal.SIGINT)


def test_it_opens_the_browser_unless_told_not_to(folder, opened, at_once, tmp_path):
    done = run("view", folder, "--port", 0, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert opened
    assert opened[0] in done.stdout
    run("view", folder, "--port", 0, "--no-open", cwd=tmp_path)
    assert len(opened) == 1


def test_without_a_screen_no_text_browser_takes_the_terminal(
    folder, opened, at_once, tmp_path, monkeypatch
):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    run("view", folder, "--port", 0, cwd=tmp_path)
    assert opened == []


def test_a_port_that_is_taken_is_said_and_the_next_one_used(folder, at_once, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("view", folder, "--port", port, "--no-open", cwd=tmp_path)
    assert done.returncode == 0
    assert re.match(rf"hookline: port {port} is taken; using \d+\.", done.stderr)


def test_an_address_for_others_comes_with_a_token(folder, at_once, tmp_path):
    done = run("view", folder, "--host", "0.0.0.0", "--port", 0, "--no-open", cwd=tmp_path)
    assert re.search(r"http://\S+/\?token=\S{24,}", done.stdout)
    assert "only with this address" in done.stdout


def test_two_folders_are_compared(folder, at_once, tmp_path):
    done = run("view", folder, folder, "--port", 0, "--no-open", cwd=tmp_path)
    assert f"{folder} and {folder} at" in done.stdout


@pytest.fixture(scope="module")
def monitored(tmp_path_factory):
    model, path = nn.Linear(2, 3), tmp_path_factory.mktemp("runs") / "monitored"
    with hl.monitor(model, to=str(path)):
        for _ in range(3):
            model(torch.ones(1, 2))
    return path


def test_the_folder_of_a_monitor_is_served_as_a_run(monitored, at_once, tmp_path):
    done = run("view", monitored, "--port", 0, "--no-open", cwd=tmp_path)
    assert done.returncode == 0
    assert f"{monitored} at" in done.stdout


@pytest.mark.parametrize(("to", "file"), [("page", "page/report.html"), ("a.html", "a.html")])
def test_out_writes_one_file_and_serves_nothing(monitored, folder, to, file, tmp_path):
    for shown, word in ((monitored, 'id="chart"'), (folder, "ReLU")):
        done = run("view", shown, "--out", to, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"written: {file}\n\nFindings: none; 3 ")
        text = (tmp_path / file).read_text()
        assert word in (core_of(text)["types"] if shown == folder else text)


def test_waiting_and_writing_at_once_is_refused(tmp_path):
    done = run("view", "runs/later", "--wait", "--out", "page", cwd=tmp_path)
    assert done.returncode == 2
    assert "Leave out one of them." in done.stderr


INTERRUPTED = """
import os, signal, sys
from hookline.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may ignore it
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "hookline.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
main()
"""


@pytest.mark.processes
def test_ctrl_c_while_modules_are_imported_is_silent():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_ctrl_c_before_a_command_runs_is_130(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("hookline.cli.app.app", interrupt)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


def test_items_of_a_finding_of_hl_check_are_refused(tmp_path):
    (tmp_path / "kept.safetensors").touch()
    done = run("view", "kept.safetensors", "--items", 1, "--out", "page", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "hookline: --items chooses items of a store, got a finding of hl.check: kept.safetensors."
        "\nLeave out --items.\n"
    )


def test_the_comparison_of_two_folders_is_written_into_a_file(folder, tmp_path):
    done = run("view", folder, folder, "--out", "page", cwd=tmp_path)
    assert done.stdout == "written: page/report.html\n"
    assert "Error over depth" in (tmp_path / "page" / "report.html").read_text()
    refused = run("view", folder, folder, "--items", 1, "--out", "other", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr == (
        "hookline: --items chooses items for a page that is served, got a comparison to be written,"
        " which is of all items.\nLeave out --items, or --out.\n"
    )
    assert not (tmp_path / "other").exists()


def test_an_empty_folder_may_be_a_run_before_its_first_step(at_once, tmp_path):
    (tmp_path / "run").mkdir()
    assert "Use --wait" in run("view", "run", cwd=tmp_path).stderr
    assert run("view", "run", "--wait", "--no-open", "--port", 0, cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "it does not exist"),
        (lambda path: path.mkdir(), "it has no manifest.json"),
        (lambda path: path.write_text(""), "it is a file"),
    ],
)
def test_what_is_no_recording_is_said_before_anything_is_served(tmp_path, make, said):
    make(tmp_path / "none")
    done = run("view", "none", "--no-open", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("hookline: none is not a recording, a store or a run: ")
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_a_folder_that_is_not_there_yet_can_be_waited_for(tmp_path, at_once):
    done = run("view", "later", cwd=tmp_path)
    assert "Use --wait to wait for a folder that is not written yet." in done.stderr
    done = run("view", "later", "--wait", "--port", 0, "--no-open", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_another_version_says_what_to_do(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "run")
    path = copy / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 7'))
    done = run("view", "run", "--no-open", cwd=tmp_path)
    assert done.returncode == 2
    assert "Open it with the hookline that wrote it" in done.stderr


@pytest.mark.parametrize("name", ["uvicorn", "starlette.applications"])
def test_a_missing_extra_is_named(folder, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    done = run("view", folder, "--no-open", cwd=tmp_path)
    assert done.returncode == 2
    assert "hookline view needs starlette and uvicorn.\n" in done.stderr
    assert 'Run in the folder of hookline: pip install ".[cli,page]"' in done.stderr


def test_inspect_opens_its_page_when_asked(opened, tmp_path):
    done = run("inspect", "demo:digits", "demo", "--out", "out", "--open", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert opened == [(tmp_path / "out" / "report.html").as_uri()]
    assert os.listdir(tmp_path) == ["out"]
