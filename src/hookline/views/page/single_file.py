"""Write a recording as one HTML file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hookline.display.units import count, size
from hookline.errors import FolderError
from hookline.files.replace_text import replace_text
from hookline.files.sealed_json import MANIFEST
from hookline.recordings import Recording
from hookline.util.optional import load
from hookline.verbs.summary import Summary
from hookline.views.page.entries import Row, columns, read_values, tree_rows
from hookline.views.page.page_state import notices_of_recording
from hookline.views.page.pictures import input_thumbnail
from hookline.views.page.render import environment, table
from hookline.views.pixels import PAGE_NEEDS

if TYPE_CHECKING:
    from PIL.Image import Image

_FILE_NAME = "report.html"
_MAX_IMAGES = 12


class Evidence(NamedTuple):
    """Hold the input images and predicted classes that the page shows above the table.

    Args:
        images: the input images; the first 12 are shown small.
        classes: the predicted classes as (label, probability from 0 to 1), the likeliest first.
    """

    images: Sequence[Image] = ()
    classes: Sequence[tuple[str, float]] = ()


NO_EVIDENCE = Evidence()


def write_recording_page(
    recording: Recording,
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str = "",
    summary: Summary | None = None,
    evidence: Evidence = NO_EVIDENCE,
) -> Path:
    """Write a recording as one HTML file: statistics of every value, and feature maps.

        >>> import hookline as hl
        >>> from hookline.views.page import write_recording_page
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> with hl.record(model) as run:
        ...     _ = model(torch.rand(1, 3, 16, 16))
        >>> write_recording_page(run, tmp_path / "report.html", title="A small net").name
        'report.html'

    The file is self-contained and loads nothing. It is written under a temporary name and renamed,
    so an older page stays until the new one is complete.

    Args:
        recording: the recording to show, in memory or opened from a folder.
        path: the file to write, or an existing folder, in which `report.html` is written. Missing
            folders are created.
        title: the page's title, such as the model's name.
        subtitle: a short description of the input.
        summary: the result of `hl.summary` for the model, for the totals at the top.
        evidence: the model's input images and predicted classes.

    Returns:
        The file's path.

    Raises:
        FolderError: the file cannot be written, or the recording's own folder is damaged.
        HooklineError: jinja2 or pillow is not installed.
    """
    # Both are loaded first, so that a missing package fails before any work.
    templates, _ = environment(), load("PIL.Image", *PAGE_NEEDS)
    rows = tree_rows(recording, read_values(recording))
    target = target_of(path)
    failure = []
    if summary is not None and summary.failure:
        failure = [(f"The summary's run failed: {summary.failure}", "")]
    text = templates.get_template("index.html").render(
        title=title,
        subtitle=subtitle,
        home="",
        model_type=recording.report().model_type,
        now=datetime.now().astimezone(),
        facts=_facts(recording, rows, summary),
        images=[input_thumbnail(image) for image in evidence.images[:_MAX_IMAGES]],
        n_images_left_out=max(len(evidence.images) - _MAX_IMAGES, 0),
        classes=evidence.classes,
        n_images=len(evidence.images),
        view=_view_command(target),
        notices=[*failure, *notices_of_recording(recording, rows)],
        embedded=True,
        **table(rows, columns(rows), "#"),
        silent=[(site, recording.report().why.get(site, "")) for site in recording.report().silent],
    )
    return replace_file(target, text)


def _facts(recording: Recording, rows: list[Row], summary: Summary | None) -> list[tuple[str, str]]:
    """List the totals at the top of the page as (label, text)."""
    n_values = sum(row.entry is not None for row in rows)
    facts = [
        ("Sites", f"{len(recording.sites):,}"),
        ("Values", f"{n_values:,}"),
        ("Passes", f"{len(recording.passes):,}"),
    ]
    if summary is None:
        return facts
    facts += [("Parameters", count(summary.parameters)), ("Weights", size(summary.parameter_bytes))]
    if summary.ran and not summary.failure:
        facts += [("FLOPs", count(summary.flops)), ("Activations", size(summary.activation_bytes))]
    return facts


def _view_command(target: Path) -> str:
    """Return the command that shows the whole recording; its folder if the page lies in it."""
    if os.path.exists(target.parent / MANIFEST):
        return f"hookline view {shlex.quote(str(target.parent))}"
    return "run.save('DIR'), then hookline view DIR"


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the file to write: the path, or `report.html` in it if it is a folder."""
    is_folder = Path(path).is_dir() or os.fspath(path).endswith(("/", os.sep))
    return Path(path) / _FILE_NAME if is_folder else Path(path)


def replace_file(target: Path, text: str) -> Path:
    """Write a file atomically.

    Raises:
        FolderError: the file cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_text(target, text)
    except OSError as error:
        raise FolderError(
            f"cannot write the page {target}: {error.strerror or error}."
            "\nNothing was left behind. Name a file in a writable folder, on a disk with free"
            " space."
        ) from error
    return target
