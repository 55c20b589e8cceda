"""Write the list of packages in docs/architecture.md from the rooms in tests/test_layers.py.

`python docs/_site/layout.py` writes it anew; a test says when that was forgotten.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- the packages: made by docs/_site/layout.py -->\n", "<!-- end -->\n"


def rooms() -> tuple[Sequence[str], Mapping[str, set[str]], set[str]]:
    """Give the rooms from the roof down, those that see only some of the others, and the ground."""
    layers = runpy.run_path(str(ROOT / "tests" / "test_layers.py"))
    return layers["ROOMS"], layers["ONLY"], layers["GROUND"]


def packages(names: Sequence[str], only: Mapping[str, set[str]], ground: set[str]) -> str:
    """List the rooms, each with the first line of its docstring, then the narrower rules.

    The order of the verbs among themselves stays in the test.
    """
    shown = [name for name in names if not name.startswith("hookline.verbs.")]
    width = max(len(_shown(name)) for name in shown)
    lines = [f"{_shown(name):{width}}  {_purpose(name)}" for name in shown]
    rules = [
        f"- `{_shown(name)}` imports only {_listed(seen - ground, ground <= seen)}."
        for name, seen in only.items()
    ]
    return "\n".join(["```text", *lines, "```", "", *rules, ""])


def _shown(name: str) -> str:
    return name.removeprefix("hookline.").replace(".", "/") if "." in name else "__init__"


def _listed(names: set[str], with_ground: bool) -> str:
    shown = [f"`{_shown(name)}`" for name in sorted(names)]
    return ", ".join(shown + ["the last three of the list"] * with_ground)


def _purpose(name: str) -> str:
    path = ROOT / "src" / Path(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    return " ".join(said.partition("\n\n")[0].split())


def page(text: str) -> str:
    """Give the page with the list in its place."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + packages(*rooms()) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
