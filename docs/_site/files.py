"""Write the page that lists the files of the package, each with the first line of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

HEAD = (
    "# The files\n\nEvery file of `src/hookline/`, with the first line of its docstring."
    " [Architecture](architecture.md) shows which package may import from which.\n"
)


def files_page(package: Path) -> str:
    """Give the page: a section for each folder of a package, a row for each file in it."""
    folders = sorted(path.parent for path in package.rglob("__init__.py"))
    return "\n".join([HEAD, *(_section(folder, package.parent) for folder in folders)])


def _section(folder: Path, root: Path) -> str:
    rows = [
        f"| `{path.name}` | {_first_line(path)} |"
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    table = ["", "| file | purpose |", "|---|---|", *rows] if rows else []
    title = f"## {folder.relative_to(root).as_posix()}/"
    return "\n".join([title, "", _first_line(folder / "__init__.py"), *table, ""])


def _first_line(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    if not said:
        raise ValueError(f"{path} must begin with a docstring, got none.")
    return " ".join(said.partition("\n\n")[0].split()).replace("|", "\\|")
