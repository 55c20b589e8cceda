"""Write the table of docs/performance.md from the tables of benchmarks/README.md.

`python benchmarks/summary.py` writes it anew; a test says when that was forgotten.
"""

from __future__ import annotations

from pathlib import Path

MEASURED = Path(__file__).parent / "README.md"
PAGE = MEASURED.parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- the table: made by benchmarks/summary.py -->\n", "<!-- end -->\n"

# The rows that are shown: how each begins in README.md, and what is measured.
ROWS = {
    "36 convolutions of ResNet-34; hooks attached once": (
        "`hl.record` of 36 convolutions of ResNet-34"
    ),
    "12 blocks of a GPT-2; hooks attached once": "`hl.record` of 12 blocks of a GPT-2",
    "200 tiny layers; hooks attached once": "`hl.record` of 200 tiny layers, `nn.Linear(8, 8)`",
    "gradients of 12 blocks of a GPT-2": "gradients of 12 blocks of a GPT-2",
    "features of `layer1` of ResNet-34": "`hl.features` of `layer1` of ResNet-34",
    "GPT-2: record 12 blocks": "`torch.compile`: 12 blocks of a GPT-2",
    "GPT-2: edit the output": "`torch.compile`: edit one block of a GPT-2",
    "`hl.monitor`: outputs, gradients, weights and updates, each step": (
        "`hl.monitor` of everything, each step of a GPT-2"
    ),
    "`hl.monitor(model)`: outputs": "`hl.monitor` of everything, each step of a small GPT-2",
    "`hl.check`, each step": "`hl.check`, each step of a GPT-2",
    "`hl.profile`, without": "`hl.profile`, each step of a GPT-2",
    "`layer4` of a ResNet-34": "`hl.extract` of `layer4` of a ResNet-34",
}


def rows(measured: str) -> list[dict[str, str]]:
    """Return every row of the tables of a page, as a dict by column, the first as `""`."""
    found: list[dict[str, str]] = []
    columns: list[str] = []
    for line in measured.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            columns = []
        elif not columns:
            columns = ["", *cells[1:]]
        elif set(line) != set("|-"):
            found.append(dict(zip(columns, cells, strict=True)))
    return found


def table(measured: str) -> str:
    """Return the table of the rows that are shown."""
    lines = ["| work | time / time without hookline | target | others |", "|---|---|---|---|"]
    for beginning, work in ROWS.items():
        row = next(row for row in rows(measured) if row[""].startswith(beginning))
        ratio = next(
            cell
            for column, cell in row.items()
            if " / " in column and "hand-written /" not in column and "other" not in column
        )
        target = next(cell for column, cell in row.items() if column.startswith("target"))
        others = next((cell for column, cell in row.items() if "other" in column), "")
        lines.append(f"| {work} | {ratio} | {target} | {others} |")
    return "\n".join(lines) + "\n"


def page(text: str, measured: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table(measured) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), MEASURED.read_text("utf-8")), "utf-8")
