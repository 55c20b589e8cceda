"""The documentation as a site: built strictly, complete, and used without a network.

The tutorials are run in a real kernel as the site is built: what they show is what they give."""

from __future__ import annotations

import base64
import math
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import chdir, redirect_stdout
from html import unescape
from io import BytesIO, StringIO
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import hookline as hl
from hookline.cli.app import app
from hookline.models.packages import import_package
from hookline.models.torchvision_import import import_torchvision
from test_public_names import NAMES, SIGNATURES, SURFACES
from thoroughness import tries
from warm import run_python

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "docs" / "_site"
MAPPING = {"get", "items", "keys", "values"}  # one example shows what every mapping has


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder that `make docs` makes."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = run_python(TOOLS / "build.py", "--out", folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(folder / "index.html") in done.stdout
    return folder


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import check

    yield check
    sys.modules.pop("check")


@pytest.fixture
def opened(browser):
    """`opened(path)`: a page from its file, all that it has asked for, and its errors."""
    page = browser.new_page()
    asked: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def opened(path):
        page.goto(f"file://{path}", wait_until="networkidle")
        return page, asked, errors

    yield opened
    page.close()


def sections(html):
    """The sections of an API page: each heading with the HTML up to the next."""
    parts = re.split(r"<h[12][^>]*>(.*?)</h[12]>", html, flags=re.DOTALL)
    names = [unescape(re.sub(r"<[^>]*>|¶|&para;", "", name)).strip() for name in parts[1::2]]
    return dict(zip(names, parts[2::2], strict=True))


def public_names():
    yield from (f"hl.{name}" for name in NAMES if name not in ("edits", "plots", "stats"))
    for module in ("edits", "plots", "stats"):
        yield from (f"hl.{module}.{name}" for name in SURFACES[module][1])
    raw = set(SURFACES["RawLine"][1]) - {"name", *LINE}
    yield from (f"hl.RawLine.{name}" for name in sorted(raw))
    yield from (f"hl.Line.{name}" for name in LINE)
    yield from (f"hl.Recording.{name}" for name in SURFACES["Recording"][1])


LINE = ("remove", "report")
ATTRIBUTES = {
    f"hl.Recording.{name}": f"run.{name}"
    for name in ("lost", "modules", "ranks", "sites", "to_pandas")
}
ATTRIBUTES |= {f"hl.Recording.{name}": "hl.Recording" for name in MAPPING}


@pytest.mark.slow
@pytest.mark.processes
def test_every_page_is_built_and_weighs_little(site):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs").with_suffix(".html")).exists(), page
    for script in (ROOT / "examples").glob("*.py"):
        assert script.name in (site / "examples" / f"{script.stem}.html").read_text()
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    assert size < 15 * 2**20


@pytest.mark.slow
@pytest.mark.processes
def test_every_file_of_the_package_is_listed_with_its_purpose(site):
    listed = sections((site / "files.html").read_text())
    for path in (ROOT / "src" / "hookline").rglob("*.py"):
        folder = path.parent.relative_to(ROOT / "src").as_posix()
        assert path.stem == "__init__" or path.name in listed[f"{folder}/"], path


KEEP = (
    "keep: Callable[[Any], Any] | None", "device: torch.device | str | None",
    "dtype: torch.dtype | None", "detach: bool", "copy: bool | None",
)  # fmt: skip
OPTIONS = {
    "record": KEEP,
    "features": KEEP,
    "extract": (
        KEEP[0], KEEP[2], "mask: str | Callable[[Any], torch.Tensor] | None",
        "inputs: Callable[[Any], Any] | None", "workers: int",
        "on_error: Literal['raise', 'skip']", "preprocess: Callable[[Any], Any] | None",
        "tokenize: Callable[..., Any] | None", "eval: bool", "shard_bytes: int", "progress: bool",
    ),
    "sweep": ("rows: int", "to: str | os.PathLike[str] | None", "progress: bool"),
    "attribute": ("along: Selector | None", "steps: int | None", "check: int"),
}  # fmt: skip


@pytest.mark.slow
def test_options_stand_in_the_signatures_with_their_types(make_site):
    text = make_site.signatures_page(ROOT / "docs" / "api")
    assert "**options" not in text
    for name, options in OPTIONS.items():
        assert ", ".join(f"{option} = ..." for option in options) in text, name


@pytest.mark.slow
def test_the_plain_text_of_a_table_has_a_line_for_each_row(make_site):
    row = "<tr><{0}>{1}</{0}><{0} class='number'>{2}</{0}></tr>"
    table = f"<table>{row.format('th', 'site', 'n')}{row.format('td', 'fc', 8)}</table>"
    shown = f'<div class="output"><svg><text>9</text></svg>{table}<p>a<br>b</p></div>'
    text = sys.modules["llms"].plain_text(f"Said\n\n{shown}")
    assert text.split("\n") == ["Said", "", "site | n", "fc | 8", "a", "b", ""]


@pytest.mark.slow
@pytest.mark.processes
def test_every_public_name_is_among_the_signatures(site):
    lines = re.findall(
        r"^- `(hl\.[\w.]+)(.*?)`: \w.*\.$", (site / "signatures.md").read_text(), re.M
    )
    signatures = dict(lines)
    names = {ATTRIBUTES.get(name, name) for name in public_names()}
    by_hand = {name for name in names if name.startswith("run.")} | {"hl.EVERYWHERE"}
    assert names - by_hand <= signatures.keys()
    for name, expected in SIGNATURES.items():
        if f"hl.{name}" in signatures:
            options = ", ".join(f"{option} = ..." for option in OPTIONS.get(name, ()))
            whole = expected.replace("**options", options)
            assert signatures[f"hl.{name}"] == re.sub(r"^\(self(, )?", "(", whole)


@pytest.mark.slow
@pytest.mark.processes
def test_every_public_name_has_an_entry_with_an_example(site):
    entries = {}
    for page in (site / "api").glob("*.html"):
        entries |= sections(page.read_text())
    for name in public_names():
        entry = entries.get(ATTRIBUTES.get(name, name))
        assert entry is not None, f"{name} has no entry in docs/api"
        assert "<code" in re.sub(r'<div class="doc-signature.*?</div>', "", entry), name
        if name.rpartition(".")[2] in MAPPING:
            assert f"{name.rpartition('.')[2]}(" in re.sub(r"<[^>]*>", "", entry)


@pytest.mark.slow
@pytest.mark.processes
def test_the_tutorial_shows_what_its_cells_give(site):
    text = (site / "tutorial.html").read_text()
    assert text.count('alt="The figure of the cell above"') >= 6
    assert "<table" in text
    assert "8 right" in text
    assert "forwards" in (site / "tutorial-sweep.html").read_text()
    assert "layers.0.norm1 in b" in (site / "tutorial-port.html").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_it_works_from_files_and_asks_no_other_machine(site, opened):
    for name in ("index", "recipes", "tutorial", "where-it-works", "api/verbs", "examples/index"):
        page, asked, errors = opened(site / f"{name}.html")
        assert page.locator("h1").inner_text().strip()
    page.get_by_role("button", name="Search").first.click()
    page.keyboard.type("steering", delay=5)
    page.locator("a[href*='editing.html?h=steering']").first.click()
    page.wait_for_url("**/editing.html?h=steering*")
    assert not errors
    assert len(asked) > 10
    assert not [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]


@pytest.mark.processes
def test_a_request_to_another_machine_would_be_seen(tmp_path, opened):
    (tmp_path / "page.html").write_text('<img src="http://127.0.0.1:9/picture.png">')
    _, asked, _ = opened(tmp_path / "page.html")
    assert "http://127.0.0.1:9/picture.png" in asked


FAULTS = {
    '<a href="gone.html">': "no such file",
    '<a href="other.html#gone">': "no such anchor",
    '<a href="#gone">': "no such anchor",
    '<a href="folder">': "a folder",
    '<a href="/other.html">': "an absolute path",
    '<script src="https://example.org/a.js">': "fetched from another machine",
    '<link href="//example.org/a.css">': "fetched from another machine",
    '<a href="other.html#here">': None,
    '<a href="https://example.org">': None,
}


@pytest.mark.slow
@pytest.mark.parametrize("html", FAULTS)
def test_links_that_lead_nowhere_are_named(check, tmp_path, html):
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.html").write_text('<h1 id="here">')
    (tmp_path / "index.html").write_text(html)
    faults = check.faults_of_links(tmp_path)
    assert len(faults) == (FAULTS[html] is not None)
    assert all(f"index.html: {FAULTS[html]}" in fault for fault in faults)


def test_pages_outside_the_navigation_and_missing_are_named(check, tmp_path):
    (tmp_path / "there.md").write_text("# There")
    assert check.faults_of_navigation(tmp_path, ["there.md"]) == []
    assert check.faults_of_navigation(tmp_path, ["gone.md"]) == [
        "mkdocs.yml: nav has no entry for docs/there.md",
        "mkdocs.yml: nav names docs/gone.md, which is missing",
    ]


RECIPES = (ROOT / "docs" / "recipes.md").read_text()


INDEX, _, AFTER_INDEX = RECIPES.partition("## The models used here")
SECTIONS = re.findall(r"^### (.*)\n((?:(?!^##).*\n)*)", AFTER_INDEX, re.M)


def test_every_recipe_is_short():
    for title, text in SECTIONS:
        code = re.findall(r"```(?:python|bash)\n(.*?)```", text, re.DOTALL)
        lines = [line for line in code[-1].splitlines() if line.strip()]
        assert len(lines) <= 8, title
        assert len(lines) >= 3 or "hl." in code[-1], title


def test_the_index_lists_the_recipes_in_order():
    rows = re.findall(r"^\| (?:\*\*(.*?)\*\*|\[(.*?)\]\(#(.*?)\)) \|", INDEX, re.M)
    assert all(slug(title) == anchor for _, title, anchor in rows if title)
    assert [group or title for group, title, _ in rows] == re.findall(
        r"^###? (.*)$", AFTER_INDEX, re.M
    )


def test_the_index_shows_code_of_the_recipes():
    rows = re.findall(r"^\| \[(.*?)\]\(#.*?\) \| (.*) \|$", INDEX, re.M)
    assert len(rows) == len(SECTIONS) > 40
    for (title, shown), (_, text) in zip(rows, SECTIONS, strict=True):
        code = "".join(re.findall(r"```(?:python|bash)\n(.*?)```", text, re.DOTALL))
        for fragment in re.findall(r"`(.*?)`", shown):
            assert all(part in code for part in fragment.split("...)")), (title, fragment)


# Lightning calls a name of torch's that torch has replaced.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.slow
def test_each_recipe_runs_without_the_others(tmp_path):
    import_torchvision()  # for libraries that import it, also where its operators do not load
    import_package("transformers", "recipes.md")
    shared: dict[str, object] = {}
    exec(re.findall(r"```python\n(.*?)```", AFTER_INDEX, re.DOTALL)[0], shared)
    # From the last to the first: a recipe that leaves something behind changes those before it.
    for k, (title, text) in enumerate(reversed(SECTIONS)):
        namespace = dict(shared)
        (tmp_path / str(k)).mkdir()
        blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)
        with chdir(tmp_path / str(k)):
            for code, printed in blocks:
                out = StringIO()
                with redirect_stdout(out):
                    exec(compile(code, title, "exec"), namespace)
                assert not printed or out.getvalue() == printed, title


def test_every_script_has_a_recipe():
    for script in (ROOT / "examples").glob("*.py"):
        assert f"(../examples/{script.name})" in RECIPES, script.name


@pytest.mark.slow
def test_features_of_a_folder_come_from_the_recipes_command(tmp_path):
    (command,) = re.findall(r"^hookline extract torchvision:resnet50 photos .*$", RECIPES, re.M)
    (tmp_path / "photos").mkdir()
    for k in range(2):
        Image.new("RGB", (300, 260), (40 * k, 90, 120)).save(tmp_path / "photos" / f"{k}.png")
    with chdir(tmp_path):
        result = CliRunner().invoke(app, [*shlex.split(command)[1:], "--weights", "none"])
        assert result.exit_code == 0, result.output
    store = hl.open(tmp_path / "features")
    assert store["avgpool"].shape == (2, 2048, 1, 1)
    assert store.names == ["0.png", "1.png"]


@pytest.fixture
def make_site(monkeypatch):
    """The module that builds the site."""
    monkeypatch.syspath_prepend(str(TOOLS))
    import build

    yield build
    for name in ("build", "check", "llms", "files", "signatures"):
        sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("[gone](index.md#gone)", "anchor"),
        ("::: hookline.nothing", "nothing"),
        *tries([("[gone](gone.md)", "gone.md"), ("Fine: [here](#here)\n\n## Here", None)], gate=[]),
    ],
)
def test_the_generator_is_strict(make_site, tmp_path, page, said):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Title\n\n{page}\n")
    (tmp_path / "mkdocs.yml").write_text(
        f"site_name: x\nnav: [index.md]\nplugins:\n  - mkdocstrings:\n      handlers:\n"
        f"        python:\n          paths: ['{ROOT / 'src'}']\n"
    )
    if said is None:
        make_site.generate(tmp_path)
    else:
        with pytest.raises(make_site.BuildError, match=rf"(?s)^(?!.*Traceback).*{said}"):
            make_site.generate(tmp_path)


TASKS = {
    "record the output of every convolution": "hl.record(",
    "gradients of intermediate tensors": "hl.record(",
    "clip gradients by their total norm": "hl.clip(",
    "multiply the output of a layer by a factor": "hl.edits.scale",
    "patch an activation from one run into another": "hl.edits.patch(",
    "steer GPT-2 while it generates": "hl.edit(",
    "print each module as it runs": "hl.watch(",
    "monitor weights and gradients in training": "hl.monitor(",
    "which layer is slow in backward": "hl.profile(",
    "logit lens": "hl.record(",
    "record in a Hugging Face Trainer": "hl.record(",
    "load my own checkpoint": "load_model(",
    "find the first NaN": "hl.check(",
    "which units are dead": "hl.record(",
    "why does my hook not fire": "hl.doctor(",
    "list every hook on a model": "hl.inventory(",
    "count the parameters and FLOPs of each module": "hl.summary(",
    "which pixels speak for a class": "hl.cam(",
    "register raw hooks of every kind": "hl.attach(",
    "save a recording to a folder and open it": "hl.open(",
    "run batches of a DataLoader up to a layer for features": "hl.features(",
    "extract the activations of a data set to disk": "hl.extract(",
    "resume an extraction that was killed": "hl.extract(",
    "run an extraction on a Ray cluster": "hl.extract(",
    "shuffle stored rows to train a probe": "store.shuffled(",
    "which layer and position carries a behaviour": "hl.sweep(",
    "attribution patching with one backward": "hl.attribute(",
}


def words(text):
    found = re.findall(r"[a-z0-9]+", text.lower())
    return Counter(re.sub(r"(?<=..)(s|ed|ing)$", "", word) for word in found)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("task", TASKS)
def test_llms_txt_leads_a_task_to_its_verb(site, task):
    entries = re.findall(r"^ *- \[(.*?)\]\((\S+?)\)(.*)$", (site / "llms.txt").read_text(), re.M)
    bags = [words(title) + words(title) + words(about) for title, _, about in entries]
    spread = Counter(word for bag in bags for word in bag)
    wanted = words(task).keys()

    def score(k):
        shared = wanted & bags[k].keys()
        rare = (math.log(len(bags) / spread[word]) * min(bags[k][word], 2) for word in shared)
        return sum(rare) / math.sqrt(20 + sum(bags[k].values()))

    best = max(range(len(entries)), key=score)
    uri, _, anchor = entries[best][1].partition("#")
    text = (site / uri).read_text()
    if anchor:
        text = section(text, anchor)
    assert TASKS[task] in text, (entries[best][:2], text[:300])


def slug(title):
    """The anchor of a heading."""
    from markdown.extensions.toc import slugify

    return slugify(re.sub(r"[`*]", "", title), "-")


def section(text, anchor):
    """The part of a page from the heading with this anchor to the next one."""
    bare = re.sub(r"^```.*?^```$", lambda code: " " * len(code[0]), text, flags=re.M | re.DOTALL)
    headings = list(re.finditer(r"^#+ (.*)$", bare, re.M))
    ends = [heading.start() for heading in headings[1:]] + [len(text)]
    for heading, end in zip(headings, ends, strict=True):
        if slug(heading[1]) == anchor:
            return text[heading.end() : end]
    raise AssertionError(f"no heading for {anchor}")


@pytest.mark.slow
@pytest.mark.processes
def test_llms_full_txt_holds_every_page_with_its_docstrings(site):
    whole = (site / "llms-full.txt").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert f"<!-- {page.relative_to(ROOT / 'docs').as_posix()} -->" in whole
    assert "\n::: " not in whole
    assert "Record the values at the selected sites" in whole
    assert "<div" not in re.sub(r"^```.*?^```$", "", whole, flags=re.M | re.DOTALL)


@pytest.mark.processes
def test_make_demo_ends_with_the_place_of_the_documentation(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("python", "hookline"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for stamp in (".torch", ".demo"):
        (tmp_path / stamp).touch()
    command = ["make", "--no-print-directory", "demo", f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    last = " ".join(done.stdout.splitlines()[-2:])
    named = re.findall(r"docs/[\w-]+\.md", last)
    assert len(named) >= 2
    assert all((ROOT / name).exists() for name in named)
    assert "make docs" in last


def test_what_make_docs_writes_is_ignored_by_git():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^docs: .*\n\t.*docs/_site/build\.py$", makefile, re.M)
    assert "/site/" in (ROOT / ".gitignore").read_text().split()


# -- the tutorials -------------------------------------------------------------------------------

# How many cells at least give a text, and HTML.
NOTEBOOKS = {
    "tutorial.ipynb": {"text/plain": 4, "text/html": 4},
    "tutorial_sweep.ipynb": {"text/plain": 7, "text/html": 1},
    "tutorial_port.ipynb": {"text/plain": 7, "text/html": 0},
}
NUMBER = re.compile(r"(?<![\w#])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module", params=NOTEBOOKS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def shown(name):
    return nbformat.read(ROOT / "examples" / name, as_version=4)


@pytest.fixture(scope="module")
def executed(name, site):
    """The notebook as the site offers it, which has been run in a real kernel."""
    return nbformat.read(site / name, as_version=4)


def outputs(notebook, kind):
    """What the code cells gave of one kind: each cell's text, or its pictures."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        parts = [out.get("data", {"text/plain": out.get("text", "")}) for out in cell.outputs]
        found.append([part[kind] for part in parts if kind in part])
    return found


def words_and_numbers(text):
    """The text with its numbers taken out, and those; times of a run are left out."""
    text = re.sub(r"~?\d+\.\d+ ms", "ms", text)
    return " ".join(NUMBER.sub("N", text).split()), [float(n) for n in NUMBER.findall(text)]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
def test_a_tutorial_shows_what_it_gives(name, shown, executed, kind):
    cells = list(zip(outputs(shown, kind), outputs(executed, kind), strict=True))
    assert sum(map(bool, outputs(executed, kind))) >= NOTEBOOKS[name][kind]
    for before, now in cells:
        words, numbers = words_and_numbers("".join(before))
        words_now, numbers_now = words_and_numbers("".join(now))
        assert words_now == words
        assert numbers_now == pytest.approx(numbers, rel=2e-2, abs=1e-4)


@pytest.mark.processes
def test_nothing_is_displayed_twice_or_goes_to_stderr(executed):
    for cell in executed.cells:
        if cell.cell_type == "code":
            kinds = [out.output_type for out in cell.outputs]
            assert kinds.count("execute_result") <= 1
            assert "display_data" not in kinds
            assert "stderr" not in [out.get("name") for out in cell.outputs]


@pytest.mark.processes
def test_figures_of_a_tutorial_are_pictures(shown, executed):
    for before, now in zip(
        outputs(shown, "image/png"), outputs(executed, "image/png"), strict=True
    ):
        assert len(before) == len(now)
        for pictures in zip(before, now, strict=True):
            sizes = [Image.open(BytesIO(base64.b64decode(png))).size for png in pictures]
            assert sizes[0] == sizes[1]
            assert min(sizes[0]) > 90


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)

    def forward(self, x):
        y = self.fc(self.fc(x))
        return y, 1.5, torch.complex(y, -y).to(torch.complex128)


def test_the_reader_in_numpy_reads_each_call_and_leaf(tmp_path):
    reader = {}
    page = (ROOT / "docs" / "format.md").read_text()
    exec(re.search(r"```python\n(.*?)```", page, re.S)[1], reader)
    net = Twice()
    with hl.record(net, ["**", "(root):output[2]"]) as run:
        net(torch.ones(1, 2))
    run.save(tmp_path / "run")
    seen = reader["read_recording"](tmp_path / "run")[0]
    assert np.array_equal(seen["fc:output"], [run[f"fc#{k}"].numpy(force=True) for k in (0, 1)])
    assert float.fromhex(seen[":output"][0]["1"]) == 1.5
    assert np.array_equal(seen[":output[2]"][0], run["(root):output[2]"].numpy(force=True))
