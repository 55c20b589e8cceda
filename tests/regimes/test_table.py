"""The table of docs/regimes.md says what the tests prove."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MAKER = runpy.run_path(str(Path(__file__).parent / "table.py"))


def test_the_table_is_up_to_date():
    text = MAKER["PAGE"].read_text()
    assert text == MAKER["page"](text, MAKER["cells"]()), "run python tests/regimes/table.py"


def test_a_condition_and_a_refusal_are_shown_and_explained(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.cell('autocast', 'record', 'edit')\n"
        "@pytest.mark.cell('autocast', 'statistics', note='in float32')\n"
        "def test_it(): pass\n"
        "@pytest.mark.cell('tracing', 'record', refused='AttachError')\n"
        "def test_no(): pass\n"
    )
    text = MAKER["table"](MAKER["cells"](tmp_path))
    assert "| autocast | yes |  | yes (1) | yes |" in text
    assert "| tracing | refused (2) |" in text
    assert "1. autocast: in float32\n2. tracing: `AttachError`\n" in text
    assert "- tracing: `test_one.py::test_no`" in text


def test_a_verb_that_is_misspelt_is_an_error(tmp_path):
    (tmp_path / "test_one.py").write_text("@pytest.mark.cell('autocast', 'recrod')\ndef t(): ...\n")
    with pytest.raises(ValueError, match="recrod"):
        MAKER["cells"](tmp_path)
