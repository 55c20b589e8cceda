"""The tutorial notebooks, run in a real kernel: what they show is what they give."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"
# How many cells at least give a text, and HTML.
NOTEBOOKS = {
    "tutorial.ipynb": {"text/plain": 4, "text/html": 4},
    "tutorial_sweep.ipynb": {"text/plain": 7, "text/html": 1},
    "tutorial_port.ipynb": {"text/plain": 7, "text/html": 0},
}
NUMBER = re.compile(r"(?<![\w#])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", params=NOTEBOOKS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def shown(name):
    return nbformat.read(EXAMPLES / name, as_version=4)


@pytest.fixture(scope="module")
def executed(name, tmp_path_factory):
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    folder = tmp_path_factory.mktemp("tutorial")
    resources = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=300, resources=resources).execute()


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


@pytest.mark.parametrize("kind", ["text/plain", "text/html"])
def test_it_shows_what_it_gives(name, shown, executed, kind):
    cells = list(zip(outputs(shown, kind), outputs(executed, kind), strict=True))
    assert sum(map(bool, outputs(executed, kind))) >= NOTEBOOKS[name][kind]
    for before, now in cells:
        words, numbers = words_and_numbers("".join(before))
        words_now, numbers_now = words_and_numbers("".join(now))
        assert words_now == words
        assert numbers_now == pytest.approx(numbers, rel=2e-2, abs=1e-4)


def test_nothing_is_displayed_twice_or_goes_to_stderr(executed):
    for cell in executed.cells:
        if cell.cell_type == "code":
            kinds = [out.output_type for out in cell.outputs]
            assert kinds.count("execute_result") <= 1
            assert "display_data" not in kinds
            assert "stderr" not in [out.get("name") for out in cell.outputs]


def test_its_figures_are_pictures(shown, executed):
    for before, now in zip(
        outputs(shown, "image/png"), outputs(executed, "image/png"), strict=True
    ):
        assert len(before) == len(now)
        for one, other in zip(before, now, strict=True):
            sizes = [Image.open(BytesIO(base64.b64decode(png))).size for png in (one, other)]
            assert sizes[0] == sizes[1]
            assert min(sizes[0]) > 90
