"""The README's examples, run as they are written, and its claims about files."""

from __future__ import annotations

import re
import runpy
import shlex
import tomllib
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify
from typer.testing import CliRunner

from hookline.cli.app import app
from hookline.models.packages import import_package
from hookline.models.torchvision_import import import_torchvision
from thoroughness import tries

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def left_in(folder):
    """What examples left in a folder, but for what git ignores."""
    ignored = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    return {path.name for path in folder.iterdir()} - ignored


@pytest.mark.compiles
def test_the_python_examples_run_in_order_and_print_as_shown(tmp_path):
    namespace: dict[str, object] = {}
    shown = 0
    with chdir(tmp_path):
        for k, (language, code) in enumerate(BLOCKS):
            if language != "python":
                continue
            out = StringIO()
            with redirect_stdout(out):
                exec(compile(code, f"README block {k}", "exec"), namespace)
            if k + 1 < len(BLOCKS) and BLOCKS[k + 1][0] == "text":
                assert out.getvalue() == BLOCKS[k + 1][1]
                shown += 1
    assert shown == 2
    assert not left_in(tmp_path)


@pytest.mark.slow
def test_what_the_table_of_verbs_says_to_type_runs(tmp_path):
    rows = re.findall(r"^\| [^|]+ \| (`.*`) \|$", README, re.MULTILINE)
    assert len(rows) >= 15
    namespace: dict[str, object] = {}
    with chdir(tmp_path), redirect_stdout(StringIO()):
        exec(next(code for language, code in BLOCKS if language == "python"), namespace)
        for code in (code for row in rows for code in re.findall(r"`([^`]+)`", row)):
            exec(compile(code, code, "exec"), namespace)
    assert not left_in(tmp_path)


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "x", README, flags=re.DOTALL)
    long = [one for one in re.split(r"(?<=[.:;])\s|\n|\|", prose) if len(one.split()) > 30]
    assert long == []


PAGES = sorted((ROOT / "docs").rglob("*.md"))
# `test_docs_site.py` runs each recipe, too, without the others.
PAGES = tries(PAGES, gate=[page for page in PAGES if page.name != "recipes.md"])


# Lightning calls a name of torch's that torch has replaced.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.compiles
@pytest.mark.processes  # inductor compiles in workers
def test_the_docs_examples_run_in_order_and_print_as_shown(page, tmp_path):
    import_torchvision()  # for libraries that import it, also where its operators do not load
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```(\w+)\n(.*?)```", page.read_text(), re.DOTALL)
    if any("transformers import" in code for language, code in blocks if language == "python"):
        # It imports torchvision, which some builds of torch do only with a little help.
        import_package("transformers", page.name)
    with chdir(tmp_path):
        for k, (language, code) in enumerate(blocks):
            if language != "python":
                continue
            out = StringIO()
            with redirect_stdout(out):
                exec(compile(code, f"{page.name} block {k}", "exec"), namespace)
            if k + 1 < len(blocks) and blocks[k + 1][0] == "text":
                assert out.getvalue() == blocks[k + 1][1]


@pytest.mark.processes
def test_the_commands_run(tmp_path):
    commands = [
        line.partition("#")[0].strip()
        for language, code in BLOCKS
        if language == "bash"
        for line in code.splitlines()
    ]
    hookline = [shlex.split(line)[1:] for line in commands if line.startswith("hookline ")]
    assert len(hookline) >= 5
    for arguments in hookline:
        with chdir(tmp_path):
            result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (arguments, result.output)


def test_the_make_targets_exist():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"make ([a-z]+)", README + (ROOT / "CONTRIBUTING.md").read_text())
    assert set(named) <= set(targets)
    assert {"demo", "test", "check", "bench", "clean"} <= set(targets)


def anchors(page):
    """The anchors of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.DOTALL)
    return {
        slugify(re.sub(r"[`*]", "", title), "-") for title in re.findall(r"^#+ (.*)$", text, re.M)
    }


def test_every_link_leads_somewhere():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
    for path in (*pages, *(ROOT / "docs").rglob("*.md")):
        for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^)#:]*)\)", path.read_text()):
            target = path.parent / link if link else path
            assert target.exists(), f"{path.name}: {link}"
            if anchor:
                assert anchor in anchors(target), f"{path.name}: {link}#{anchor}"


def test_the_tables_of_costs_are_made_from_what_was_kept(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    maker = runpy.run_path(str(ROOT / "benchmarks" / "tables.py"))
    files = maker["history"].files()
    for path in maker["PAGES"]:
        text = path.read_text("utf-8")
        assert maker["PLACE"].search(text), path
        assert text == maker["page"](text, files), "run python -m benchmarks.tables"


def test_the_tables_by_version_are_made_from_what_was_kept(monkeypatch):
    matrix = runpy.run_path(str(ROOT / "release" / "matrix.py"))
    text = matrix["PAGE"].read_text("utf-8")
    assert text == matrix["page"](text, matrix["kept"]()), "run python release/matrix.py --table"
    monkeypatch.syspath_prepend(str(ROOT))
    history = runpy.run_path(str(ROOT / "benchmarks" / "history.py"))
    text = history["PAGE"].read_text("utf-8")
    assert text == history["page"](text, history["files"]()), "run python -m benchmarks.history"


def test_a_row_beyond_the_interval_of_the_last_version_is_told(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    history = runpy.run_path(str(ROOT / "benchmarks" / "history.py"))
    row = {
        "title": "record", "base": "bare", "unit": "", "target": 1.2, "verdict": "met",
        "clock": "cpu", "load": 0.1, "date": "2026-11-27",
    }  # fmt: skip
    files = [
        {"hookline": version, "machine": {"processor": "p", "cores": 2, "threads": 1,
         "device": "the CPU"}, "rows": {"tiny": {**row, "held": held}}}
        for version, held in (("0.1.0", [1.0, 0.9, 1.1]), ("0.2.0", [1.3, 1.2, 1.4]))
    ]  # fmt: skip
    assert history["regressions"](files[1], files) == [
        "tiny: 1 (0.9 to 1.1) in 0.1.0, 1.3 (1.2 to 1.4) in 0.2.0"
    ]
    assert "| record | bare | 1 (0.9 to 1.1) | 1.3 (1.2 to 1.4) | ≤ 1.2: met |" in history["table"](
        files
    )
    files[1]["rows"]["tiny"]["held"] = [1.1, 1.05, 1.2]
    assert history["regressions"](files[1], files) == []


def test_the_layout_in_the_docs_is_that_of_the_test_of_layers():
    maker = runpy.run_path(str(ROOT / "docs" / "_site" / "layout.py"))
    text = maker["PAGE"].read_text()
    assert text == maker["page"](text), "run python docs/_site/layout.py"


def test_the_files_that_the_architecture_names_are_there():
    paths = [path.as_posix() for path in (ROOT / "src" / "hookline").rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists() or any(path.endswith(f"/{name}") for path in paths), name


def test_every_dependency_is_pinned_and_no_address_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(entry for extra in extras for entry in extra)]
    names = {re.match(r"[A-Za-z0-9-]+", entry)[0].lower() for entry in wanted} - {"hookline"}
    pins = (ROOT / "constraints.txt").read_text()
    pinned = {name.lower().replace("_", "-") for name in re.findall(r"^([\w-]+)==", pins, re.M)}
    assert names <= pinned
    assert "://" not in pins
