"""The table of docs/regimes.md, from the marks on the tests that prove its cells.

    @pytest.mark.cell("autocast", "record", "edit")                      # works
    @pytest.mark.cell("autocast", "statistics", note="in float32")       # works, with a condition
    @pytest.mark.cell("tracing", "record", refused="AttachError")        # refused, with which error

`python tests/regimes/table.py` writes it anew; a test says when that was forgotten.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "regimes.md"
BEGIN, END = "<!-- the table: made by tests/regimes/table.py -->\n", "<!-- end -->\n"

VERBS = (
    "record", "gradients", "statistics", "edit", "edit gradients", "raw hooks", "features", "watch",
    "clip", "check", "monitor", "profile",
)  # fmt: skip


class Cell(NamedTuple):
    """What one test proves."""

    regime: str
    verbs: tuple[str, ...]
    note: str
    refused: str
    test: str


def cells(folder: Path = HERE) -> list[Cell]:
    """Every cell that a test in the folder proves, in the order of the files and tests."""
    return [cell for path in sorted(folder.glob("test_*.py")) for cell in _cells_of(path)]


def _cells_of(path: Path) -> Iterator[Cell]:
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.cell":
                regime, *verbs = [ast.literal_eval(value) for value in mark.args]
                said = {key.arg: ast.literal_eval(key.value) for key in mark.keywords}
                unknown = [verb for verb in verbs if verb not in VERBS]
                if unknown or not verbs or said.keys() - {"note", "refused"}:
                    raise ValueError(f"{path.name}: {node.name}: {ast.unparse(mark)}")
                test = f"{path.name}::{node.name}"
                yield Cell(
                    regime, tuple(verbs), said.get("note", ""), said.get("refused", ""), test
                )


def table(found: list[Cell]) -> str:
    """Return the table in Markdown, the notes to which its numbers refer, and the tests."""
    regimes = list(dict.fromkeys(cell.regime for cell in found))
    notes: list[str] = []
    rows = ["| regime | " + " | ".join(VERBS) + " |", "|---" * (len(VERBS) + 1) + "|"]
    for regime in regimes:
        mine = [cell for cell in found if cell.regime == regime]
        shown = [_cell([cell for cell in mine if verb in cell.verbs], notes) for verb in VERBS]
        rows.append(f"| {regime} | " + " | ".join(shown) + " |")
    lines = [
        f"{k}. {', '.join(dict.fromkeys(c.regime for c in found if _note(c) == note))}: {note}"
        for k, note in enumerate(notes, start=1)
    ]
    proofs = [
        f"- {regime}: "
        + ", ".join(dict.fromkeys(f"`{cell.test}`" for cell in found if cell.regime == regime))
        for regime in regimes
    ]
    return "\n".join([*rows, "", *lines, "", "The tests, in `tests/regimes/`:", "", *proofs, ""])


def _cell(proofs: list[Cell], notes: list[str]) -> str:
    if not proofs:
        return ""
    said = list(dict.fromkeys(_note(cell) for cell in proofs if _note(cell)))
    for note in said:
        if note not in notes:
            notes.append(note)
    numbers = ",".join(str(notes.index(note) + 1) for note in said)
    word = "refused" if all(cell.refused for cell in proofs) else "yes"
    return f"{word} ({numbers})" if numbers else word


def _note(cell: Cell) -> str:
    return ": ".join(part for part in (cell.refused and f"`{cell.refused}`", cell.note) if part)


def page(text: str, found: list[Cell]) -> str:
    """The page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + table(found) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), cells()))
