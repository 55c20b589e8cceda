"""Write a recording as one HTML file."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hookline.display.units import count, size
from hookline.errors import FolderError, HooklineError
from hookline.files.atomic_text import write_atomically
from hookline.files.folder_or_url import as_local_path
from hookline.files.sealed_json import MANIFEST
from hookline.findings import Findings
from hookline.recordings import Recording
from hookline.util.optional_imports import require
from hookline.verbs.summary import Summary
from hookline.views.page.class_scores import top_class_scores_of_entry
from hookline.views.page.dataflow import find_edges
from hookline.views.page.image_overlays import (
    Images,
    find_images,
    gradcam_maps_of_last_layer,
    is_model_input,
    norm_maps,
)
from hookline.views.page.module_rows import Row, list_rows
from hookline.views.page.page_state import FolderContents, page_data, template_variables
from hookline.views.page.page_templates import load_template
from hookline.views.page.quantised_maps import IN_FILE, choose_same_channels, quantised_maps
from hookline.views.page.recording_data import findings_data, pack_json, try_to_judge
from hookline.views.page.token_norms import find_token_ids, measure_token_norms, token_blocks
from hookline.views.page.value_entries import (
    ValueEntry,
    ValueKey,
    gradient_or_value_of,
    measure_entry,
)
from hookline.views.page.what_to_draw import Choice, input_thumbnail
from hookline.views.pixels import PAGE_NEEDS

if TYPE_CHECKING:
    from PIL.Image import Image

_FILE_NAME = "report.html"
_MAX_IMAGES = 12
_MOST_NORMS = 20_000  # of tokens in a file
_PICTURE_BYTES = 2 * 1024**2  # of all maps in a file; the server shows each value's own


class ImagesAndClasses(NamedTuple):
    """Hold the input images and predicted classes that the page shows above the table."""

    images: Sequence[Image] = ()  # the input images; the first 12 are shown small
    # The predicted classes as (label, probability from 0 to 1), the likeliest first.
    classes: Sequence[tuple[str, float]] = ()


NO_EVIDENCE = ImagesAndClasses()


def write_recording_page(
    recording: Recording,
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str = "",
    summary: Summary | None = None,
    evidence: ImagesAndClasses = NO_EVIDENCE,
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
    contents = FolderContents(recording, recording.findings, subtitle)
    file, _ = write_folder_contents_page(
        contents, path, title=title, summary=summary, evidence=evidence
    )
    return file


def write_folder_contents_page(
    contents: FolderContents,
    path: str | os.PathLike[str],
    *,
    title: str,
    summary: Summary | None = None,
    evidence: ImagesAndClasses = NO_EVIDENCE,
) -> tuple[Path, Findings | None]:
    """Write a recording, or some items of a store, as `write_recording_page` does.

    Returns:
        The file's path, and the findings that it shows; None if the values cannot be judged.

    Raises:
        FolderError, HooklineError: as of `write_recording_page`.
    """
    # Both are loaded first, so that a missing package fails before any work.
    template, _ = load_template("recording"), require("PIL.Image", *PAGE_NEEDS)
    listed = contents.list_values()
    pictures = _MapsInFile(listed, len(contents.recording.passes))
    entries = [measure_entry(entry, pictures.add_maps) for entry in listed]
    pictures.add_class_scores_and_maps()
    rows = list_rows(contents.recording, entries)
    target = page_path(path)
    variables = template_variables(contents, len(entries))
    variables["facts"] += _model_totals(summary)
    if summary is not None and summary.failure:
        variables["notices"].insert(0, f"The summary's run failed: {summary.failure}")
    findings, note = try_to_judge(contents.judge)
    core = page_data(contents, rows, entries) | findings_data(findings, note, rows, entries)
    core["flow"] = {number: find_edges(rows, entries, number) for number in core["passes"]}
    core["images"] = pictures.image_places
    core["norms"] = _token_norms(rows, entries, core["tokens"])
    core["view"] = _view_command(target, contents)
    text = template.render(
        **variables,
        title=title,
        now=datetime.now().astimezone(),
        evidence=_images_and_classes_data(evidence),
        core=pack_json(core),
        pictures=pictures.script_contents(),
        items=("", 0),
        top="",
    )
    return write_page_file(target, text), findings


def _token_norms(
    rows: Sequence[Row], entries: Sequence[ValueEntry], passes: Sequence[int]
) -> dict[int, Any]:
    """Return the norms of the first sample's tokens, of as many passes as fit, the last first."""
    norms, room = {}, _MOST_NORMS
    for number in reversed(passes):
        chosen = token_blocks(rows, entries, number)
        room -= 0 if chosen is None else chosen.n_tokens * len(chosen.blocks)
        if chosen is not None and room >= 0:
            ids = find_token_ids(entries, number, chosen.n_tokens)
            norms[number] = measure_token_norms(chosen, rows, {}, ids, 0)
    return norms


def _images_and_classes_data(evidence: ImagesAndClasses) -> dict[str, Any]:
    return {
        "images": [input_thumbnail(image) for image in evidence.images[:_MAX_IMAGES]],
        "n_images": len(evidence.images),
        "n_images_left_out": max(len(evidence.images) - _MAX_IMAGES, 0),
        "classes": evidence.classes,
    }


_MAPS_A_SCRIPT = 64  # values in firing order: the page parses a script when one is asked for


class _MapsInFile:
    """The maps of values, as many as fit in a file; each pass has an equal share of it.

    Args:
        entries: the values in firing order.
        n_passes: the number of passes.
    """

    def __init__(self, entries: Sequence[ValueEntry], n_passes: int) -> None:
        self._entries = entries
        self._places = {entry.key: entry for entry in entries}
        self._packed: list[tuple[int, str, str]] = []
        self._room = dict[int, int]()
        self._share = _PICTURE_BYTES // max(n_passes, 1)
        self._channels: dict[ValueKey, dict[str, Any]] = {}
        self._images: dict[int, Images | None] = {}
        self.image_places: dict[int, int] = {}  # by pass, the value with whose maps its image is

    def script_contents(self) -> list[tuple[int, str]]:
        """Return the JSON of each script with its number: what is drawn of some values.

        It holds, by position of the value, `7` its maps, `7 over` what is laid over the input
        images, `7 image` the first of these, and `7 scores` the highest classes.
        """
        parts: dict[int, list[str]] = {}
        for order, name, text in self._packed:
            parts.setdefault(order // _MAPS_A_SCRIPT, []).append(f'"{order}{name}":{text}')
        return [(number, "{" + ",".join(texts) + "}") for number, texts in parts.items()]

    def add_maps(self, entry: ValueEntry, tensor: Tensor) -> None:
        """Keep the maps of a value, of the same channels as those of its gradient."""
        if self._room.setdefault(entry.key.pass_number, self._share) <= 0:
            return
        twin = gradient_or_value_of(self._places.get, entry)
        choice = choose_same_channels(
            Choice(), None if twin is None else self._channels.get(twin.key)
        )
        images = self._images_of_pass(entry)
        grid = None if images is None else images.for_module(entry).grid_of(tensor)
        placed = tensor if grid is None else grid.to_maps(tensor)
        norms = None
        try:
            maps = quantised_maps(placed, entry.site.module_type, choice, IN_FILE)
            if images is not None and grid is not None and grid.form == "tokens":
                norms = norm_maps([("norm", tensor)], images.for_module(entry), 0, IN_FILE)
            if grid is not None and not is_model_input(entry):
                maps["isPlaced"] = True
        except (HooklineError, RuntimeError, TypeError):
            return  # the pane shows its numbers
        if not entry.site.port.startswith("grad"):
            self._channels[entry.key] = maps
        self._add_json(entry, "", maps)
        if norms is not None:
            self._add_json(entry, " over", [norms])

    def add_class_scores_and_maps(self) -> None:
        """Keep the class scores of the first sample, and its class map, for each pass's output."""
        for entry in self._entries:
            images = self._images.get(entry.key.pass_number)
            if images is None or entry.site.path or entry.site.port != "output":
                continue
            scores = top_class_scores_of_entry(entry, images, 0)
            if scores is not None:
                self._add_json(entry, " scores", scores)
            number, beside = entry.key.pass_number, self._places.get
            try:
                last = gradcam_maps_of_last_layer(self._entries, beside, number, images, 0, IN_FILE)
            except (RuntimeError, TypeError):
                continue
            if last is not None:
                self._add_json(entry, " over", [last])

    def _images_of_pass(self, entry: ValueEntry) -> Images | None:
        """Return the images of a value's pass, the first of them alone with its pixels."""
        number = entry.key.pass_number
        if number not in self._images:
            images = find_images(self._entries, number)
            self._images[number] = images
            if images is not None and images.pixels is not None:
                self._images[number] = images._replace(pixels=images.pixels[:1].clone())
                self.image_places[number] = entry.order
                self._add_json(entry, " image", images.image_url_and_size(0))
        return self._images[number]

    def _add_json(self, entry: ValueEntry, name: str, data: Any) -> None:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
        self._room[entry.key.pass_number] -= len(text)
        self._packed.append((entry.order, name, text))


def _model_totals(summary: Summary | None) -> list[tuple[str, str]]:
    """List the totals of a model as (label, text)."""
    if summary is None:
        return []
    facts = [("Parameters", count(summary.parameters)), ("Weights", size(summary.parameter_bytes))]
    if summary.ran and not summary.failure:
        facts += [("FLOPs", count(summary.flops)), ("Activations", size(summary.activation_bytes))]
    return facts


def _view_command(target: Path, contents: FolderContents) -> str:
    """Return the command that shows everything: the folder of a store, or that the page lies in."""
    if contents.store is not None:
        return f"hookline view {shlex.quote(str(contents.store.place))}"
    if os.path.exists(target.parent / MANIFEST):
        return f"hookline view {shlex.quote(str(target.parent))}"
    return "run.save('DIR'), then hookline view DIR"


def page_path(path: str | os.PathLike[str]) -> Path:
    """Return the file to write: a path that ends in `.html`, or else `report.html` in a folder."""
    target = as_local_path(path)
    return target if target.suffix.lower() in (".html", ".htm") else target / _FILE_NAME


def write_page_file(target: Path, text: str) -> Path:
    """Write a file atomically.

    Raises:
        FolderError: the file cannot be written.
    """
    missing = [folder for folder in target.parents if not os.path.exists(folder)]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except BaseException as error:  # also at Ctrl-C
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()
        if not isinstance(error, OSError):
            raise
        # mkdir says "File exists" of a file in the place of the folder.
        is_file = isinstance(error, FileExistsError)
        reason = "its folder is a file" if is_file else error.strerror or error
        raise FolderError(
            f"cannot write the page {target}: {reason}."
            "\nNothing was left behind. Name a file in a writable folder, on a disk with free"
            " space."
        ) from error
    return target
