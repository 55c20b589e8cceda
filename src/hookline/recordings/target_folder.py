"""The place of a recording on disk: whether it may go there, and how it gets there whole.

A recording is written into a hidden folder beside its place, `.NAME.xxxxxxxx.part`, and renamed.
Its writer holds a lock on the hidden folder, which the system frees when the process dies: the next
`save` removes folders that nobody holds. Renaming is done under a lock on the folder around it, so
that two writers take turns.
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

from hookline.errors import FolderError
from hookline.recordings.manifest import FORMAT, MANIFEST, first_line, read_regular

try:
    import fcntl
except ImportError:  # not POSIX: without locks, leftovers stay, and writers had better not meet
    fcntl = None  # type: ignore[assignment]

# What may lie in a recording's folder, to be replaced with it: ours, the page included.
_OURS = re.compile(r"manifest\.json|values-[\w-]+\.safetensors|report\.html|rank\d+")
RANK = re.compile(r"rank\d+")
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def path_of(folder: str | os.PathLike[str]) -> Path:
    """Take a folder as a person gives it.

    Raises:
        FolderError: it is not a path.
    """
    try:
        return Path(folder)
    except TypeError:
        raise FolderError(
            f"a recording's folder must be a path, got {type(folder).__name__}."
            "\nGive its name, such as 'runs/first'."
        ) from None


def check_target(folder: str | os.PathLike[str]) -> None:
    """Make sure that a recording may be written here, while no other writer replaces it.

    Raises:
        FolderError: there is something that is not a recording.
    """
    target = path_of(folder)
    try:
        parent = Path(os.path.realpath(target)).parent  # a name that no file can have raises
    except (OSError, ValueError) as error:
        raise _unusable(target, error) from error
    with _turn(parent):
        _check(target)


def _check(target: Path) -> None:
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise FolderError(f"{target} is a file; name a folder for the recording.")
        others = _others(target)
    except FolderError:
        raise
    except (OSError, ValueError) as error:
        raise _unusable(target, error) from error
    if others:
        raise FolderError(
            f"{target} holds something else ({', '.join(others[:3])}{', …' * (len(others) > 3)})."
            "\nName a new folder, an empty one, or an older recording to replace."
        )


def _unusable(target: Path, error: Exception) -> FolderError:
    return FolderError(f"{target} cannot be used: {first_line(error)}.")


def _others(target: Path) -> list[str]:
    """What in a folder is not a recording's."""
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
    """A new name for the hidden folder in which a recording is built."""
    return f".{target.name}.{secrets.token_hex(4)}.part"


@contextmanager
def part(target: Path, name: str) -> Iterator[Path]:
    """Make a hidden folder beside the target, to be filled; hold it until the block ends.

    What writers left that were killed is removed, or put back where it was an older recording.

    Args:
        target: where the recording is to go.
        name: the hidden folder's; the ranks of a distributed job share one.

    Raises:
        OSError: it cannot be made.
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
    """Rename a folder that was built beside its place into it; an older one takes its name.

    Raises:
        OSError: it cannot be done; the older one is where it was.
        FolderError: there is something that is not a recording.
    """
    with _turn(target.parent):
        _check(target)
        if _is_free(target):
            building.replace(target)  # one rename: there or not there
            return
        if _exchange(building, target):  # one rename: the older one or this one
            return
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
        target.replace(old)
        try:
            building.replace(target)
        except OSError:
            old.replace(target)
            raise
        old.replace(building)  # to be removed; ".old" is what would have to be put back


@contextmanager
def recovered(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Put back the older recording whose replacement was interrupted; let nobody replace it now.

    Raises:
        FolderError: it cannot be put back.
    """
    target = Path(os.path.realpath(folder))
    with _turn(target.parent) as is_alone:
        try:
            if not is_alone and _is_free(target) and _olds(target):
                raise OSError("it cannot be locked")
            _put_back(target)
        except OSError as error:
            raise FolderError(
                f"{target} was not replaced to the end, and cannot be put back:"
                f" {first_line(error)}.\nIf nobody saves there now, rename"
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
    """Older recordings that were moved away, to be replaced; the latest first."""
    found = [path for path in _left_beside(target) if path.suffix == ".old"]
    return sorted(found, key=_when_written, reverse=True)


def _when_written(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # another has removed it meanwhile
        return 0


def _left_beside(target: Path) -> list[Path]:
    """Hookline's own hidden folders beside a target, of writers dead or alive."""
    named = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(part|old)")
    try:
        names = [name for name in os.listdir(target.parent) if named.fullmatch(name)]
    except OSError:
        return []
    return [target.with_name(name) for name in names if _is_own(target.with_name(name))]


def _is_own(folder: Path) -> bool:
    """Whether a folder holds nothing but what hookline writes, however little of it."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return all(
            _OURS.fullmatch(child.name) and (not RANK.fullmatch(child.name) or _is_own(child))
            for child in folder.iterdir()
        )
    except OSError:  # another has removed it meanwhile, or it may not be read
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names in one step, where the system can."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    names = os.fsencode(one), os.fsencode(other)
    return bool(rename(_HERE, names[0], _HERE, names[1], _EXCHANGE) == 0)


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Wait for one's turn to rename in a folder; False where its disk knows no locks."""
    with ExitStack() as stack:
        yield _hold(folder, stack, alone=True)


def _hold(folder: Path, stack: ExitStack, *, alone: bool, waiting: bool = True) -> bool:
    """Lock a folder until the stack ends; False where others hold it, or it knows no locks."""
    if fcntl is None:
        return False
    how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    stack.callback(os.close, handle)
    try:
        fcntl.flock(handle, how if waiting else how | fcntl.LOCK_NB)
    except OSError:
        return False
    # Not only closed: a child that was forked meanwhile has the handle too.
    stack.callback(fcntl.flock, handle, fcntl.LOCK_UN)
    return True
