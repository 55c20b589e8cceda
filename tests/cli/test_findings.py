"""`hookline findings`, and the findings that other commands print."""

from __future__ import annotations

import json
from contextlib import chdir

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from small_stores import write_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    nn.init.constant_(model[0].bias, -1e3)
    with hl.record(model) as run:
        model(torch.rand(4, 8))
    run.save(folder / "dead")
    with hl.monitor(model, ports="output", to=folder / "training"):
        for step in range(30):
            model(torch.rand(4, 8) * (1e9 if step == 20 else 1))
    write_store(str(folder / "store"), {"x": torch.ones(3, 2)})
    return folder


def said(folder, *words):
    with chdir(folder):
        return CliRunner().invoke(app, words)


def test_a_recording_is_judged_by_its_folder(folder):
    done = said(folder, "findings", "dead")
    assert "Findings: 1 warning" in done.stdout
    assert "1 passes nothing." in done.stdout


def test_a_training_is_judged_by_its_folder(folder):
    done = said(folder, "findings", "training", "--json")
    finding = json.loads(done.stdout)["findings"][0]
    assert (finding["kind"], finding["site"], finding["step"]) == ("jump", "0", 20)


def test_a_written_page_is_followed_by_its_findings(folder, tmp_path):
    done = said(folder, "view", "dead", "--out", str(tmp_path / "page.html"))
    assert "Findings: 1 warning" in done.stdout


def test_a_store_is_judged_by_its_statistics(folder, tmp_path):
    done = said(folder, "findings", "store", "--fail-on", "note")
    assert (done.exit_code, "x has one number in every item." in done.stdout) == (1, True)
    done = said(folder, "view", "store", "--out", str(tmp_path / "page.html"))
    assert "Findings: 1 note; 1 site, 3 items" in done.stdout


@pytest.mark.slow
def test_a_store_at_a_url_is_judged_but_not_viewed(folder):
    write_store("memory://test-findings", {"x": torch.ones(3, 2)})
    assert "1 note; 1 site" in said(folder, "findings", "memory://test-findings").stdout
    done = said(folder, "view", "memory://test-findings")
    assert done.exit_code == 2
    assert "must show a folder on this machine, got memory://test-findings." in done.stderr
    assert "written" in said(folder, "view", f"file://{folder}/dead", "--out", "page").stdout


@pytest.mark.slow
def test_inspect_prints_findings_and_gives_them_as_json(tmp_path):
    done = said(tmp_path, "inspect", "demo:digits", "demo", "--out", "run")
    assert "Findings: " in done.stdout
    done = said(tmp_path, "inspect", "demo:digits", "demo", "--out", "run", "--json")
    assert json.loads(done.stdout)["findings"]["ok"] is True
