"""Render the pages: the templates, and the scripts and styles that each kind is made of."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

from hookline.display.text import escape_invisible
from hookline.util.optional import load
from hookline.util.version import VERSION
from hookline.views.pixels import PAGE_NEEDS

FOLDER = Path(__file__).parent / "templates"
# What each kind of page is made of.
_SHARED = ("shared/page.js", "shared/tokens.css", "page.css")
_OF_RESULTS = (*_SHARED, "shared/elements.js", "shared/colours.js", "result.css")
_OF_MAPS = ("shared/packed.js", "shared/canvas.js", "shared/pictures.js", "shared/maps.css")
_FRAME = (
    "shared/tokens.css", "shared/frame.css", "shared/page.js", "shared/elements.js",
    "shared/colours.js", *_OF_MAPS, "shared/findings.js",
)  # fmt: skip
_OF_RECORDING = (
    "shared/rows.js", "shared/rows.css", "shared/heat_map.js", "shared/tokens.js",
    "recording/data.js", "recording/own.js", "recording/export.js", "recording/strip.js",
    "recording/tree.js", "recording/pane.js", "recording/main.js",
    "recording/recording.css",
)  # fmt: skip
_OF_TRAINING = (
    "training/data.js", "training/chart.js", "training/curves.js", "training/main.js",
    "training/training.css",
)  # fmt: skip
_PARTS = {
    "recording": (*_FRAME, *_OF_RECORDING),
    "training": (*_FRAME, *_OF_TRAINING),
    "message": _SHARED,
    "comparison": (
        *_OF_RESULTS, *_OF_MAPS, "shared/rows.js", "shared/heat_map.js", "shared/tokens.js",
        "depth_curve.js", "comparison.js",
    ),
    "sweep": (*_OF_RESULTS, "shared/maps.css", "shared/heat_map.js", "sweep.js"),
}  # fmt: skip
_SERVED = ("recording", "message", "training", "comparison")


def environment(kind: str = "message") -> Any:
    """Create the template environment of a kind of page.

    Texts are escaped, and unknown names raise.

    Args:
        kind: "recording", "training", "message", "comparison" or "sweep".
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
        version=VERSION, is_served=False,
        style=_joined(kind, ".css"), script=code, script_hash=_hash(code),
    )  # fmt: skip
    return templates


def _visible(value: Any) -> Any:
    """Escape characters that do not print in a template's texts, but not in markup."""
    return escape_invisible(value) if type(value) is str else value


def _script(kind: str) -> str:
    """Join the script of a kind of page."""
    return _joined(kind, ".js")


def script_hashes() -> str:
    """Return the hashes of the served pages' scripts for the policy, so that no other can run."""
    return " ".join(_hash(_script(kind)) for kind in _SERVED)


def _joined(kind: str, suffix: str) -> str:
    return "\n".join(_text(name) for name in _PARTS[kind] if name.endswith(suffix))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _text(name: str) -> str:
    return (FOLDER / name).read_text("utf-8")
