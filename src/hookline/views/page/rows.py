"""A recording as the rows of the page's table. Imports recordings, statistics, thumbnails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from hookline.engine import Site, tree
from hookline.engine.errors import OverwrittenError
from hookline.engine.tree import leaf_text
from hookline.recordings import PassRecord, Recording
from hookline.views.page.thumbnails import Strip, feature_strip
from hookline.views.statistics import Statistics, main_tensor, site_statistics

OVERWRITTEN = "overwritten in place after it was recorded; record it with copy=True"


@final
@dataclass(frozen=True)
class Seen:
    """One value: a call of a site in a pass.

    Args:
        site: where it flowed.
        pass_number: in which pass.
        call: in which call of that pass.
        order: its place among all values of the recording, as they fired.
        shape: its structure; empty if it could not be read.
        statistics: None if it holds no tensor, or could not be read.
        strip: its feature maps; None if it is not image-like.
        problem: why it could not be read or measured; empty if it could.
        is_overwritten: whether that is because it was changed in place.
        backward: which of several backward passes brought it, if it is a gradient.
    """

    site: Site
    pass_number: int
    call: int
    order: int
    shape: str = ""
    statistics: Statistics | None = None
    strip: Strip | None = None
    problem: str = ""
    is_overwritten: bool = False
    backward: int | None = None

    @property
    def non_finite(self) -> int:
        """How many elements are NaN or infinite."""
        return self.statistics.non_finite if self.statistics else 0


@final
@dataclass
class Row:
    """One line of the table.

    Args:
        path: the module's path.
        name: what the line is called in the tree.
        label: what it is called where it stands alone: the site, as it is written in a look-up.
        module_type: the class of the module.
        aliases: its other paths.
        depth: how far it is indented.
        parent: the number of the line that it lies under; None at the top.
        call: which call of its module it shows, where there were several in a pass.
        is_module: False for a line that shows one of a module's several values.
        has_children: whether other lines lie under it.
        seen: the value; None for a line that only holds others.
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
    seen: Seen | None = None


def read_values(recording: Recording) -> list[Seen]:
    """Read and measure every value of a recording, one at a time, in the order they fired.

    Raises:
        FolderError: the recording was opened from a folder that is gone or damaged.
        HooklineError: pillow is not installed.
    """
    found: list[Seen] = []
    for one in recording.passes:
        runs = one.backwards if len(one.backwards) > 1 else []
        for site, call in one.fired():
            if not (runs and site.is_gradient):
                found.append(_read(one, Seen(site, one.number, call, len(found))))
        for number, run in enumerate(runs):
            for site, call in run.fired():
                seen = Seen(site, one.number, call, len(found), backward=number)
                found.append(_read(run, seen))
    return found


def tree_rows(recording: Recording, values: list[Seen]) -> list[Row]:
    """The table's lines in tree order: modules with a value, and those that hold them.

    A module with one value carries it in its own line; several lie under it, a line each.
    """
    by_path: dict[str, list[Seen]] = {}
    for seen in values:
        by_path.setdefault(seen.site.path, []).append(seen)
    types = dict(recording.modules)
    order = _tree_order(recording, by_path)
    rows: list[Row] = []
    number_of: dict[str, int] = {}
    for path in order:
        here = sorted(by_path.get(path, ()), key=lambda seen: seen.order)
        name = path.rpartition(".")[2] or "(root)"
        row = Row(path, name, path or name, types.get(path, ""))
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


def _read(one: PassRecord, seen: Seen) -> Seen:
    site = seen.site if seen.site.call is not None else replace(seen.site, call=seen.call)
    try:
        value = one[site]
    except OverwrittenError:
        return replace(seen, problem=OVERWRITTEN, is_overwritten=True)
    return _measure(value, seen)


def _measure(value: Any, seen: Seen) -> Seen:
    tensor = main_tensor(value)
    try:
        return replace(
            seen,
            shape=tree.form(value),
            statistics=site_statistics(value),
            strip=None if tensor is None else feature_strip(tensor),
        )
    except (RuntimeError, TypeError) as error:
        # A dtype or layout that torch itself cannot convert must not cost the whole page.
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return replace(seen, problem=f"cannot be measured: {text}")


def _tree_order(recording: Recording, by_path: Mapping[str, list[Seen]]) -> list[str]:
    """The paths with a value and those that hold them, each right before what it holds."""
    listed = {path: number for number, (path, _) in enumerate(recording.modules)}
    paths = {part for path in by_path for part in _with_holders(path)}
    for path in by_path:  # of a recording that lists no modules
        for part in _with_holders(path):
            listed.setdefault(part, len(listed))

    def place(path: str) -> list[int]:
        return [listed[part] for part in _with_holders(path)] if path else []

    return sorted(paths, key=place)


def _with_holders(path: str) -> list[str]:
    """`a.b.c` as `a`, `a.b`, `a.b.c`. The root, which holds every module, is not among them."""
    names = path.split(".")
    return [".".join(names[: n + 1]) for n in range(len(names))]


def _lines_under(module: Row, number: int, here: list[Seen]) -> list[Row]:
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
