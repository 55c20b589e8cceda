"""The last column of docs/traps.md, from the marks on the tests that are named for a trap.

    @pytest.mark.trap(17)

`python tests/traps/table.py` writes it anew; a test says when that was forgotten. Rows without a
number name their tests by hand.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "traps.md"
ROW = re.compile(r"^\| (\d+) \|(.*?)\|(.*?)\|.*\|$", re.MULTILINE)
NUMBERS = range(1, 42)


class Proof(NamedTuple):
    """A test that is named for a trap."""

    trap: int
    file: str
    test: str
    fails: bool  # a line is not right there yet, and an xfail says so


def proofs(folder: Path = TESTS) -> list[Proof]:
    """Every test that is marked with a trap, in the order of the files and tests."""
    return [
        proof
        for path in sorted(folder.rglob("test_*.py"))
        for proof in _proofs_of(path, path.relative_to(folder).as_posix())
    ]


def _proofs_of(path: Path, file: str) -> Iterator[Proof]:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        fails = any("mark.xfail" in ast.unparse(mark) for mark in node.decorator_list)
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trap":
                number = ast.literal_eval(mark.args[0])
                if number not in NUMBERS:
                    raise ValueError(f"{file}: {node.name}: there is no trap {number}")
                yield Proof(number, file, node.name, fails)


def cell(trap: int, found: list[Proof]) -> str:
    """The tests of one trap: the file once, `::test` for the next ones in it."""
    shown, last = [], ""
    for proof in found:
        if proof.trap == trap:
            name = f"`{proof.file if proof.file != last else ''}::{proof.test}`"
            shown.append(name + " (it does not pass yet)" * proof.fails)
            last = proof.file
    return ", ".join(shown)


def page(text: str, found: list[Proof]) -> str:
    """The page, with the tests of every numbered row in their place."""
    return ROW.sub(lambda row: f"| {row[1]} |{row[2]}|{row[3]}| {cell(int(row[1]), found)} |", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), proofs()))
