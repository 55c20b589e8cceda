"""What is published: one version, the same bytes twice, and nothing while it is not ready."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import hookline as hl

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
FOR_DEVELOPERS = {"all", "docs", "bench", "test", "check", "release"}


def script(name: str):
    """Import a script of release/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_the_version_is_written_in_one_place():
    written = f'VERSION = "{hl.__version__}"'
    path = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert written in path.read_text("utf-8")
    assert "version" not in PROJECT["project"]
    assert f"\nversion: {hl.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"## {hl.__version__} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_each_extra_for_users_is_installed_alone_and_used():
    extras = set(PROJECT["project"]["optional-dependencies"]) - FOR_DEVELOPERS
    assert set(script("install").EXTRAS) == set(script("smoke").EXTRAS) == extras


def test_what_the_bare_package_is_smoke_tested_for_works(tmp_path):
    script("smoke").bare(tmp_path)


def test_the_description_of_the_package_has_absolute_links(monkeypatch):
    plugin = SimpleNamespace(MetadataHookInterface=object)  # hatchling is there where it builds
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", plugin)
    hook = script("long_description").LongDescription()
    hook.root, metadata = str(ROOT), {"urls": PROJECT["project"]["urls"]}
    hook.update(metadata)
    readme, text = (ROOT / "README.md").read_text("utf-8"), metadata["readme"]["text"]
    base = f"{PROJECT['project']['urls']['Source']}"
    tag = f"v{hl.__version__}"
    assert f"]({base}/raw/{tag}/docs/overview.png)" in text
    assert f"]({base}/blob/{tag}/docs/where-it-works.md#torchcompile)" in text
    assert re.sub(rf"{base}/(raw|blob)/{tag}/", "", text) == readme
    dist = script("dist")
    dist.refuse_relative_links(text)
    with pytest.raises(dist.DistError, match=r"absolute links, got \['docs/traps.md'"):
        dist.refuse_relative_links(readme)


def test_placeholders_and_an_undated_version_are_not_published():
    dist = script("dist")
    ready = "## 9.9.9 (2026-01-02)\n"
    dist.refuse_unready('Source = "https://somewhere/"', ready, "9.9.9")
    with pytest.raises(dist.DistError, match=r"addresses, got \.example"):
        dist.refuse_unready((ROOT / "pyproject.toml").read_text("utf-8"), ready, "9.9.9")
    with pytest.raises(dist.DistError, match=r"the day of 9\.9\.9"):
        dist.refuse_unready("", "## 9.9.9 (unreleased)\n", "9.9.9")


def test_the_files_that_the_matrix_selects_are_there():
    matrix = script("matrix")
    paths = [path for _, *paths in (*matrix.SELECTIONS, *matrix.SHORT) for path in paths]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_selection_without_tests_is_no_result_of_the_matrix(monkeypatch):
    matrix = script("matrix")
    environment = matrix.ENVIRONMENTS[0]
    monkeypatch.setattr(matrix.Environment, "versions", lambda self: {})

    def end_without_tests(command, **options):
        (report,) = (part for part in command if str(part).startswith("--junitxml="))
        Path(report.removeprefix("--junitxml=")).write_text("<testsuites/>", "utf-8")
        return SimpleNamespace(returncode=4)

    monkeypatch.setattr(matrix.subprocess, "run", end_without_tests)
    with pytest.raises(matrix.MatrixError, match="pytest ended with 4, and ran no tests"):
        environment.run((("slow", "tests/gone.py"),))


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name
)
def test_actions_are_pinned_by_a_whole_commit(path):
    uses = re.findall(r"uses: (\S+)", path.read_text("utf-8"))
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w./-]+@[0-9a-f]{40}", action), action
