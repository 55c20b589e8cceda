"""Write reports to a parquet file: a row for each number."""

from __future__ import annotations

from importlib.util import find_spec
from io import FileIO
from pathlib import Path
from typing import Any, final

from hookline.curves import StepReport
from hookline.display.text import first_line
from hookline.errors import AttachError, FolderError
from hookline.util.creating_process import CreatingProcess
from hookline.util.optional_imports import how_to_install
from hookline.verbs.monitor.writers.files import make_parent_folder

_GROUP_ROWS = 2**16


@final
class ParquetWriter:
    """Write a parquet file with the columns step, seconds, site, name and number.

    A parquet file is readable once it is closed, at the end of the monitor.

    Args:
        path: a file that does not exist yet.

    Raises:
        FolderError: the file exists, or its folder cannot be made.
        AttachError: pyarrow is not installed.
    """

    rewrites = True

    def __init__(self, path: Path) -> None:
        self.name: str = str(path)
        self._path = path
        self._file: Any = None
        self._disk: Any = None
        self._rows: dict[str, list[Any]] = _empty_columns()
        self._begun: tuple[StepReport | None, int] = None, 0  # a report, and the rows before it
        if find_spec("pyarrow") is None:
            raise AttachError(
                f"to={str(path)!r} must have pyarrow, got no such package."
                f"\n{how_to_install('store')}"
            )
        make_parent_folder(path)

    def start(self, first: StepReport) -> None:
        """Open the file."""
        import pyarrow
        from pyarrow import parquet

        if self._disk is None:
            self._disk = _BufferedFile(self._path)
        kinds = {"i": pyarrow.int64(), "f": pyarrow.float64(), "s": pyarrow.string()}
        schema = pyarrow.schema([(name, kinds[kind]) for name, kind in _COLUMNS.items()])
        self._file = parquet.ParquetWriter(self._disk, schema)

    def write(self, report: StepReport) -> None:
        """Add the rows of a report."""
        self._disk.drain()
        if self._begun[0] is report:  # an interrupt came, and part of the rows may be there
            for column in self._rows.values():
                del column[self._begun[1] :]
        elif len(self._rows["step"]) >= _GROUP_ROWS:
            self._flush()  # first: a report whose writing raises is written again
        self._begun = report, len(self._rows["step"])
        for (site, name), number in report.numbers_by_site_and_name().items():
            row = report.step, report.seconds, site, name, number
            for column, cell in zip(self._rows.values(), row, strict=True):
                column.append(cell)

    def _flush(self) -> None:
        import pyarrow

        self._file.write_table(pyarrow.table(self._rows, self._file.schema))
        self._rows = _empty_columns()
        self._disk.drain()

    def close(self) -> None:
        """Write the rest and close the file.

        Raises:
            FolderError: the file has no end, so it cannot be read, or it was deleted.
        """
        if self._file is None:
            return
        try:
            self._flush()
            self._file.close()
            self._disk.drain()
        except OSError as error:
            raise FolderError(
                f"{self._path} cannot be read, for its end could not be written:"
                f" {first_line(error)}."
            ) from error
        finally:
            self._file = None
            self._disk.close()
        if not self._path.exists():
            raise FolderError(f"{self._path} was deleted or moved while the monitor wrote to it.")


@final
class _BufferedFile(FileIO):
    """A file that holds what the disk does not take, for pyarrow cannot go on after an error.

    A forked child never writes: pyarrow ends the file when the child drops its writer.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "xb")
        self._process = CreatingProcess()
        self._waiting = bytearray()
        self._size = 0

    def write(self, data: Any) -> int:
        """Have bytes wait for `drain`."""
        if self._process.is_current:
            self._waiting += data
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        """Return the position of the next byte, counted with those that wait."""
        return self._size

    def drain(self) -> None:
        """Write what waits.

        Raises:
            OSError: the disk is full or gone. What it did not take waits.
        """
        while self._waiting:
            del self._waiting[: super().write(self._waiting)]


_COLUMNS = {"step": "i", "seconds": "f", "site": "s", "name": "s", "number": "f"}


def _empty_columns() -> dict[str, list[Any]]:
    return {name: [] for name in _COLUMNS}
