"""Replace the recording in a folder in one step, by replacing the manifest that names its files.

New files have new names, and lie beside the older ones. The new manifest then takes the place of
the older one, and the files that it does not name are removed. A crash at any moment leaves the
older recording or the new one.

    .1a2b3c4d.writing    locked while the writer lives whose files have 1a2b3c4d in their names

Writers take turns to replace the manifest. Where there are no locks, only the files of the older
manifest are removed, because the rest may be those of a writer that lives.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import final

from hookline.display.text import first_line, listed
from hookline.errors import FolderError
from hookline.files.folder_lock import flock
from hookline.files.folder_or_url import LocalPlace, Place, as_place
from hookline.files.local_files import FileState
from hookline.files.sealed_json import MANIFEST, FolderFormat

RECORDING = FolderFormat("hookline-recording", 2, "a recording", "run.save(...)", "record it again")
RANK = re.compile(r"rank\d+(-[0-9a-f]{8})?")
_PAGE = "report.html"
_MARK = re.compile(r"\.([0-9a-f]{8})\.writing")
_OF_DRAFT = re.compile(r"[.-][0-9a-f]{8}\b")  # the token in a name
# The files of a recording's folder, the page included, which a new recording may replace.
_OURS = re.compile(
    rf"manifest\.json|values-[\w-]+\.safetensors|report\.html|{RANK.pattern}"
    r"|\.[0-9a-f]{8}\.(writing|page|manifest)|\.manifest\.json\.\d+\.[0-9a-f]{8}\.part"
)


def as_recording_place(folder: str | os.PathLike[str]) -> Place:
    """Return the place of a folder or a URL."""
    if not isinstance(folder, str | os.PathLike):
        raise FolderError(
            f"a recording's folder must be a path, got {type(folder).__name__}."
            "\nGive its name, such as 'runs/first'."
        )
    return as_place(folder)


def resolve_links(folder: str | os.PathLike[str]) -> Place:
    """Return the place to write a recording to: that of the folder that a link leads to.

    Raises:
        FolderError: it is neither a folder nor a URL, or cannot be used.
    """
    place = as_recording_place(folder)
    if isinstance(place, LocalPlace):
        try:
            place.folder = Path(os.path.realpath(place.folder))
        except (OSError, ValueError) as error:
            raise _unusable_error(place, error) from error
    return place


def check_target(folder: str | os.PathLike[str]) -> None:
    """Check that a recording may be written to a folder, while no other writer replaces its files.

    Raises:
        FolderError: the folder holds files that are not a recording's, or cannot be used.
    """
    place = resolve_links(folder)
    with place.wait_for_lock():
        _check_replaceable(place)


def _check_replaceable(place: Place) -> None:
    try:
        if isinstance(place, LocalPlace) and place.folder.exists() and not place.folder.is_dir():
            raise FolderError(
                f"the target of a recording must be a folder, got the file {place}."
                "\nName a new folder."
            )
        foreign = _foreign_file_names(place)
    except FolderError:
        raise
    except (OSError, ValueError) as error:
        raise _unusable_error(place, error) from error
    if foreign:
        raise FolderError(
            f"{place} holds other files ({listed(foreign, 3)})."
            "\nName a new folder, an empty one, or an older recording to replace."
        )


def _unusable_error(place: Place, error: Exception) -> FolderError:
    return FolderError(f"{place} cannot be used: {first_line(error)}.")


def _foreign_file_names(place: Place) -> list[str]:
    """List the names in a place that do not belong to a recording."""
    names = place.names(hidden=True)
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    for name in filter(RANK.fullmatch, names):
        _check_replaceable(place / name)
    if MANIFEST in names and not foreign and not _has_recording_manifest(place):
        return [MANIFEST]
    return foreign


def _has_recording_manifest(place: Place) -> bool:
    try:
        return RECORDING.is_format_of(place)
    except ValueError:  # a pipe, a device or a folder
        return False


@final
class RecordingDraft:
    """The files of a recording until a manifest names them; those that none names are removed.

    The block begins with a check of the place, and removes what killed writers have left.

    Args:
        place: the place.
        leads: whether this process replaces the manifest, and removes the files if it does not.

    Attributes:
        token: the text that the names of the files have in them; the ranks of a job share one.

    Raises:
        FolderError: the place holds files that are not a recording's.
        OSError: the place cannot be written to.
    """

    def __init__(self, place: Place, *, leads: bool = True) -> None:
        self.token: str = secrets.token_hex(4)
        self._place, self._leads = place, leads
        self._mark = ExitStack()
        self._is_new = isinstance(place, LocalPlace) and not place.folder.exists()
        self._is_committed = False
        self._written: FileState | None = None  # the state of the manifest that was written

    def __enter__(self) -> RecordingDraft:
        try:
            self._prepare_folder()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _prepare_folder(self) -> None:
        place = self._place
        if isinstance(place, LocalPlace) and not place.folder.exists():
            place.folder.mkdir(parents=True, exist_ok=True)
        with place.wait_for_lock() as is_alone:
            _check_replaceable(place)
            if isinstance(place, LocalPlace):
                mark = place.folder / f".{self.token}.writing"
                self._mark.callback(mark.unlink, missing_ok=True)
                mark.touch()
                flock(mark, self._mark, shared=True)
            if is_alone:
                names = list(filter(_OF_DRAFT.search, place.names(hidden=True)))
                with suppress(OSError, ValueError):  # the manifest cannot be read
                    _remove_abandoned_files(place, names)

    def __exit__(self, *_: object) -> None:
        place = self._place
        with place.wait_for_lock(), suppress(OSError, ValueError):  # the next writer clears up
            self._mark.close()
            # Another writer, who has replaced the manifest meanwhile, left the files to this one.
            if self._leads and (not self._is_committed or self._written != _manifest_state(place)):
                _remove_abandoned_files(place, self._draft_file_names())
                if self._is_new and not self._is_committed and isinstance(place, LocalPlace):
                    place.folder.rmdir()  # unless it holds files

    def _draft_file_names(self) -> list[str]:
        return [name for name in self._place.names(hidden=True) if self.token in name]

    def commit(self, manifest: bytes) -> None:
        """Replace the manifest, and remove the files that the new one does not name.

        Raises:
            FolderError: the place holds files of foreign, or the manifest cannot be written. The
                older recording is still there.
        """
        place = self._place
        with place.wait_for_lock() as is_alone:
            _check_replaceable(place)
            older = _read_manifest(place)
            self._replace_manifest(manifest)
            self._is_committed, self._written = True, _manifest_state(place)
            with suppress(OSError, ValueError):  # the next writer removes the rest
                names = place.names(hidden=True)
                _remove_abandoned_files(
                    place, names if is_alone else _names_in_manifest(names, older)
                )

    def _replace_manifest(self, manifest: bytes) -> None:
        """Replace the manifest; the page of the older recording goes with it."""
        place = self._place
        if not isinstance(place, LocalPlace):
            place.write(MANIFEST, [manifest])
            place.remove(_PAGE)
            return
        new = f".{self.token}.manifest"
        place.write_new(new, [manifest])
        page, aside = place.folder / _PAGE, place.folder / f".{self.token}.page"
        with suppress(FileNotFoundError):
            page.rename(aside)
        try:
            place.move(new, MANIFEST)
        except BaseException:
            with suppress(FileNotFoundError):
                aside.rename(page)
            raise
        with suppress(OSError):  # the next writer removes it
            aside.unlink()


def _manifest_state(place: Place) -> FileState | None:
    """Return the state of the manifest; None where files have none, or it is gone."""
    try:
        return place.state(MANIFEST) if isinstance(place, LocalPlace) else None
    except OSError:
        return None


def _read_manifest(place: Place) -> bytes:
    try:
        return place.read(MANIFEST)
    except FileNotFoundError:
        return b""


def _names_in_manifest(names: list[str], manifest: bytes) -> list[str]:
    """List the names that a manifest has as JSON texts. Its own name counts."""
    return [name for name in names if name == MANIFEST or f'"{name}"'.encode() in manifest]


def _remove_abandoned_files(place: Place, names: list[str]) -> None:
    """Remove files that neither the manifest names nor a living writer has written."""
    marks = {match[1]: name for name in names if (match := _MARK.fullmatch(name))}
    living = [token for token, name in marks.items() if _is_locked(place, name)]
    named = _names_in_manifest(names, _read_manifest(place))
    for name in filter(_OURS.fullmatch, names):
        if name not in named and not any(token in name for token in living):
            remove = place.remove_folder if RANK.fullmatch(name) else place.remove
            remove(name)


def _is_locked(place: Place, name: str) -> bool:
    with ExitStack() as stack:
        return isinstance(place, LocalPlace) and flock(place.folder / name, stack) is None
