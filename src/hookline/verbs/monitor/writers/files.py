"""Write reports to files of hookline's own: the folder of a run, JSON lines; or to a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from hookline.curves import RunFolder, StepReport
from hookline.engine.model_fingerprint import RecordedModel
from hookline.errors import FolderError
from hookline.files.local_files import is_deleted


@final
class RunWriter:
    """Write the folder of a run, which `hl.open` reads while it grows.

    Args:
        path: a new or an empty folder.
    """

    rewrites = True

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self.name: str = str(path)

    def identify(self, model: RecordedModel | None) -> None:
        """Note what identifies the model, before the first report."""
        self._folder.model = model

    def start(self, first: StepReport) -> None:
        """Do nothing: the file begins with the first report."""

    def write(self, report: StepReport) -> None:
        """Append a report."""
        self._folder.add(report)

    def close(self) -> None:
        """Close the file."""
        self._folder.finish()


def make_parent_folder(path: Path) -> None:
    """Make the folder of a new file.

    Raises:
        FolderError: the file exists, or its folder cannot be made.
    """
    if path.exists():
        raise FolderError(f"{path} must be a new file, got one that exists.\nName another.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"{path} cannot be written: {error.strerror}.\nGive to= a file in a folder that you may"
            " write, such as to='runs/1.jsonl'."
        ) from error


@final
class JsonLinesWriter:
    """Write a line of JSON for each report: the step, the time, and the numbers by name.

    Each line is flushed, so a killed process loses at most the line that it was writing. NaN and
    infinity are written as `NaN` and `Infinity`, as Python's `json` reads them.

    Args:
        path: a file that does not exist yet.

    Raises:
        FolderError: the file exists, or its folder cannot be made.
    """

    rewrites = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name: str = str(path)
        self._file: Any = None
        self._begun: tuple[StepReport | None, int] = None, 0  # a report, and where its line begins
        make_parent_folder(path)

    def start(self, first: StepReport) -> None:
        """Open the file."""
        self._file = open(self._path, "xb", buffering=0)  # noqa: SIM115  (closed by `close`)

    def write(self, report: StepReport) -> None:
        """Write a line, whole or not at all."""
        if is_deleted(self._file.fileno()):
            raise FolderError(f"{self._path} was deleted while the monitor wrote to it.")
        line = {"step": report.step, "seconds": report.seconds, **report.numbers()}
        data = json.dumps(line).encode() + b"\n"
        if self._begun[0] is report:  # an interrupt came, and part of the line may be there
            self._rewind(self._begun[1])
        self._begun = report, self._file.tell()
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._rewind(self._begun[1])
            raise

    def _rewind(self, size: int) -> None:
        os.ftruncate(self._file.fileno(), size)
        self._file.seek(size)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@final
class FunctionWriter:
    """Call a function with the step and the numbers by name."""

    def __init__(self, function: Callable[[int, dict[str, float]], Any]) -> None:
        self._function = function
        self.name: Any | str = getattr(function, "__name__", type(function).__name__)

    def start(self, first: StepReport) -> None:
        """Do nothing."""

    def write(self, report: StepReport) -> None:
        """Call the function."""
        self._function(report.step, report.numbers())

    def close(self) -> None:
        """Do nothing."""
