"""Optional packages. The commands are for a checkout, as hookline is on no index."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest

from hookline.util.optional_imports import how_to_install, module_if_imported, require

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
        for names in re.findall(r"how_to_install\((['\"][^)]*['\"])\)", text):
            found |= set(re.findall(r"['\"](\w+)['\"]", names))
    assert {"cli", "page", "plots", "store", "all"} <= found
    assert found <= project["optional-dependencies"].keys()


def test_a_module_is_found_once_its_import_has_ended(tmp_path, monkeypatch):
    (tmp_path / "found_later.py").write_text(
        "from hookline.util.optional_imports import module_if_imported as m\nSEEN = m(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert module_if_imported("found_later") is None
    module = importlib.import_module("found_later")
    assert module.SEEN is None
    assert module_if_imported("found_later") is module
    monkeypatch.delitem(sys.modules, "found_later")


def test_what_is_installed_is_given():
    assert require("json.decoder", "", "", ValueError).__name__ == "json.decoder"


def test_a_package_whose_own_import_fails_names_the_reason(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^it needs half_there, got .*that_is_not_there") as told:
        require("half_there", "it needs half_there", "Run pip install half_there.", ValueError)
    assert str(told.value).endswith(".\nRun pip install half_there.")
