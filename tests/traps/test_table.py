"""docs/traps.md has a row for each trap, and tests/traps/README.md names its tests."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MAKER = runpy.run_path(str(Path(__file__).parent / "table.py"))


@pytest.mark.slow
def test_the_page_is_up_to_date():
    text = MAKER["PAGE"].read_text()
    assert text == MAKER["page"](text, MAKER["proofs"]()), "run python tests/traps/table.py"


@pytest.mark.slow
def test_every_trap_has_one_row_and_a_test():
    numbers = list(MAKER["NUMBERS"])
    assert sorted({proof.trap for proof in MAKER["proofs"]()}) == numbers
    assert [int(row[1]) for row in MAKER["ROW"].finditer(MAKER["TRAPS"].read_text())] == numbers


def test_tests_of_one_file_name_it_once_and_failing_ones_say_so(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "@pytest.mark.trap(3)\n@pytest.mark.trap(4)\ndef test_a(): ...\n"
        "@pytest.mark.xfail(strict=True)\n@pytest.mark.trap(3)\ndef test_b(): ...\n"
    )
    text = MAKER["page"](f"| 3 | raw | line |\n{MAKER['BEGIN']}old", MAKER["proofs"](tmp_path))
    assert text.startswith(f"| 3 | raw | line |\n{MAKER['BEGIN']}")
    assert "- **3**: `test_one.py`: `test_a`, `test_b` (it does not pass yet)\n" in text
    assert "- **4**: `test_one.py`: `test_a`\n" in text
    assert "old" not in text


def test_a_trap_that_there_is_not_is_an_error(tmp_path):
    (tmp_path / "test_one.py").write_text("@pytest.mark.trap(46)\ndef test_a(): ...\n")
    with pytest.raises(ValueError, match="no trap 46"):
        MAKER["proofs"](tmp_path)
