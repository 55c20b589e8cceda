"""Write results as pages: their data as JSON, which the page's script draws."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from hookline.curves import Curves
from hookline.display.json_text import to_json_value
from hookline.display.results import printout_of
from hookline.errors import InputError
from hookline.recordings import Recording
from hookline.stores import Store
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.compare.comparison import Comparison
from hookline.verbs.profile.profile import Profile
from hookline.verbs.sweep.sweep_results import Effects, Sweep
from hookline.views.page.finding_page_data import finding_page_data, title_of
from hookline.views.page.page_templates import load_template
from hookline.views.page.profile_data import profile_data
from hookline.views.page.recording_data import escape_texts, pack_json
from hookline.views.page.recording_page import (
    page_path,
    write_folder_contents_page,
    write_page_file,
    write_recording_page,
)
from hookline.views.page.served_folders import contents_of_store
from hookline.views.page.training_page import write_curves_page
from hookline.views.plots.sweep import axis_texts

_TITLES = {True: "Measured effects", False: "Estimated effects"}


def write_page(
    result: Recording | Store | Comparison | Effects | Profile | Curves | CheckFinding,
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

    A recording is shown with its findings, the depth strip and its values, and so is a store, whose
    pictures and histograms are of its first eight items; a comparison with the error over depth and
    its sites in firing order; a sweep or an attribution as a heat map; a profile as nested bars and
    a table; the curves of a training as a map of time and depth; a finding of `hl.check` as the
    chain of values that led to it. The file is written under a temporary name and renamed, so an
    older page stays until the new one is complete.

    Args:
        result: what `hl.record`, `hl.compare`, `hl.shadow`, `hl.sweep`, `hl.attribute`,
            `hl.profile` or `hl.monitor` returned, a store of `hl.extract`, or `error.finding` of
            `hl.check`.
        path: the file to write, which ends in `.html`, or a folder for `report.html`. Missing
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
    match result:
        case Recording():
            return write_recording_page(result, path, title=title or result.report().model_type)
        case Comparison():
            return write_comparison_page(result, path, title=title)
        case Effects():
            data = effects_data(result, texts or {})
            return _render_and_write(
                "sweep", path, data, title=title or _TITLES[isinstance(result, Sweep)]
            )
        case Profile():
            title = title or f"Profile of {result.table.model_type}"
            return _render_and_write("profile", path, profile_data(result), title=title)
        case Curves():
            return write_curves_page(result, path, title=title)
        case Store():
            title = title or last_path_part(str(result.place))
            file, _ = write_folder_contents_page(contents_of_store(result), path, title=title)
            return file
        case CheckFinding():
            return _render_and_write(
                "check", path, finding_page_data(result), title=title or title_of(result)
            )
    raise InputError(
        f"result must be one that has a page, got {type(result).__name__}.\nGive what hl.record,"
        " hl.extract, hl.compare, hl.shadow, hl.sweep, hl.attribute, hl.profile or hl.monitor"
        " returned, or error.finding of hl.check."
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
    return _render_and_write(
        "comparison", path, comparison_data(comparison), title=title, names=names
    )


def comparison_title(names: Sequence[str]) -> str:
    """Return the heading of a comparison: the last parts of the names of a and b."""
    return " against ".join(map(last_path_part, names)) or "Two runs compared"


def last_path_part(name: str) -> str:
    """Return the last part of a folder's name or a URL."""
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2] or name


def comparison_data(comparison: Comparison, links: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the page of a comparison draws: its `to_dict()`.

    Args:
        links: for each row the query of its values' page; empty where there is none.
    """
    data: dict[str, Any] = escape_texts(to_json_value(comparison.to_dict()))
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
    sizes = [len(numbers) for numbers in numbers_of.values()]
    indices = [[numbers[row[axis]] for row in rows] for axis, numbers in numbers_of.items()]
    places = np.ravel_multi_index(indices, sizes).tolist() if rows else []
    names = [name for name in rows[0] if name not in numbers_of] if rows else []
    axes = [
        {
            "name": axis,
            "labels": list(map(str, effects.labels[axis])),
            "texts": axis_texts(effects, axis, texts),
        }
        for axis in effects.axes
    ]
    data |= {
        "axes": axes,
        "places": places,
        "remarks": list(printout_of(effects).notes),
        "numbers": {name: [row[name] for row in rows] for name in names},
    }
    return data


def pack_result(data: Any) -> str:
    """Pack a result's plain data for its page: NaN as words, and no character that hides."""
    return pack_json(escape_texts(to_json_value(data)))


def _render_and_write(kind: str, path: str | os.PathLike[str], data: Any, **variables: Any) -> Path:
    now = datetime.now().astimezone()
    text = load_template(kind).render(now=now, core=pack_result(data), **variables)
    return write_page_file(page_path(path), text)
