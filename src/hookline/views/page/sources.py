"""What is shown: folders that may be replaced, deleted or not there yet; recordings in memory.

Imports shown.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol, final

from hookline.recordings import Recording, open_recording
from hookline.views.page.shown import Shown

_MANIFEST = "manifest.json"


class Source(Protocol):
    """Where a recording comes from."""

    name: str

    def state(self) -> str:
        """A text that changes whenever the recording does; empty while there is none."""
        ...

    def read(self) -> Recording:
        """The recording as it is now.

        Raises:
            FolderError: there is none, or it is damaged.
        """
        ...


@final
class FolderSource:
    """A recording in a folder. `run.save` replaces it whole, so that its manifest is a new file."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.name = os.fspath(folder)

    def state(self) -> str:
        """Changes when another manifest takes the place of the one that was read."""
        try:
            found = (self.folder / _MANIFEST).stat()
        except (OSError, ValueError):
            return ""
        return f"{found.st_ino}-{found.st_mtime_ns}-{found.st_size}"

    def read(self) -> Recording:
        """Read the manifest."""
        return open_recording(self.folder)


@final
class RunSource:
    """A recording in memory, which may still be growing."""

    def __init__(self, run: Recording, name: str) -> None:
        self._run = run
        self.name = name

    def state(self) -> str:
        """Changes with every value that is added."""
        return f"{len(self._run.passes)}-{sum(len(one.fired()) for one in self._run.passes)}"

    def read(self) -> Recording:
        """The recording itself."""
        return self._run


@final
class Shelf:
    """The recordings that are shown, opened anew when they have changed."""

    def __init__(self, source: Source, other: Source | None = None) -> None:
        self.source = source
        self.other = other
        self._lock = threading.Lock()
        self._shown: Shown | None = None
        self._state = ""

    @property
    def names(self) -> tuple[str, str]:
        """What the two are called."""
        return self.source.name, self.other.name if self.other is not None else ""

    def state(self) -> str:
        """A text that changes whenever one of them does; empty while one is missing."""
        states = [one.state() for one in (self.source, self.other) if one is not None]
        return " ".join(states) if all(states) else ""

    def shown(self) -> tuple[Shown, str]:
        """What there is to be shown now, and the state that it belongs to.

        Raises:
            FolderError: there is no recording, or it is damaged or of another version.
        """
        with self._lock:
            state = self.state()
            if self._shown is None or (state and state != self._state):
                other = self.other.read() if self.other is not None else None
                self._shown = Shown((self.source.read(), other), self.names)
                self._state = state
            return self._shown, self._state
