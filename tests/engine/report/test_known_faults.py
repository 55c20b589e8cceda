"""Known faults of other packages: told once, with the fix, and none for the versions in use."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hookline as hl
from hookline.engine.report.known_faults import KNOWN_FAULTS, known_faults_here

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))


def test_a_version_with_a_known_fault_is_told_once(monkeypatch):
    model = nn.Linear(2, 2)
    monkeypatch.setattr(torch, "__version__", "2.10.9+cu128")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.1"))
    with pytest.warns(hl.HooklineWarning) as told:
        for _ in range(2):
            with hl.record(model):
                model(torch.ones(2))
    assert [str(warning.message) for warning in told] == [
        "torch 2.10.9+cu128 is older than the versions that hookline is tested with."
        "\nRun pip install 'torch>=2.11'.",
        "transformers 4.57.1 is older than the versions that hookline is tested with: hl.anatomy"
        " fails on models before 5.0.\nRun pip install 'transformers>=5.3'.",
    ]
    assert told[0].filename == __file__


def test_the_versions_in_use_have_no_known_fault():
    assert list(known_faults_here()) == []
    assert [fault.affects("2.11.0") for fault in KNOWN_FAULTS] == [False, True]
    assert not KNOWN_FAULTS[0].affects("a build without a number")


def test_the_oldest_right_versions_are_those_of_the_package():
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["text"]]
    for fault in KNOWN_FAULTS:
        oldest = ".".join(map(str, fault.right)).removesuffix(".0")
        assert f"{fault.package}>={oldest}" in wanted
