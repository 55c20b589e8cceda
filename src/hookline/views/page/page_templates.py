"""Render the pages: the templates, and the scripts and styles that each kind is made of."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import Any

from hookline.display.text import escape_invisible
from hookline.util.optional_imports import require
from hookline.util.version import VERSION
from hookline.views.pixels import PAGE_NEEDS

_FOLDER = resources.files("hookline.views.page") / "templates"  # which may lie in a zip file
# What each kind of page is made of, beside its own folder. Every kind has one set of tokens, one
# frame and one client.
_EVERY = ("shared/tokens.css", "shared/frame.css", "shared/page.js")
_FRAME = (
    *_EVERY, "shared/elements.js", "shared/colours.js", "shared/unpack.js", "shared/canvas.js",
    "shared/maps.css", "shared/findings.js", "shared/pane.js",
)  # fmt: skip
_ROWS = ("shared/row_grid.css", "shared/row_grid.js")
_TABLE = (*_ROWS, "shared/table.js")
_MAPS = ("shared/maps.js", "shared/heat_map.js", "shared/token_map.js")
_OWN = {
    "recording": (
        "data.js", "own_numbers.js", "tree_svg.js", "store_facts.js", "depth_strip.js", "tree.js",
        "image_overlay.js", "pane.js", "main.js",
    ),
    "training": ("data.js", "chart.js", "curves.js", "main.js"),
    "comparison": ("depth_curve.js", "main.js"),
    "sweep": ("main.js",),
    "profile": ("flame_graph.js", "main.js"),
    "check": ("main.js",),
}  # fmt: skip
_SHARED = {
    "recording": (*_FRAME, *_TABLE, *_MAPS, "shared/units.js"),
    "training": _FRAME,
    "comparison": (*_FRAME, *_ROWS, *_MAPS),
    "sweep": (*_FRAME, "shared/heat_map.js"),
    "profile": (*_FRAME, *_TABLE, "shared/units.js"),
    "check": (*_FRAME, *_ROWS),
    "message": _EVERY,
}
_PARTS = {
    kind: (
        *shared,
        *(f"{kind}/{name}" for name in _OWN.get(kind, ())),
        *[f"{kind}/{kind}.css"] * (kind in _OWN),
    )
    for kind, shared in _SHARED.items()
}
# What a page need not give.
_DEFAULTS: dict[str, Any] = {
    "is_served": False, "facts": (), "model_type": "", "notices": (), "subtitle": "", "where": "",
}  # fmt: skip
_SERVED = ("recording", "message", "training", "comparison", "check")


def load_template(kind: str) -> Any:
    """Return the template of a kind of page, in which texts are escaped and unknown names raise.

    Args:
        kind: one of those in `_SHARED`, such as "recording" or "message".
    """
    jinja2 = require("jinja2", *PAGE_NEEDS)
    templates = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_file),
        autoescape=True,
        finalize=_escape_if_text,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    code = _joined_script(kind)
    templates.globals.update(
        version=VERSION, **_DEFAULTS,
        style=_join_files(kind, ".css"), script=code, script_hash=_csp_hash(code),
    )  # fmt: skip
    return templates.get_template(f"{kind if kind in _OWN else 'shared'}/{kind}.html")


def _escape_if_text(value: Any) -> Any:
    """Escape characters that do not print in a template's texts, but not in markup."""
    return escape_invisible(value) if type(value) is str else value


def _joined_script(kind: str) -> str:
    """Join the script of a kind of page."""
    return _join_files(kind, ".js")


def script_hashes() -> str:
    """Return the hashes of the served pages' scripts for the policy, so that no other can run."""
    return " ".join(_csp_hash(_joined_script(kind)) for kind in _SERVED)


def _join_files(kind: str, suffix: str) -> str:
    return "\n".join(_read_file(name) for name in _PARTS[kind] if name.endswith(suffix))


def _csp_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _read_file(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")
