"""Write the tables of README.md and docs/performance.md from what was kept in `results/`.

`python -m benchmarks.tables` writes them anew; a test says when that was forgotten. A table stands
where a page names its rows: `<!-- rows: tiny own gpt2-* -->`, then the table, then `<!-- end -->`;
of models on another device, `<!-- rows on NVIDIA H200: tiny -->`.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from typing import Any

from benchmarks import history
from benchmarks.history import File, median_text

PAGES = (history.PAGE, history.HERE.parent / "docs" / "performance.md")
PLACE = re.compile(r"(<!-- rows(?: on (.+?))?: ([^>]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
HEAD = "| work | without hookline | with hookline | target | others |\n|---|---|---|---|---|\n"


def shown(files: Iterable[File], device: str = "the CPU") -> File:
    """Return the newest version's results of a device, on the machine that measured most rows.

    A row that another machine measured later replaces the row, and names that machine.
    """
    of_device = [file for file in files if file["machine"]["device"] == device]
    newest = [file for file in of_device if file["hookline"] == of_device[-1]["hookline"]]
    most = max(newest, key=lambda file: len(file["rows"]))
    rows = dict(most["rows"])
    for file in newest:
        for name, row in file["rows"].items():
            if name in rows and row["date"] > rows[name]["date"]:
                title = f"{row['title']}; on another machine, {file['machine']['processor']}"
                rows[name] = {**row, "title": title}
    return {**most, "rows": rows}


def table(globs: str, file: File) -> str:
    """Return the table of the rows that are named, in the order of the names.

    Raises:
        LookupError: a name is that of no row that was kept.
    """
    names: dict[str, None] = {}
    for glob in globs.split():
        matches = fnmatch.filter(file["rows"], glob)
        if not matches:
            raise LookupError(f"no row {glob!r} was kept: python -m benchmarks --only {glob!r}")
        names |= dict.fromkeys(matches)
    return HEAD + "".join(_line(file["rows"][name]) for name in names)


def _line(row: dict[str, Any]) -> str:
    """Return a row: ratios are to the time alone, and in the column of the target to its base."""
    alone, base, unit = row["alone"], row["base"], row["unit"]
    target, held = median_text([row["target"]], unit), median_text(row["held"], unit)
    if base is None:
        before, ours, aim = "", held, f"≤ {target}: {row['verdict']}"
    else:
        before = median_text(row["measured"][alone][:1], row["measured_in"])
        ours = median_text(row["ratios"]["hookline"], "")
        against = "" if base == alone else f" x {base}: {held}"
        aim = f"≤ {target}{against}: {row['verdict']}"
    others = [
        f"{name} {median_text(ratio[:1], '')}"
        for name, ratio in row["ratios"].items()
        if name not in ("hookline", alone)
    ]
    return f"| {row['title']} | {before} | {ours} | {aim} | {', '.join(others)} |\n"


def page(text: str, files: list[File]) -> str:
    """Return a page with its tables in their places."""

    def filled(at: re.Match[str]) -> str:
        file = shown(files, *filter(None, [at[2]]))
        return f"{at[1]}\n{table(at[3], file)}\n{at[4]}"

    return PLACE.sub(filled, text)


def write() -> None:
    """Write all tables anew."""
    files = history.files()
    for path in PAGES:
        path.write_text(page(path.read_text("utf-8"), files), "utf-8")


if __name__ == "__main__":
    write()
