"""The list of tests of each row of docs/traps.md, from the marks on the tests that are for a trap.

    @pytest.mark.trap(17)

`python tests/traps/table.py` writes it anew; a test says when that was forgotten.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent
TRAPS = TESTS.parent / "docs" / "traps.md"
PAGE = TESTS / "traps" / "README.md"
BEGIN = "<!-- made by tests/traps/table.py -->\n"
ROW = re.compile(r"^\| (\d+) \|", re.MULTILINE)
NUMBERS = range(1, 46)


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
    text = path.read_text()
    for node in ast.parse(text).body if "mark.trap(" in text else ():
        if not isinstance(node, ast.FunctionDef):
            continue
        fails = any("mark.xfail" in ast.unparse(mark) for mark in node.decorator_list)
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.trap":
                number = ast.literal_eval(mark.args[0])
                if number not in NUMBERS:
                    raise ValueError(f"{file}: {node.name}: there is no trap {number}")
                yield Proof(number, file, node.name, fails)


def tests_of(trap: int, found: list[Proof]) -> str:
    """The tests of one trap: each file once, with its tests."""
    files: dict[str, list[str]] = {}
    for proof in found:
        if proof.trap == trap:
            name = f"`{proof.test}`" + " (it does not pass yet)" * proof.fails
            files.setdefault(proof.file, []).append(name)
    return "; ".join(f"`{file}`: {', '.join(names)}" for file, names in files.items())


def page(text: str, found: list[Proof]) -> str:
    """The page, with the tests of every row of docs/traps.md."""
    head, begin, _ = text.partition(BEGIN)
    traps = sorted({proof.trap for proof in found})
    lines = [f"- **{trap}**: {tests_of(trap, found)}" for trap in traps]
    return head + begin + "\n" + "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), proofs()))
