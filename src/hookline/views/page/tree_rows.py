"""Arrange a recording as the rows of the page's table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from hookline.engine import Site
from hookline.engine.pytree.describe import leaf_text
from hookline.recordings import Recording
from hookline.views.page.values import ValueEntry


@final
@dataclass
class Row:
    """A row of the table.

    Args:
        path: the module's path.
        name: the row's name within the tree.
        label: the row's full name: the site, as in a look-up.
        module_type: the class of the module.
        aliases: the module's other paths.
        depth: the level of indentation.
        parent: the index of the parent row; None at the top.
        call: the call that the row shows, if a pass has several.
        is_module: False for a row that shows one of a module's several values.
        has_children: whether other rows lie under it.
        seen: the value; None for a row that only groups others.
    """

    path: str
    name: str
    label: str
    module_type: str
    aliases: tuple[str, ...] = ()
    depth: int = 0
    parent: int | None = None
    call: int | None = None
    is_module: bool = True
    has_children: bool = False
    seen: ValueEntry | None = None


def tree_rows(recording: Recording, values: list[ValueEntry]) -> list[Row]:
    """List the table's rows in tree order: modules with a value, and their ancestors.

    A module with one value shows it in its own row. Several values have one row each under it.
    """
    by_path: dict[str, list[ValueEntry]] = {}
    for seen in values:
        by_path.setdefault(seen.site.path, []).append(seen)
    types = dict(recording.modules)
    order = _tree_order(recording, by_path)
    rows: list[Row] = []
    number_of: dict[str, int] = {}
    for path in order:
        here = sorted(by_path.get(path, ()), key=lambda seen: seen.order)
        name = str(Site(path)).rpartition(".")[2]
        row = Row(path, name, str(Site(path)), types.get(path, ""))
        row.parent = number_of.get(path.rpartition(".")[0]) if path else None
        row.depth = 0 if row.parent is None else rows[row.parent].depth + 1
        if here:
            row.aliases, row.module_type = here[0].site.aliases, here[0].site.module_type
        number_of[path] = len(rows)
        rows.append(row)
        if len(here) == 1:
            row.seen = here[0]
            row.name += _suffix(here[0].site)
            row.label += _suffix(here[0].site)
        else:
            rows += _lines_under(row, number_of[path], here)
    for row in rows:
        if row.parent is not None:
            rows[row.parent].has_children = True
    return rows


def _tree_order(recording: Recording, by_path: Mapping[str, list[ValueEntry]]) -> list[str]:
    """List the paths with a value and their ancestors, each directly before its descendants."""
    listed = {path: number for number, (path, _) in enumerate(recording.modules)}
    paths = {part for path in by_path for part in _with_holders(path)}
    for path in by_path:  # a recording need not list its modules
        for part in _with_holders(path):
            listed.setdefault(part, len(listed))

    def place(path: str) -> list[int]:
        return [listed[part] for part in _with_holders(path)] if path else []

    return sorted(paths, key=place)


def _with_holders(path: str) -> list[str]:
    """Split `a.b.c` into `a`, `a.b` and `a.b.c`, without the root."""
    names = path.split(".")
    return [".".join(names[: n + 1]) for n in range(len(names))]


def _lines_under(module: Row, number: int, here: list[ValueEntry]) -> list[Row]:
    n_calls = Counter((seen.site, seen.pass_number, seen.backward) for seen in here)
    several_passes = len({seen.pass_number for seen in here}) > 1
    several_sites = len({seen.site for seen in here}) > 1
    rows = []
    for seen in here:
        several_calls = n_calls[seen.site, seen.pass_number, seen.backward] > 1
        words = [
            seen.site.port + leaf_text(seen.site.leaf) if several_sites else "",
            f"pass {seen.pass_number}" if several_passes else "",
            "" if seen.backward is None else f"backward {seen.backward}",
            f"call {seen.call}" if several_calls else "",
        ]
        row = replace(module, name=", ".join(filter(None, words)), seen=seen)
        row.label += _suffix(seen.site) + f"#{seen.call}" * several_calls
        row.depth, row.parent, row.is_module = module.depth + 1, number, False
        row.call = seen.call if several_calls else None
        rows.append(row)
    return rows


def _suffix(site: Site) -> str:
    whole_output = site.port == "output" and not site.leaf
    call = "" if site.call is None else f"#{site.call}"
    return ("" if whole_output else f":{site.port}{leaf_text(site.leaf)}") + call
