"""What `make quick` leaves out: tests that bear a mark, and none lacks the one that it needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
MARKS = {"compiles", "processes", "slow"}
NEEDS = {
    "compiles": lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)),
    "processes": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
}


def test_it_leaves_out_three_marks_and_each_says_why():
    command = re.search(r'^quick:.*\n\t.* -m "(.*)"$', (ROOT / "Makefile").read_text(), re.M)
    assert command[1] == " and ".join(f"not {mark}" for mark in sorted(MARKS))
    declared = re.findall(
        r'"(\w+): .*; `make quick` leaves it out"', (ROOT / "pyproject.toml").read_text()
    )
    assert set(declared) == MARKS


@pytest.mark.compiles
@pytest.mark.processes
@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("mark", NEEDS)
def test_a_test_without_the_mark_it_needs_fails(mark, is_marked, request, monkeypatch):
    schedule = request.config.pluginmanager.get_plugin("schedule")
    guard = schedule.pytest_runtest_call(request.node)
    next(guard)
    NEEDS[mark]()
    ends = (StopIteration, None) if is_marked else (pytest.fail.Exception, mark)
    with monkeypatch.context() as patch, pytest.raises(ends[0], match=ends[1]):
        if not is_marked:
            patch.setattr(request.node, "get_closest_marker", lambda name: None)
        guard.send(None)
    torch.compiler.reset()
