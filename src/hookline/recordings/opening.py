"""Opening a recording that was saved, of one process or of many. Imports recording, the folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hookline.engine.errors import FolderError
from hookline.recordings.folder import read, read_manifest
from hookline.recordings.pass_record import pass_of
from hookline.recordings.rank_folder import read_rank_names
from hookline.recordings.recording import Recording


def open_recording(folder: str | os.PathLike[str]) -> Recording:
    """Open a recording that was saved with `run.save(folder)`.

        >>> import hookline as hl
        >>> model = nn.Linear(2, 3)
        >>> with hl.record(model) as run:
        ...     _ = model(torch.zeros(1, 2))
        >>> hl.open(run.save(tmp_path / "run"))[""].shape
        torch.Size([1, 3])

    Values are memory-mapped when they are looked up, not before; dtypes are kept as they were. A
    folder that all ranks of a distributed job saved is opened by any one process, without a group:
    `run.ranks[1]["fc"]`, `run.full("fc", dim=0)`, `run.reduced("fc:grad_output")`.

    Args:
        folder: the folder that was written.

    Returns:
        The recording, with the same look-ups as the one that was saved.

    Raises:
        FolderError: there is no recording, it is of another version, or it is damaged.
    """
    manifest = read_manifest(folder)
    if "ranks" in manifest:
        return _open_ranks(Path(folder), manifest)
    contents = read(folder, manifest)
    recording = Recording(contents.sites, contents.report, contents.modules)
    recording.lost = contents.lost
    for number, failed, entries in contents.passes:
        recording.begin_pass(pass_of(number, failed, entries))
    return recording


def _open_ranks(folder: Path, manifest: Any) -> Recording:
    try:
        names = read_rank_names(manifest)
    except (ValueError, TypeError) as error:
        raise FolderError(f"{folder} is damaged: {error}.\nRecord it again.") from error
    opened = tuple(open_recording(folder / name) for name in names)
    sites = tuple(dict.fromkeys(site for one in opened for site in one.sites))
    recording = Recording(sites, opened[0].report(), opened[0].modules)
    recording.ranks = opened
    recording.lost = list(dict.fromkeys(what for one in opened for what in one.lost))
    return recording
