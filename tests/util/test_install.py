"""The commands that install extras: they are for a checkout, as hookline is on no index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from hookline.util.install import how_to_install

ROOT = Path(__file__).parents[2]


def test_the_command_ends_the_line():
    said = how_to_install("vision", options="--force-reinstall")
    assert said.endswith(': pip install --force-reinstall ".[vision]"')


def test_every_command_installs_a_checkout_with_extras_it_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/hookline/**/*.py")]
    found = set()
    for path in paths:
        text = path.read_text()
        assert not re.search(r'pip install [^`\n]*"?hookline\b', text), path
        for names in re.findall(r'pip install [^`\n]*"\.\[([\w,]+)\]"', text):
            found |= set(names.split(","))
        for names in re.findall(r"how_to_install\(('[^)]*')\)", text):
            found |= set(re.findall(r"'(\w+)'", names))
    assert {"cli", "page", "plots", "all"} <= found <= project["optional-dependencies"].keys()
