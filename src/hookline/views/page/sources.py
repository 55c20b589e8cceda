"""The folders that the server shows, which may be replaced, deleted or not written yet."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import final

from hookline.recordings import Recording, open_recording
from hookline.views.page.state import PageState

_MANIFEST = "manifest.json"


@final
class FolderSource:
    """A recording in a folder. `run.save` replaces the folder, so its manifest is a new file.

    Args:
        folder: the folder, which need not exist yet.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.name = os.fspath(folder)

    def state(self) -> str:
        """Return a text that changes with the manifest; empty if there is none."""
        try:
            found = (self.folder / _MANIFEST).stat()
        except (OSError, ValueError):
            return ""
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def read(self) -> Recording:
        """Read the manifest.

        Raises:
            FolderError: the folder holds no recording, one of another version, or a damaged one.
        """
        return open_recording(self.folder)


@final
class OpenRecordings:
    """The recordings on the page, reopened when their folders change.

    Args:
        source: the recording whose sites are listed.
        other: a recording to compare with, or None.
    """

    def __init__(self, source: FolderSource, other: FolderSource | None = None) -> None:
        self.source = source
        self.other = other
        self._lock = threading.Lock()
        self._shown: PageState | None = None
        self._state = ""

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two recordings."""
        return self.source.name, self.other.name if self.other is not None else ""

    def state(self) -> str:
        """Return a text that changes with either recording; empty if one is missing."""
        states = [one.state() for one in (self.source, self.other) if one is not None]
        return " ".join(states) if all(states) else ""

    def shown(self) -> tuple[PageState, str]:
        """Return the current recordings and the state that they belong to.

        Raises:
            FolderError: a folder holds no recording, one of another version, or a damaged one.
        """
        with self._lock:
            state = self.state()
            if self._shown is None or (state and state != self._state):
                other = self.other.read() if self.other is not None else None
                self._shown = PageState((self.source.read(), other), self.names)
                self._state = state
            return self._shown, self._state
