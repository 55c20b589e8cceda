"""What is shown: folders that may be replaced, deleted or not there yet."""

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
    """A recording in a folder. `run.save` replaces it whole, so that its manifest is a new file.

    Args:
        folder: the folder, which need not be there yet.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.name = os.fspath(folder)

    def state(self) -> str:
        """A text that changes with the manifest; empty while there is none."""
        try:
            found = (self.folder / _MANIFEST).stat()
        except (OSError, ValueError):
            return ""
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def read(self) -> Recording:
        """Read the manifest.

        Raises:
            FolderError: there is no recording, it is of another version, or it is damaged.
        """
        return open_recording(self.folder)


@final
class OpenRecordings:
    """The recordings that are shown, opened anew when they have changed.

    Args:
        source: the one whose sites are listed.
        other: one to compare it with.
    """

    def __init__(self, source: FolderSource, other: FolderSource | None = None) -> None:
        self.source = source
        self.other = other
        self._lock = threading.Lock()
        self._shown: PageState | None = None
        self._state = ""

    @property
    def names(self) -> tuple[str, str]:
        """What the two are called."""
        return self.source.name, self.other.name if self.other is not None else ""

    def state(self) -> str:
        """A text that changes whenever one of them does; empty while one is missing."""
        states = [one.state() for one in (self.source, self.other) if one is not None]
        return " ".join(states) if all(states) else ""

    def shown(self) -> tuple[PageState, str]:
        """What there is to be shown now, and the state that it belongs to.

        Raises:
            FolderError: there is no recording, or it is damaged or of another version.
        """
        with self._lock:
            state = self.state()
            if self._shown is None or (state and state != self._state):
                other = self.other.read() if self.other is not None else None
                self._shown = PageState((self.source.read(), other), self.names)
                self._state = state
            return self._shown, self._state
