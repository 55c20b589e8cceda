"""What a type checker makes of the package, and of a user's code outside it: mypy, strict."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from mypy import api

pytestmark = pytest.mark.slow  # mypy reads torch, unless it has before

ROOT = Path(__file__).parent.parent

CODE = """
import torch
from torch import nn
from torch.utils.data import DataLoader

import hookline as hl

model = nn.Linear(2, 3)
with hl.record(model) as run:
    model(torch.zeros(4, 2))

reveal_type(run)
reveal_type(run[""])
reveal_type(run.tensor(""))
reveal_type(run.tensor(run.sites[0]).mean())
reveal_type(run.passes[0].tensor(""))
reveal_type(run.leaves(""))
reveal_type(run.stack(""))
reveal_type(run.cat(""))
reveal_type(run.cat("", dim=1))
reveal_type(run.cat("", dim=None))
for site, value in run.items():
    reveal_type(site)
    reveal_type(value)
loader: DataLoader[torch.Tensor] = DataLoader(torch.zeros(4, 2))  # type: ignore[arg-type]
reveal_type(hl.features(model, loader, "", eval=False))
reveal_type(hl.features(model, (batch for batch in loader), "", keep=torch.mean))
opened = hl.open("folder")
reveal_type(opened)
if isinstance(opened, hl.Store):
    reveal_type(opened["fc"])
    reveal_type(opened["fc"][5:9, :3])
elif isinstance(opened, hl.Recording):
    reveal_type(opened.stack(""))
"""

REVEALED = [
    "Recording", "Any", "Tensor", "Tensor", "Tensor", "dict[str, Tensor]", "Tensor", "Tensor",
    "Tensor", "list[Any]", "str", "Any", "Recording", "Recording", "Recording | Store | Curves",
    "Column", "Tensor", "Tensor",
]  # fmt: skip


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """mypy's lines on a user's code. It shares the cache of `make check`."""
    folder = tmp_path_factory.mktemp("user")

    def check(code: str) -> list[str]:
        file = folder / "code.py"
        file.write_text(code)
        out, err, _ = api.run([
            "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache"),
            "--no-error-summary", str(file),
        ])  # fmt: skip
        assert not err
        return [line.partition(".py:")[2] for line in out.splitlines()]

    return check


@pytest.mark.processes
def test_the_package_passes_mypy_strictly():
    """First in this file: the others read the cache that it writes."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_look_ups_have_the_types_that_they_say(check):
    found = [re.search('Revealed type is "(.*)"', line) for line in check(CODE)]
    assert all(found)
    # Without the modules, which mypy writes in its own way: `builtins.str`, `torch._tensor.Tensor`.
    assert [re.sub(r"[\w.]+\.", "", one[1]) for one in found] == REVEALED


def test_what_is_no_look_up_is_an_error_before_it_runs(check):
    lines = check(
        CODE.partition("reveal_type")[0]
        + 'run.tensor(0)\nrun.cat("", dim="x")\nhl.features(model, [torch.zeros(1)], "")\n'
    )
    assert len(lines) >= 3
    assert all("error:" in line or "note:" in line for line in lines)
    assert {line.partition(":")[0] for line in lines} == {"12", "13", "14"}
