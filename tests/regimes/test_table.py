"""The tables of docs/where-it-works.md say what the tests prove."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MAKER = runpy.run_path(str(Path(__file__).parent / "table.py"))


@pytest.mark.slow
def test_the_tables_are_up_to_date():
    text = MAKER["PAGE"].read_text()
    assert text == MAKER["page"](text, MAKER["cells"]()), "run python tests/regimes/table.py"
    assert MAKER["PROOFS"].read_text() == MAKER["proofs"](MAKER["cells"]())


def test_a_condition_and_a_refusal_are_shown_and_explained(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.cell('autocast', 'record', 'edit')\n"
        "@pytest.mark.cell('autocast', 'statistics', note='In float32.')\n"
        "def test_it(): pass\n"
        "@pytest.mark.cell('nested tensors', 'record', refused='AttachError', note='No.')\n"
        "def test_no(): pass\n"
    )
    text = MAKER["tables"](MAKER["cells"](tmp_path))
    assert "## Training and compilation\n" in text
    assert "| regime | record | statistics | edit |\n" in text
    assert "| autocast | yes | yes\\* | yes |\n" in text
    assert "- **autocast**, *statistics*: In float32.\n" in text
    assert "| nested tensors | refused |\n" in text
    assert "- **nested tensors**: `AttachError`: No.\n" in text
    proofs = MAKER["proofs"](MAKER["cells"](tmp_path))
    assert "- **nested tensors**: `test_one.py`: `test_no`\n" in proofs


def test_a_test_over_all_regimes_proves_the_cells_of_each(tmp_path):
    (tmp_path / "test_one.py").write_text("@each('check')\ndef test_it(regime, site): ...\n")
    found = {cell.regime: cell.verbs for cell in MAKER["cells"](tmp_path)}
    assert found["autocast"] == found["torch.compile"] == ("check",)
    assert "DataParallel" not in found


def test_notes_of_one_regime_stand_together(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.cell('DDP', 'record', 'edit', note='Each rank.')\n"
        "@pytest.mark.cell('DDP', 'clip', refused='AttachError', note='Raises `AttachError`.')\n"
        "def test_it(): pass\n"
    )
    text = MAKER["tables"](MAKER["cells"](tmp_path))
    assert "| DDP | yes\\* | yes\\* | refused |\n" in text
    notes = "- **DDP**\n    - *record, edit*: Each rank.\n    - *clip*: Raises `AttachError`.\n"
    assert notes in text


def test_a_regime_without_a_group_is_an_error(tmp_path):
    (tmp_path / "test_one.py").write_text("@pytest.mark.cell('DPP', 'record')\ndef t(): ...\n")
    with pytest.raises(ValueError, match="no group in GROUPS has 'DPP'"):
        MAKER["tables"](MAKER["cells"](tmp_path))


def test_a_verb_that_is_misspelt_is_an_error(tmp_path):
    (tmp_path / "test_one.py").write_text("@pytest.mark.cell('autocast', 'recrod')\ndef t(): ...\n")
    with pytest.raises(ValueError, match="recrod"):
        MAKER["cells"](tmp_path)
