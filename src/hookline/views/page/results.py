"""Write results as pages: their data as JSON, which the page's script draws."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hookline.display.results import plain, printout_of
from hookline.display.text import escape_invisible
from hookline.errors import InputError
from hookline.recordings import Recording
from hookline.verbs.compare.comparison import Comparison
from hookline.verbs.sweep.effects import Effects, Sweep
from hookline.views.page.render import environment
from hookline.views.page.single_file import replace_file, target_of, write_recording_page
from hookline.views.plots.sweep import texts_of

_TITLES = {True: "Measured effects", False: "Estimated effects"}


def write_page(
    result: Recording | Comparison | Effects,
    path: str | os.PathLike[str],
    *,
    title: str = "",
    texts: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """Write a result as a page: one HTML file, which needs no server and no network.

        >>> import hookline as hl
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
        >>> effects = hl.sweep(model, torch.zeros(1, 2), ["0", "1"], lambda out: out[0, 0],
        ...                    clean=torch.ones(1, 2), each={"unit": 1})
        >>> hl.write_page(effects, tmp_path / "sweep.html").name
        'sweep.html'

    A comparison is shown with its findings, the error over depth, and its sites in firing order; a
    sweep or an attribution as a heat map; a recording as the table of its values. The file is
    written under a temporary name and renamed, so an older page stays until the new one is
    complete.

    Args:
        result: what `hl.compare`, `hl.shadow`, `hl.sweep`, `hl.attribute` or `hl.record` returned.
        path: the file to write, or an existing folder, in which `report.html` is written. Missing
            folders are created.
        title: the heading of the page; empty for one that says what the result is.
        texts: of effects, other labels for an axis, such as the tokens:
            `{"position": ["the", "cat", "sat"]}`.

    Returns:
        The file's path.

    Raises:
        InputError: `result` is something else, or texts and labels differ in number.
        FolderError: the file cannot be written.
        HooklineError: jinja2 or pillow is not installed.
    """
    if texts and not isinstance(result, Effects):
        raise InputError(
            "texts must be left out of a page without axes, got texts for a"
            f" {type(result).__name__}.\nLeave texts= out."
        )
    if isinstance(result, Recording):
        return write_recording_page(result, path, title=title or result.report().model_type)
    if isinstance(result, Comparison):
        return write_comparison_page(result, path, title=title)
    if isinstance(result, Effects):
        data = effects_data(result, texts or {})
        title = title or _TITLES[isinstance(result, Sweep)]
        return _write("sweep", path, title=title, data=data)
    raise InputError(
        "result must be a recording, a comparison, a sweep or an attribution, got"
        f" {type(result).__name__}.\nGive what hl.compare, hl.shadow, hl.sweep, hl.attribute or"
        " hl.record returned."
    )


def write_comparison_page(
    comparison: Comparison,
    path: str | os.PathLike[str],
    names: Sequence[str] = (),
    *,
    title: str = "",
) -> Path:
    """Write a comparison as a page; see `write_page`.

    Args:
        names: the names of a and b, such as their folders.
    """
    title = title or comparison_title(names)
    return _write(
        "comparison", path, title=title, names=names, of_what="", data=comparison_data(comparison)
    )  # fmt: skip


def comparison_title(names: Sequence[str]) -> str:
    """Return the heading of a comparison: the last parts of the names of a and b."""
    return " against ".join(map(last_part, names)) or "Two runs compared"


def last_part(name: str) -> str:
    """Return the last part of a folder's name or a URL."""
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or name


def comparison_data(comparison: Comparison, links: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the page of a comparison draws: its `to_dict()`.

    Args:
        links: for each row the query of its values' page; empty where there is none.
    """
    data: dict[str, Any] = _visible(plain(comparison.to_dict()))
    return {**data, "links": list(links)}


def effects_data(effects: Effects, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what the page of effects draws: its `to_dict()`, with the rows as columns.

    `places` has the index of each change in the flattened array.
    """
    data = effects.to_dict()
    rows = data.pop("rows")
    numbers_of = {
        axis: {label: number for number, label in enumerate(effects.labels[axis])}
        for axis in effects.axes
    }
    places = []
    for row in rows:
        place = 0
        for axis in effects.axes:
            place = place * len(numbers_of[axis]) + numbers_of[axis][row[axis]]
        places.append(place)
    names = [name for name in rows[0] if name not in numbers_of] if rows else []
    axes = [
        {
            "name": axis,
            "labels": list(map(str, effects.labels[axis])),
            "texts": texts_of(effects, axis, texts),
        }
        for axis in effects.axes
    ]
    data |= {
        "axes": axes,
        "places": places,
        "remarks": list(printout_of(effects).notes),
        "numbers": {name: [row[name] for row in rows] for name in names},
    }
    shown: dict[str, Any] = _visible(plain(data))
    return shown


def _write(kind: str, path: str | os.PathLike[str], **variables: Any) -> Path:
    page = environment(kind).get_template(f"{kind}.html")
    now = datetime.now().astimezone()
    return replace_file(target_of(path), page.render(home="", now=now, **variables))


def _visible(value: Any) -> Any:
    """Escape characters that do not print, in all texts of plain data."""
    if isinstance(value, dict):
        return {name: _visible(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_visible(part) for part in value]
    return escape_invisible(value) if isinstance(value, str) else value
