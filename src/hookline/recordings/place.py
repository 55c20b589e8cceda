"""The place of a recording on disk: whether it may go there, and how it gets there whole.

Imports engine.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hookline.engine.errors import FolderError

FORMAT = "hookline-recording"
VERSION = 1
MANIFEST = "manifest.json"
# What may lie in a recording's folder, to be replaced with it: ours, the page included.
_OURS = re.compile(r"manifest\.json|values-[\w-]+\.safetensors|report\.html|rank\d+")
_RANK = re.compile(r"rank\d+")


def check_target(folder: str | os.PathLike[str]) -> None:
    """Make sure that a recording may be written here.

    Raises:
        FolderError: there is something that is not a recording.
    """
    target = Path(folder)
    try:
        os.path.realpath(target)  # a name that no file can have
        if not target.exists():
            return
        if not target.is_dir():
            raise FolderError(f"{target} is a file; name a folder for the recording.")
        held = sorted(child.name for child in target.iterdir())
        others = [name for name in held if not _OURS.fullmatch(name)]
        for name in held:
            if _RANK.fullmatch(name):
                check_target(target / name)
        if MANIFEST in held and not others and not _is_manifest(target / MANIFEST):
            others = [MANIFEST]
    except FolderError:
        raise
    except (OSError, ValueError) as error:
        raise FolderError(f"{target} cannot be used: {first_line(error)}.") from error
    if others:
        raise FolderError(
            f"{target} holds something else ({', '.join(others[:3])}{', …' * (len(others) > 3)})."
            "\nName a new folder, an empty one, or an older recording to replace."
        )


def _is_manifest(path: Path) -> bool:
    try:
        return FORMAT in path.read_text("utf-8")[:200]
    except UnicodeDecodeError:
        return False


def move_into_place(building: Path, target: Path) -> None:
    """Rename a folder that was built beside its place into it, in the place of an older one."""
    if not target.exists() or not any(target.iterdir()):
        building.replace(target)  # one rename: there or not there
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.replace(old)
    try:
        building.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Push a file, or a folder's names, to the disk: the rename must not overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def head_of() -> dict[str, Any]:
    """What every manifest begins with."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "hookline": _version(),
        "torch": str(torch.__version__),
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Write a folder's manifest, down to the disk."""
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1), "utf-8")
    sync(path)
    return path


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__).rstrip(".")


def _version() -> str:
    try:
        return version("hookline")
    except PackageNotFoundError:
        return "unknown"
