"""Open a saved recording of one process or of several ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hookline.display.text import first_line
from hookline.errors import FolderError
from hookline.recordings.folder import read
from hookline.recordings.log_entries import Contents
from hookline.recordings.manifest import MANIFEST, REMEDY, read_manifest
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

    Values are memory-mapped on look-up and keep their dtypes. The first look-up of a value verifies
    its checksum. If all ranks of a distributed job saved the folder, a single process can open it
    without a process group: `run.ranks[1]["fc"]`, `run.full("fc", dim=0)`,
    `run.reduced("fc:grad_output")`.

    Do not write to the folder's files while they are open. A look-up detects changed files. If a
    file is truncated after a look-up, reading that value kills the process (SIGBUS). `run.save`
    writes new files, so it may replace the recording at any time.

    Args:
        folder: the folder that was written.
        verify: verify the checksums of all values now. This reads the whole folder.

    Returns:
        The recording, with the same look-ups as the saved one.

    Raises:
        FolderError: the folder holds no recording, one of another version, or a damaged one.
    """
    path = path_of(folder)
    try:
        recording, parts = _open(path)
    except (FileNotFoundError, NotADirectoryError):
        # Another process may be renaming it, or was killed between two renames.
        with recovered(path):
            recording, parts = _open_at_rest(path)
    if verify:
        _verify(parts)
    return recording


def _open_at_rest(path: Path) -> tuple[Recording, list[Contents]]:
    """Open a folder under the lock that keeps other writers from replacing it."""
    try:
        return _open(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        if os.path.exists(path / MANIFEST):
            raise FolderError(f"{path} is damaged: {first_line(error)}.\n{REMEDY}") from error
        reason = (
            "the folder does not exist" if not os.path.exists(path) else f"it has no {MANIFEST}"
        )
        reason = "it is a file" if os.path.isfile(path) else reason
        raise FolderError(
            f"{path} is not a recording, a store or a run: {reason}."
            "\nGive the folder that run.save, hl.extract or hl.monitor wrote."
        ) from None


def _open(path: Path) -> tuple[Recording, list[Contents]]:
    """Open a folder as it is: return the recording and the contents of each rank's folder.

    Raises:
        FileNotFoundError, NotADirectoryError: the folder does not exist or is being replaced.
        FolderError: the recording has another version or is damaged.
    """
    manifest = read_manifest(path)
    if "ranks" in manifest:
        return _open_ranks(path, manifest)
    contents = read(path, manifest)
    return _recording_of(contents), [contents]


def _recording_of(contents: Contents) -> Recording:
    recording = Recording(contents.sites, contents.report, contents.modules)
    recording.lost = contents.lost
    recording.identify(contents.model)
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
