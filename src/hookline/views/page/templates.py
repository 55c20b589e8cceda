"""Set up the page's templates and their data."""

from __future__ import annotations

import base64
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hookline.display.text import escape_invisible
from hookline.display.units import measure
from hookline.views.page.cells import cells_html
from hookline.views.page.columns import Column
from hookline.views.page.links import query_of
from hookline.views.page.optional_imports import load
from hookline.views.page.shown_recordings import data_of
from hookline.views.page.site_view import facts_of, path_of, zero_of
from hookline.views.page.thumbnails import MAX_CHANNELS
from hookline.views.page.tree_rows import Row

FOLDER = Path(__file__).parent / "templates"


def environment() -> Any:
    """Create the template environment, in which texts are escaped and unknown names raise.

    Raises:
        HooklineError: jinja2 is not installed.
    """
    jinja2 = load("jinja2")
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        autoescape=True,
        finalize=_visible,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals.update(
        facts_of=facts_of, path_of=path_of, zero_of=zero_of, measure=measure,
        max_channels=MAX_CHANNELS, version=_version(), is_served=False,
        style=_text("page.css"), script=script(), script_hash=_hash(script()),
    )  # fmt: skip
    return found


def curves_environment() -> Any:
    """Create the template environment of the page of a run.

    Raises:
        HooklineError: jinja2 is not installed.
    """
    found, ours = environment(), script("curves.js")
    style = _text("page.css") + _text("curves.css")
    found.globals.update(style=style, script=ours, script_hash=_hash(ours))
    return found


def _visible(value: Any) -> Any:
    """Escape characters that do not print in a template's texts, but not in markup."""
    return escape_invisible(value) if type(value) is str else value


def script(part: str = "table.js") -> str:
    """Join the script of a page: what all pages share, and its own part."""
    return "\n".join(_text(name) for name in ("page.js", part))


def script_hashes() -> str:
    """Return the hashes of all pages' scripts for the policy, so that no other script can run."""
    return f"{_hash(script())} {_hash(script('curves.js'))}"


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")


def table(
    rows: list[Row], chosen: list[Column], prefix: str, strip_prefix: str = "", **more: Any
) -> dict[str, Any]:
    """Return the variables of the table's template.

    Args:
        rows: the rows.
        chosen: the columns.
        prefix: the address of a value's page before its key.
        strip_prefix: the address before the key of feature maps that are not drawn yet.
        more: more data for the page's script.
    """
    keys = ["" if row.seen is None else query_of(row.seen.place) for row in rows]
    lines = [
        (row, prefix + key, cells_html(row, chosen, prefix + key, strip_prefix + key))
        for row, key in zip(rows, keys, strict=True)
    ]
    data = {
        "lines": [_line_data(row, chosen) for row in rows],
        "numbers": [column.is_number for column in chosen],
        "columns": [column.key for column in chosen],
        "sort": None,
        **more,
    }
    return {"columns": chosen, "lines": lines, "data": data}


def _line_data(row: Row, chosen: list[Column]) -> dict[str, Any]:
    """Return a row's data for the page's script: its parent, sort keys and feature maps."""
    line: dict[str, Any] = {"parent": row.parent, "keys": sort_keys(row, chosen)}
    strip = row.seen.strip if row.seen is not None else None
    if strip is not None:
        line["maps"] = {"width": strip.width, "height": strip.height, "ranges": strip.ranges}
    return line


def sort_keys(row: Row, chosen: list[Column]) -> list[Any]:
    """List the sort key of a row for each column."""
    return [data_of(column.sort_key(row)) for column in chosen]


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # hookline runs from its source tree
        return ""
