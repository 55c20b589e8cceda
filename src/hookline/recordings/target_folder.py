"""Check a recording's target folder, and move a finished recording into it atomically.

A recording is written into a hidden folder beside its target, `.NAME.xxxxxxxx.part`, and renamed.
The writer holds a lock on the hidden folder, which the system releases when the process dies. The
next `save` removes hidden folders without a lock. Renames happen under a lock on the parent folder,
so two writers take turns.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hookline.display.text import first_line
from hookline.errors import FolderError
from hookline.recordings.manifest import FORMAT, MANIFEST, read_regular
from hookline.util.own_handle import OwnHandle

try:
    import fcntl
except ImportError:  # not POSIX: no locks, so leftovers stay and writers are not serialised
    fcntl = None  # type: ignore[assignment]

# The files of a recording's folder, the page included, which a new recording may replace.
_OURS = re.compile(r"manifest\.json|values-[\w-]+\.safetensors|report\.html|rank\d+")
RANK = re.compile(r"rank\d+")
_HERE, _EXCHANGE = -100, 2  # Linux's AT_FDCWD and RENAME_EXCHANGE


def path_of(folder: str | os.PathLike[str]) -> Path:
    """Convert a user's argument to a path.

    Raises:
        FolderError: the argument is not a path.
    """
    try:
        return Path(folder)
    except TypeError:
        raise FolderError(
            f"a recording's folder must be a path, got {type(folder).__name__}."
            "\nGive its name, such as 'runs/first'."
        ) from None


def check_target(folder: str | os.PathLike[str]) -> None:
    """Check that a recording may be written to a folder, under the lock of writers.

    Raises:
        FolderError: the folder holds files that are not a recording's.
    """
    target = path_of(folder)
    try:
        parent = Path(os.path.realpath(target)).parent  # raises for an impossible name
    except (OSError, ValueError) as error:
        raise _unusable(target, error) from error
    with _turn(parent):
        _check(target)


def _check(target: Path) -> None:
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise FolderError(
                f"the target of a recording must be a folder, got the file {target}."
                "\nName a new folder."
            )
        others = _others(target)
    except FolderError:
        raise
    except (OSError, ValueError) as error:
        raise _unusable(target, error) from error
    if others:
        raise FolderError(
            f"{target} holds other files ({', '.join(others[:3])}{', …' * (len(others) > 3)})."
            "\nName a new folder, an empty one, or an older recording to replace."
        )


def _unusable(target: Path, error: Exception) -> FolderError:
    return FolderError(f"{target} cannot be used: {first_line(error)}.")


def _others(target: Path) -> list[str]:
    """List the names in a folder that do not belong to a recording."""
    held = sorted(child.name for child in target.iterdir())
    others = [name for name in held if not _OURS.fullmatch(name)]
    for name in held:
        if RANK.fullmatch(name):
            _check(target / name)
    if MANIFEST in held and not others and not _is_manifest(target / MANIFEST):
        return [MANIFEST]
    return others


def _is_manifest(path: Path) -> bool:
    try:
        return FORMAT in read_regular(path)[:200].decode()
    except (UnicodeDecodeError, ValueError):
        return False


def name_of_part(target: Path) -> str:
    """Return a new name for the hidden folder in which a recording is built."""
    return f".{target.name}.{secrets.token_hex(4)}.part"


@contextmanager
def part(target: Path, name: str) -> Iterator[Path]:
    """Create a hidden folder beside the target and lock it until the block ends.

    Leftovers of killed writers are removed. An older recording that a killed writer had moved away
    is restored.

    Args:
        target: the recording's folder.
        name: the hidden folder's name, which the ranks of a distributed job share.

    Raises:
        OSError: the folder cannot be created.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(name)
    with ExitStack() as stack:
        with _turn(target.parent) as is_alone:
            if is_alone:
                _put_back(target)
            left = [path for path in _left_beside(target) if path != building]
            left = [path for path in left if _hold(path, stack, alone=True, waiting=False)]
            building.mkdir(exist_ok=True)
            _hold(building, stack, alone=False)
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        yield building


def move_into_place(building: Path, target: Path) -> None:
    """Rename a finished hidden folder to its target; an older recording takes the hidden name.

    Raises:
        OSError: the rename failed; the older recording is unchanged.
        FolderError: the target holds files that are not a recording's.
    """
    with _turn(target.parent):
        _check(target)
        if _is_free(target):
            building.replace(target)  # one rename, so atomic
            return
        if _exchange(building, target):  # one exchange, so atomic
            return
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        target.replace(old)
        try:
            building.replace(target)
        except OSError:
            old.replace(target)
            raise
        old.replace(building)  # `.part` folders are removed, `.old` folders are restored


@contextmanager
def recovered(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Restore a recording whose replacement was interrupted, and hold the lock in the block.

    Raises:
        FolderError: the recording cannot be restored.
    """
    target = Path(os.path.realpath(folder))
    with _turn(target.parent) as is_alone:
        try:
            if not is_alone and _is_free(target) and _olds(target):
                raise OSError("it cannot be locked")
            _put_back(target)
        except OSError as error:
            raise FolderError(
                f"the replacement of {target} was interrupted, and the older recording cannot be"
                f" restored: {first_line(error)}.\nIf no other process saves there now, rename"
                f" {_olds(target)[0].name} to {target.name}."
            ) from error
        yield


def _put_back(target: Path) -> None:
    olds = _olds(target)
    if olds and _is_free(target):
        olds[0].replace(target)


def _is_free(target: Path) -> bool:
    return not target.exists() or not any(target.iterdir())


def _olds(target: Path) -> list[Path]:
    """List older recordings that were moved away for a replacement, the latest first."""
    found = [path for path in _left_beside(target) if path.suffix == ".old"]
    return sorted(found, key=_when_written, reverse=True)


def _when_written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # another process removed it
        return 0


def _left_beside(target: Path) -> list[Path]:
    """List hookline's hidden folders beside a target, of running and of killed writers."""
    named = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(part|old)")
    try:
        names = [name for name in os.listdir(target.parent) if named.fullmatch(name)]
    except OSError:
        return []
    return [target.with_name(name) for name in names if _is_own(target.with_name(name))]


def _is_own(folder: Path) -> bool:
    """Return whether a folder holds only files that hookline writes; an empty one counts."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return all(
            _OURS.fullmatch(child.name) and (not RANK.fullmatch(child.name) or _is_own(child))
            for child in folder.iterdir()
        )
    except OSError:  # another process removed it, or it is not readable
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders atomically; return False if the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0)


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Hold the lock for renames in a folder; yield False if its file system has no locks."""
    with ExitStack() as stack:
        yield _hold(folder, stack, alone=True)


def _hold(folder: Path, stack: ExitStack, *, alone: bool, waiting: bool = True) -> bool:
    """Lock a folder until the stack closes; return False if it is taken or not supported."""
    if fcntl is None:
        return False
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        handle = OwnHandle(folder, os.O_RDONLY)
    except OSError:
        return False
    stack.callback(handle.close)
    try:
        fcntl.flock(handle, how if waiting else how | fcntl.LOCK_NB)
    except OSError:
        return False
    stack.callback(_unlock, handle)
    return True


def _unlock(handle: OwnHandle) -> None:
    """Unlock a folder at once: a child that was just forked may not have closed its copy yet."""
    if handle.is_open:
        fcntl.flock(handle, fcntl.LOCK_UN)
