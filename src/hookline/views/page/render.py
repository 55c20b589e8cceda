"""Render the pages: the templates, their data, and the cells of the table."""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hookline.display.text import escape_html, escape_invisible
from hookline.display.units import measure
from hookline.util.optional import load
from hookline.views.page.entries import Row, TableColumn, ValueEntry
from hookline.views.page.links import query_of
from hookline.views.page.page_state import data_of
from hookline.views.page.pictures import MAX_CHANNELS, histogram_path
from hookline.views.page.site_view import facts_of, zero_of
from hookline.views.pixels import PAGE_NEEDS

FOLDER = Path(__file__).parent / "templates"
# What each kind of page is made of, beside page.js and page.css, which all have.
_OF_RESULTS = ("elements.js", "result.css")
_PARTS = {
    "values": ("table.js",),
    "curves": ("curves.js", "curves.css"),
    "comparison": (*_OF_RESULTS, "rows.js", "depth_curve.js", "comparison.js"),
    "sweep": (*_OF_RESULTS, "colours.js", "heat_map.js", "sweep.js"),
}


def environment(kind: str = "values") -> Any:
    """Create the template environment of a kind of page.

    Texts are escaped, and unknown names raise.

    Args:
        kind: "values", "curves", "comparison" or "sweep".
    """
    jinja2 = load("jinja2", *PAGE_NEEDS)
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    code = _script(kind)
    templates.globals.update(
        facts_of=facts_of, histogram_path=histogram_path, zero_of=zero_of, measure=measure,
        max_channels=MAX_CHANNELS, version=_version(), is_served=False,
        style=_joined("page.css", kind, ".css"), script=code, script_hash=_hash(code),
    )  # fmt: skip
    return templates


def _visible(value: Any) -> Any:
    """Escape characters that do not print in a template's texts, but not in markup."""
    return escape_invisible(value) if type(value) is str else value


def _script(kind: str) -> str:
    """Join the script of a kind of page: what all pages share, and its own parts."""
    return _joined("page.js", kind, ".js")


def script_hashes() -> str:
    """Return the hashes of the served pages' scripts for the policy, so that no other can run."""
    return " ".join(_hash(_script(kind)) for kind in ("values", "curves", "comparison"))


def _joined(shared: str, kind: str, suffix: str) -> str:
    parts = [name for name in _PARTS[kind] if name.endswith(suffix)]
    return "\n".join(_text(name) for name in (shared, *parts))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


def table(
    rows: list[Row], chosen: list[TableColumn], prefix: str, strip_prefix: str = "", **more: Any
) -> dict[str, Any]:
    """Return the variables of the table's template.

    Args:
        prefix: the address of a value's page before its key.
        strip_prefix: the address before the key of feature maps that are not drawn yet.
        more: more data for the page's script.
    """
    keys = ["" if row.entry is None else query_of(row.entry.place) for row in rows]
    lines = [
        (row, prefix + key, _cells(row, chosen, prefix + key, strip_prefix + key))
        for row, key in zip(rows, keys, strict=True)
    ]
    data = {
        "lines": [_line_data(row, chosen) for row in rows],
        "numbers": [column.is_number for column in chosen],
        "columns": [column.key for column in chosen],
        **more,
    }
    return {"columns": chosen, "lines": lines, "data": data}


def _line_data(row: Row, chosen: list[TableColumn]) -> dict[str, Any]:
    """Return a row's data for the page's script: its parent, sort keys and feature maps."""
    line: dict[str, Any] = {"parent": row.parent, "keys": sort_keys(row, chosen)}
    strip = row.entry.strip if row.entry is not None else None
    if strip is not None:
        line["maps"] = {"width": strip.width, "height": strip.height, "ranges": strip.ranges}
    return line


def _cells(row: Row, chosen: list[TableColumn], link: str, strip_link: str) -> str:
    """Format all cells of a row except the first; every text is escaped.

    They are not formatted in a template, because a table of 2,000 rows has 25,000 cells.

    Args:
        strip_link: the address of its feature maps, used if they are not drawn yet.
    """
    kind = escape_html(row.module_type)
    parts = [f'<td class="type" title="{kind}">{kind}</td>']
    entry = row.entry
    if entry is not None and entry.problem:
        span = len(chosen) - 2
        parts.append(f'<td class="problem" colspan="{span}">{escape_html(entry.problem)}</td>')
        return "".join(parts)
    for column in chosen[2:]:
        kind, style, content = column.key, "", ""
        if column.is_number:
            kind += " number"
        if entry is not None:
            if column.key == "maps":
                content = _maps(row, entry, link, strip_link)
            else:
                content = escape_html(column.text(row))
            if column.key == "non-finite" and entry.non_finite:
                kind += " bad"
            if column.key == "zeros" and entry.statistics is not None:
                style = f' style="--share: {entry.statistics.zeros or 0:.4f}"'
        parts.append(f'<td class="{kind}"{style}>{content}</td>')
    return "".join(parts)


def _maps(row: Row, entry: ValueEntry, link: str, strip_link: str) -> str:
    form = entry.form
    if form is None:
        return ""
    source = entry.strip.source if entry.strip is not None else strip_link
    coarse = ' class="coarse"' if form.height < 24 else ""
    label = escape_html(f"Feature maps of {row.label}, larger")
    return (
        f'<a href="{escape_html(link)}" aria-label="{label}"><img src="{escape_html(source)}"'
        f' alt="" loading="lazy" width="{form.width * form.tiles}" height="{form.height}"'
        f' style="--tiles: {form.tiles}"{coarse}></a>'
    )


def sort_keys(row: Row, chosen: list[TableColumn]) -> list[Any]:
    """List the sort key of a row for each column."""
    return [data_of(column.sort_key(row)) for column in chosen]


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # hookline runs from its source tree
        return ""
