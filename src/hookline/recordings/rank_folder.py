"""The recordings of all ranks as one folder. Imports folder, ranks, engine.

    manifest.json       names the ranks' folders
    rank0/, rank1/, …   a recording each, as `folder` writes it

All ranks write beside the place, and rank 0 renames it when all have done so: there is the whole,
or nothing. The folder has to lie on a disk that all of them see.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hookline.engine import Site, is_grouped, meet, ranks_of, say_by_rank
from hookline.engine.errors import FolderError, HooklineError, RanksError
from hookline.recordings.entries import Contents
from hookline.recordings.folder import write
from hookline.recordings.place import check_target, head_of, move_into_place, sync, write_manifest


def is_one_of_many(group: Any) -> bool:
    """Whether this process is one of several that record."""
    return is_grouped() and dist.get_world_size(group) > 1


def write_ranks(
    folder: str | os.PathLike[str], find: Any, sites: tuple[Site, ...], group: Any, timeout: float
) -> tuple[Path, Contents]:
    """Write this rank's recording into the folder of all: a collective.

    Args:
        folder: the folder of all.
        find: gives this rank's recording as plain data, or raises.
        sites: what this rank has selected.
        group: the process group; None is all ranks.
        timeout: how long ranks wait for one another, in seconds.

    Raises:
        RanksError: a rank did not come, or named another folder, or selected other sites.
        FolderError: a rank could not write. Nothing is left.
    """
    question = f"run.save({os.fspath(folder)!r})"
    ranks = ranks_of(group, question)
    me, target = dist.get_rank(), Path(os.path.realpath(folder))
    contents, error = None, None
    try:
        check_target(folder)
        contents = find()
        target.parent.mkdir(parents=True, exist_ok=True)
    except (HooklineError, OSError) as caught:
        error = caught
    said = {
        "error": None if error is None else _line(error),
        "sites": [str(site) for site in sites],
        "model": "" if contents is None else _digest(contents),
        "name": f".{target.name}.{secrets.token_hex(4)}.part",
    }
    everyone = meet(question, said, ranks, timeout)
    _raise_for_any(question, ranks, everyone, error)
    _check_sites(question, ranks, everyone)
    building = target.with_name(everyone[0]["name"])
    try:
        _write_one(building, me, contents, ranks, question, timeout)
        _move(building, target, me == ranks[0], ranks, question, timeout)
    finally:
        if me == ranks[0]:
            shutil.rmtree(building, ignore_errors=True)
    assert contents is not None
    return target, contents


def _write_one(
    building: Path, me: int, contents: Any, ranks: list[int], question: str, timeout: float
) -> None:
    """Write this rank's part, and wait for the others'."""
    error: Exception | None = None
    try:
        building.mkdir(exist_ok=True)
        write(building / f"rank{me}", contents)
    except (HooklineError, OSError) as caught:
        error = caught
    everyone = meet(question, {"error": None if error is None else _line(error)}, ranks, timeout)
    _raise_for_any(question, ranks, everyone, error)


def _move(
    building: Path, target: Path, is_first: bool, ranks: list[int], question: str, timeout: float
) -> None:
    """Rename what all have written, and tell all of them whether that went well."""
    error: Exception | None = None
    if is_first:
        names = [f"rank{rank}" for rank in ranks]
        unseen = [name for name in names if not (building / name).is_dir()]
        try:
            if unseen:
                raise FolderError(
                    f"rank {ranks[0]} does not see what others wrote ({', '.join(unseen[:4])}): the"
                    " folder has to lie on a disk that all ranks share"
                )
            write_manifest(building, {**head_of(), "ranks": names})
            sync(building)
            move_into_place(building, target)
        except (HooklineError, OSError) as caught:
            error = caught
    everyone = meet(question, {"error": None if error is None else _line(error)}, ranks, timeout)
    _raise_for_any(question, ranks, everyone, error)


def _raise_for_any(
    question: str, ranks: list[int], everyone: list[dict[str, Any]], error: Exception | None
) -> None:
    if any(one["error"] for one in everyone):
        texts = [one["error"] or "is ready" for one in everyone]
        raise FolderError(
            f"{question}: nothing was written. {say_by_rank(ranks, texts)}."
            "\nMend what is said there; for one rank's recording by itself: alone=True."
        ) from error


def _check_sites(question: str, ranks: list[int], everyone: list[dict[str, Any]]) -> None:
    """Ranks that hold the same model must have selected the same; stages of a pipeline need not."""
    if (
        len({one["model"] for one in everyone}) == 1
        and len({tuple(one["sites"]) for one in everyone}) > 1
    ):
        texts = [", ".join(one["sites"][:8]) for one in everyone]
        raise RanksError(
            f"{question}: the ranks selected different sites of the same model:"
            f" {say_by_rank(ranks, texts)}.\nSelect the same on every rank; for one rank's"
            " recording by itself: alone=True."
        )


def read_rank_names(manifest: Any) -> list[str]:
    """The folders of a folder of ranks, by its manifest."""
    names = manifest["ranks"]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError("a rank's folder is outside the folder")
    return list(names)


def _digest(contents: Contents) -> str:
    return hashlib.sha256(json.dumps(contents.modules).encode()).hexdigest()[:12]


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".") or type(error).__name__
