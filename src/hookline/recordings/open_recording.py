"""Open a saved recording of one process or of several ranks."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

from hookline.display.text import first_line
from hookline.errors import FolderError
from hookline.files.folder_or_url import LocalPlace, Place
from hookline.files.sealed_json import MANIFEST
from hookline.recordings.folder import parse_manifest, read_manifest, read_rank_checksums
from hookline.recordings.log_entries import FolderContents
from hookline.recordings.pass_record import make_pass
from hookline.recordings.recording import Recording
from hookline.recordings.stored_values import REMEDY


def open_recording(place: Place, *, verify: bool = False) -> Recording:
    """Open a recording that `run.save` wrote. `hl.open` says how its values are read.

    `verify` verifies the checksums of all values now, which reads all files.

    Raises:
        FolderError: the place holds no recording, one of another version, or a damaged one.
    """
    _check_folder(place)
    try:
        recording, parts = _open_unlocked(place)
    except FileNotFoundError:
        with place.wait_for_lock():  # another process may have replaced it meanwhile
            recording, parts = _open_under_lock(place)
    for contents in parts if verify else ():
        for current in contents.passes:
            for entry in current.entries:
                entry.value.verify()
    return recording


def _check_folder(place: Place) -> None:
    """Check that a local place is a folder."""
    try:
        if not isinstance(place, LocalPlace) or stat.S_ISDIR(os.stat(place.folder).st_mode):
            return
        raise _not_opened_error(place, "it is a file")
    except (FileNotFoundError, NotADirectoryError):
        raise _not_opened_error(place, "it does not exist") from None
    except PermissionError:
        return  # reading it says what is wrong


def _open_under_lock(place: Place) -> tuple[Recording, list[FolderContents]]:
    """Open a place under the lock that keeps writers from replacing the recording."""
    try:
        return _open_unlocked(place)
    except FileNotFoundError as error:
        if MANIFEST in place.names():
            raise FolderError(f"{place} is damaged: {first_line(error)}.\n{REMEDY}") from error
        raise _not_opened_error(place, f"it has no {MANIFEST}") from None


def _not_opened_error(place: Place, reason: str) -> FolderError:
    return FolderError(
        f"{place} is not a recording, a store or a run: {reason}."
        "\nGive the folder that run.save, hl.extract or hl.monitor wrote."
    )


def _open_unlocked(place: Place) -> tuple[Recording, list[FolderContents]]:
    """Open a place as it is: return the recording and the contents of each rank's folder."""
    manifest = read_manifest(place)
    if "ranks" in manifest:
        return _open_ranks(place, manifest)
    contents = parse_manifest(place, manifest)
    return _make_recording(contents), [contents]


def _make_recording(contents: FolderContents) -> Recording:
    recording = Recording(contents.sites, contents.report, contents.modules)
    recording.lost = contents.lost
    recording.set_model(contents.model)
    for current in contents.passes:
        recording.begin_pass(make_pass(*current))
    return recording


def _open_ranks(
    place: Place, manifest: Mapping[str, Any]
) -> tuple[Recording, list[FolderContents]]:
    parts = []
    for name, expected in read_rank_checksums(place, manifest).items():
        of_rank = read_manifest(place / name)
        if of_rank["checksum"] != expected:
            raise FileNotFoundError(f"{name} must be of the same recording as {MANIFEST}")
        parts.append(parse_manifest(place / name, of_rank))
    opened = tuple(map(_make_recording, parts))
    sites = tuple(dict.fromkeys(site for rank in opened for site in rank.sites))
    recording = Recording(sites, opened[0].report(), opened[0].modules)
    recording.ranks = opened
    recording.lost = list(dict.fromkeys(text for rank in opened for text in rank.lost))
    return recording, parts
