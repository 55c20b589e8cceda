"""The folder of a run: one file that grows by whole frames, and survives a crash up to the last.

    8 bytes     b"hlcurve1", at the beginning of the file
    frames      24 bytes of header (kind, length and checksum of the payload), then the payload

A frame holds a layout as JSON, or the report of one step: its number, the time, and the slots of
each rank. An empty frame says that the monitor has ended; the file of a killed run lacks it. The
file is only appended to. A reader stops before a frame that is not whole, and goes on from there
when the file has grown.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from xxhash import xxh3_64_intdigest

from hookline.curves.curves import Curves
from hookline.curves.layout import Entry, Layout
from hookline.curves.spelling import read_statistic, spell_statistic
from hookline.curves.step_reports import StepReport
from hookline.errors import FolderError
from hookline.util.locks import fork_safe_lock

FILE = "curves.bin"
_MAGIC = b"hlcurve1"
_HEADER = struct.Struct("<4sIQQ")  # kind, unused, length, checksum
_LAYOUT, _REPORT, _END = b"layo", b"step", b"ends"
_STEP = struct.Struct("<qdQ")  # step, seconds, number of ranks
_MAPPED_BYTES = 2**20  # what is longer is mapped, not read


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds the curves of a run."""
    try:
        with open(Path(folder) / FILE, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, TypeError, ValueError):
        return False


def open_run(folder: str | os.PathLike[str]) -> Curves:
    """Open the curves of a run, which may still grow.

    Raises:
        FolderError: the folder holds no curves.
    """
    if not is_run(folder):
        raise FolderError(
            f"{folder} must hold the curves of a run, got none.\nGive the folder of"
            " hl.monitor(..., to=folder)."
        )
    return Curves(RunReader(Path(folder)))


@final
class RunFolder:
    """Append reports to the folder of a run.

    Args:
        folder: a new or an empty folder.

    Raises:
        FolderError: the folder holds files, or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            others = sorted(os.listdir(self.path))
        except OSError as error:
            raise FolderError(f"{self.path} cannot be written: {error.strerror}.") from error
        if others:
            raise FolderError(
                f"{self.path} must be empty, got files in it ({', '.join(others[:3])}"
                f"{', …' * (len(others) > 3)}).\nGive each run a folder of its own."
            )
        self._layout: Layout | None = None
        self._size = 0
        self._file: int | None = None

    def add(self, report: StepReport) -> None:
        """Append the report of a step, whole or not at all.

        Raises:
            OSError: the disk is full or gone. Whole frames stay as they are.
            FolderError: another monitor writes to the folder.
        """
        if self._file is None:
            self._file = self._create()
        if not self._size:  # also after the disk was full
            self._append(_MAGIC)
        if report.layout is not self._layout:
            self._append(_frame(_LAYOUT, _layout_bytes(report.layout)))
            self._layout = report.layout
        head = _STEP.pack(report.step, report.seconds, len(report.slots))
        self._append(_frame(_REPORT, head + report.slots.astype("<f8", copy=False).tobytes()))

    def _create(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            return os.open(self.path / FILE, flags, 0o666)
        except FileExistsError as error:
            raise FolderError(
                f"{self.path} must be of one run, got another monitor's {FILE} in it."
                "\nGive each run a folder of its own."
            ) from error

    def close(self) -> None:
        """Say that the run has ended, and close the file. Idempotent.

        Raises:
            OSError: the disk is full or gone. The file is closed, and lacks its end.
        """
        if self._file is not None:
            try:
                self._append(_frame(_END, b""))
            finally:
                os.close(self._file)
                self._file = None

    def _append(self, data: bytes) -> None:
        assert self._file is not None
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._size + written)
        except OSError:
            os.ftruncate(self._file, self._size)  # no half of a frame stays
            raise
        self._size += len(data)


def _frame(kind: bytes, payload: bytes) -> bytes:
    payload += b" " * (-len(payload) % 8)  # slots are aligned in the file
    return _HEADER.pack(kind, 0, len(payload), xxh3_64_intdigest(payload)) + payload


def _layout_bytes(layout: Layout) -> bytes:
    entries = [[one.site, one.statistic, one.width, one.ranks] for one in layout.entries]
    statistics = [spell_statistic(one) for one in layout.statistics]
    return json.dumps({"statistics": statistics, "entries": entries}).encode()


def _read_layout(payload: Any) -> Layout:
    found = json.loads(bytes(payload))
    return Layout(
        tuple(map(read_statistic, found["statistics"])),
        tuple(
            Entry(site, statistic, width, None if ranks is None else tuple(ranks))
            for site, statistic, width, ranks in found["entries"]
        ),
    )


@final
class RunReader:
    """Read the reports of a run's folder, and those that are appended later.

    Attributes:
        has_ended: whether the monitor has ended; False of a run that goes on or was killed.
    """

    def __init__(self, folder: Path) -> None:
        self.has_ended = False
        self._path = folder / FILE
        self._reports: list[StepReport] = []
        self._layout: Layout | None = None
        self._offset = len(_MAGIC)
        self._lock = fork_safe_lock()

    def read(self) -> Sequence[StepReport]:
        """Return the reports so far, in order.

        Raises:
            FolderError: a whole frame is damaged.
        """
        with self._lock, open(self._path, "rb") as file:
            new = os.fstat(file.fileno()).st_size - self._offset
            if new > 0:
                self._take(_bytes_from(file.fileno(), self._offset, new))
        return self._reports

    def _take(self, data: memoryview) -> None:
        at = 0
        while at + _HEADER.size <= len(data):
            kind, _, length, checksum = _HEADER.unpack_from(data, at)
            payload = data[at + _HEADER.size : at + _HEADER.size + length]
            if kind not in (_LAYOUT, _REPORT, _END):
                raise self._damaged(at)
            if len(payload) < length:
                break  # it is being written, or its writer was killed
            if xxh3_64_intdigest(payload) != checksum:
                raise self._damaged(at)
            if kind == _LAYOUT:
                self._layout = _read_layout(payload)
            elif kind == _END:
                self.has_ended = True
            else:
                self._reports.append(self._report(payload))
            at += _HEADER.size + length
        self._offset += at

    def _report(self, payload: memoryview) -> StepReport:
        step, seconds, n_ranks = _STEP.unpack_from(payload, 0)
        assert self._layout is not None
        n_slots = n_ranks * self._layout.width
        slots = np.frombuffer(payload, "<f8", n_slots, _STEP.size)
        return StepReport(step, seconds, self._layout, slots.reshape(n_ranks, -1))

    def _damaged(self, at: int) -> FolderError:
        self._offset += at  # the reports before it are read, and are not read again
        return FolderError(
            f"{self._path} is damaged at byte {self._offset}.\nCopy the folder again from a"
            " whole one."
        )


def _bytes_from(file: int, offset: int, length: int) -> memoryview:
    if length < _MAPPED_BYTES:
        return memoryview(os.pread(file, length, offset))
    return memoryview(mmap.mmap(file, offset + length, access=mmap.ACCESS_READ))[offset:]
