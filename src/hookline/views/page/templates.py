"""How a page becomes text: the environment of its templates."""

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
from hookline.views.page.extras import load
from hookline.views.page.links import query_of
from hookline.views.page.rows import Row
from hookline.views.page.site_view import facts_of, path_of, zero_of
from hookline.views.page.state import data_of
from hookline.views.page.thumbnails import MAX_CHANNELS

FOLDER = Path(__file__).parent / "templates"


def environment() -> Any:
    """The templates, with every text escaped and every unknown name an error.

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
        style=(FOLDER / "page.css").read_text("utf-8"), script=script(), script_hash=script_hash(),
    )  # fmt: skip
    return found


def _visible(value: Any) -> Any:
    """What an expression in a template gives; of a text that is no markup, all is seen."""
    return escape_invisible(value) if type(value) is str else value


def script() -> str:
    """The page's only script, from its two files."""
    return "\n".join((FOLDER / name).read_text("utf-8") for name in ("page.js", "table.js"))


def script_hash() -> str:
    """What a page says of its script, so that the browser runs no other, whatever names hold."""
    digest = hashlib.sha256(script().encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def table(
    rows: list[Row], chosen: list[Column], prefix: str, strip_prefix: str = "", **more: Any
) -> dict[str, Any]:
    """What the template of the table needs of its lines.

    Args:
        rows: the lines.
        chosen: the columns.
        prefix: what stands before a value's key in its address.
        strip_prefix: the same for feature maps that have not been drawn.
        more: what else the page's script reads.
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
    """What the page's script cannot read off a line: how it nests and sorts, and its maps."""
    line: dict[str, Any] = {"parent": row.parent, "keys": sort_keys(row, chosen)}
    strip = row.seen.strip if row.seen is not None else None
    if strip is not None:
        line["maps"] = {"width": strip.width, "height": strip.height, "ranges": strip.ranges}
    return line


def sort_keys(row: Row, chosen: list[Column]) -> list[Any]:
    """By what a line is sorted, in each column."""
    return [data_of(column.sort_key(row)) for column in chosen]


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:  # run from its sources
        return ""
