"""Write the recordings of all ranks as one folder, and read it.

    manifest.json       names the ranks' folders, each with its manifest's checksum
    rank0/, rank1/, …   one recording each, as `folder` writes it

All ranks write into a temporary folder beside the target. Rank 0 renames it after all have
finished, so the target holds either everything or nothing. It must be on a disk that all ranks
share.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from hookline.engine import Site, gather_json, is_grouped, ranks_of, say_by_rank
from hookline.errors import FolderError, HooklineError, RanksError
from hookline.recordings.folder import write_contents
from hookline.recordings.log_entries import Contents
from hookline.recordings.manifest import sync, write_manifest
from hookline.recordings.target_folder import (
    RANK,
    check_target,
    move_into_place,
    name_of_part,
    part,
)


def is_one_of_many(group: Any) -> bool:
    """Return whether this process is one of several ranks of a group."""
    return is_grouped() and dist.get_world_size(group) > 1


def write_ranks(
    folder: str | os.PathLike[str], find: Any, sites: tuple[Site, ...], group: Any, timeout: float
) -> tuple[Path, Contents]:
    """Write this rank's recording into the folder of all ranks. A collective.

    Args:
        folder: the folder of all ranks.
        find: returns this rank's recording as plain data, or raises.
        sites: the sites that this rank selected.
        group: the process group; None means all ranks.
        timeout: the time that ranks wait for one another, in seconds.

    Raises:
        RanksError: a rank is missing, or named another folder, or selected other sites.
        FolderError: a rank could not write. Nothing is left behind.
    """
    question = f"run.save({os.fspath(folder)!r})"
    meeting = _Meeting(question, ranks_of(group, question), timeout)
    me, target = dist.get_rank(), Path(os.path.realpath(folder))
    contents, error = None, None
    try:
        check_target(folder)
        contents = find()
        target.parent.mkdir(parents=True, exist_ok=True)
    except (HooklineError, OSError) as caught:
        error = caught
    said = {
        "sites": [str(site) for site in sites],
        "model": "" if contents is None else _digest(contents),
        "name": name_of_part(target),
    }
    everyone = meeting.share(said, error)
    _check_sites(meeting, everyone)
    assert contents is not None
    building = target.with_name(everyone[0]["name"])
    with ExitStack() as held:
        try:
            sums = _write_one(meeting, held, building, target, contents)
            _move(meeting, building, target, sums)
        finally:
            if me == meeting.ranks[0]:
                shutil.rmtree(building, ignore_errors=True)
    return target, contents


@final
@dataclass(frozen=True)
class _Meeting:
    """The ranks that save one folder together.

    Args:
        question: the call as code, for messages.
        ranks: the global ranks.
        timeout: the time that ranks wait for one another, in seconds.
    """

    question: str
    ranks: list[int]
    timeout: float

    def share(self, said: dict[str, Any], error: Exception | None) -> list[dict[str, Any]]:
        """Exchange a dict between all ranks. A collective.

        Raises:
            FolderError: on every rank, if a rank reports an error.
        """
        said = {**said, "error": None if error is None else _line(error)}
        everyone = gather_json(self.question, said, self.ranks, self.timeout)
        if any(one["error"] for one in everyone):
            texts = [one["error"] or "is ready" for one in everyone]
            raise FolderError(
                f"{self.question}: nothing was written. {say_by_rank(self.ranks, texts)}."
                "\nFix the error named above, or save one rank's recording only: alone=True."
            ) from error
        return everyone


def _write_one(
    meeting: _Meeting, held: ExitStack, building: Path, target: Path, contents: Contents
) -> list[str]:
    """Write this rank's part, wait for the other ranks, and return all manifests' checksums."""
    error: Exception | None = None
    found = ""
    try:
        held.enter_context(part(target, building.name))
        mine = building / f"rank{dist.get_rank()}"
        mine.mkdir()
        found = write_contents(mine, contents)
    except (HooklineError, OSError, ValueError, RecursionError) as caught:
        error = caught
    return [one["sum"] for one in meeting.share({"sum": found}, error)]


def _move(meeting: _Meeting, building: Path, target: Path, sums: list[str]) -> None:
    """Rename the finished folder on the first rank, and report success or failure to all ranks."""
    error: Exception | None = None
    first = meeting.ranks[0]
    if dist.get_rank() == first:
        names = [f"rank{rank}" for rank in meeting.ranks]
        unseen = [name for name in names if not (building / name).is_dir()]
        try:
            if unseen:
                raise FolderError(
                    f"rank {first} does not see the folders of other ranks"
                    f" ({', '.join(unseen[:4])}): the folder must be on a disk that all ranks share"
                )
            write_manifest(building, {"ranks": dict(zip(names, sums, strict=True))})
            sync(building)
            move_into_place(building, target)
        except (HooklineError, OSError) as caught:
            error = caught
    meeting.share({}, error)


def _check_sites(meeting: _Meeting, everyone: list[dict[str, Any]]) -> None:
    """Check that ranks with the same model selected the same sites; pipeline stages may differ."""
    if (
        len({one["model"] for one in everyone}) == 1
        and len({tuple(one["sites"]) for one in everyone}) > 1
    ):
        texts = [", ".join(one["sites"][:8]) for one in everyone]
        raise RanksError(
            f"{meeting.question}: the ranks selected different sites of the same model:"
            f" {say_by_rank(meeting.ranks, texts)}.\nSelect the same sites on every rank, or save"
            " one rank's recording only: alone=True."
        )


def read_ranks(manifest: Any) -> dict[str, str]:
    """Return the names of the ranks' folders, each with its manifest's checksum.

    Raises:
        ValueError: `write_ranks` did not write this manifest.
    """
    ranks = manifest["ranks"]
    if not isinstance(ranks, dict) or not ranks or not all(map(RANK.fullmatch, ranks)):
        raise ValueError(f"ranks must be the folders of one rank or more, got {ranks!r:.80}")
    return ranks


def _digest(contents: Contents) -> str:
    return hashlib.sha256(json.dumps(contents.modules).encode()).hexdigest()[:12]


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
