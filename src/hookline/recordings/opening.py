"""Opening a recording that was saved, of one process or of many."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.errors import FolderError
from hookline.recordings.entries import Contents
from hookline.recordings.folder import read
from hookline.recordings.manifest import MANIFEST, REMEDY, first_line, read_manifest
from hookline.recordings.pass_record import pass_of
from hookline.recordings.rank_folder import read_ranks
from hookline.recordings.recording import Recording
from hookline.recordings.target_folder import path_of, recovered


def open_recording(folder: str | os.PathLike[str], *, verify: bool = False) -> Recording:
    """Open a recording that was saved with `run.save(folder)`.

        >>> import hookline as hl
        >>> model = nn.Linear(2, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.zeros(1, 2))
        >>> hl.open(run.save(tmp_path / "run"))["(root)"].shape
        torch.Size([1, 3])

    Values are memory-mapped when they are looked up, not before; dtypes are kept as they were. The
    first look-up of a value compares its bytes with their checksum. A folder that all ranks of a
    distributed job saved is opened by any one process, without a group: `run.ranks[1]["fc"]`,
    `run.full("fc", dim=0)`, `run.reduced("fc:grad_output")`.

    Do not write to the folder's files while it is open. A look-up notices it, but where a file is
    cut off under a value that was looked up before, reading that value ends the process (SIGBUS).
    `run.save` writes new files, so it may replace the recording at any time.

    Args:
        folder: the folder that was written.
        verify: compare all values with their checksums now: this reads the whole folder.

    Returns:
        The recording, with the same look-ups as the one that was saved.

    Raises:
        FolderError: there is no recording, it is of another version, or it is damaged.
    """
    path = path_of(folder)
    try:
        recording, parts = _open(path)
    except (FileNotFoundError, NotADirectoryError):
        # It may be between two names just now, or left there when its writer was killed.
        with recovered(path):
            recording, parts = _open_at_rest(path)
    if verify:
        _verify(parts)
    return recording


def _open_at_rest(path: Path) -> tuple[Recording, list[Contents]]:
    """Open what is there while nobody replaces it."""
    try:
        return _open(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (path / MANIFEST).exists():
            raise FolderError(f"{path} is damaged: {first_line(error)}.\n{REMEDY}") from error
        there = "the folder does not exist" if not path.exists() else f"it has no {MANIFEST}"
        there = "it is a file" if path.is_file() else there
        raise FolderError(
            f"{path} is not a recording: {there}.\nGive the folder that run.save(...) wrote."
        ) from None


def _open(path: Path) -> tuple[Recording, list[Contents]]:
    """Open what is there now: the recording, and the contents of each folder.

    Raises:
        FileNotFoundError, NotADirectoryError: nothing is, or it is being replaced.
        FolderError: it is of another version, or damaged.
    """
    manifest = read_manifest(path)
    if "ranks" in manifest:
        return _open_ranks(path, manifest)
    contents = read(path, manifest)
    return _recording_of(contents), [contents]


def _recording_of(contents: Contents) -> Recording:
    recording = Recording(contents.sites, contents.report, contents.modules)
    recording.lost = contents.lost
    for number, failed, entries in contents.passes:
        recording.begin_pass(pass_of(number, failed, entries))
    return recording


def _open_ranks(folder: Path, manifest: Mapping[str, Any]) -> tuple[Recording, list[Contents]]:
    try:
        ranks = read_ranks(manifest)
    except ValueError as error:
        raise FolderError(f"{folder} is damaged: {error}.\n{REMEDY}") from error
    parts = []
    for name, expected in ranks.items():
        one = read_manifest(folder / name)
        if one["checksum"] != expected:
            raise FileNotFoundError(f"{name} must be of the same recording as {MANIFEST}")
        parts.append(read(folder / name, one))
    opened = tuple(map(_recording_of, parts))
    sites = tuple(dict.fromkeys(site for one in opened for site in one.sites))
    recording = Recording(sites, opened[0].report(), opened[0].modules)
    recording.ranks = opened
    recording.lost = list(dict.fromkeys(what for one in opened for what in one.lost))
    return recording, parts


def _verify(parts: list[Contents]) -> None:
    for contents in parts:
        for _, _, entries in contents.passes:
            for entry in entries:
                entry.value.verify()
