"""The folder of a run: one file that grows by whole frames, and survives a crash up to the last.

    8 bytes     b"hlcurve1", at the beginning of the file
    frames      24 bytes of header (kind, length and checksum of the payload), then the payload

A frame holds a layout as JSON; the order in which the sites of the layout fire, which holds until
the next order; the report of one step: its number, the time, and the slots of each rank; or the
user's own numbers of a step as JSON. An empty frame says that the monitor has ended; the file of a
killed run lacks it. The file is only appended to. A reader stops before a frame that is not whole,
and goes on from there when the file has grown. The headers of the first two frames tell a run from
every other: they hold the checksums of its layout and of its first order, with the time of that.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Never, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from hookline.curves.curves import Curves
from hookline.curves.slot_layout import NO_TURN, Entry, Layout
from hookline.curves.step_reports import StepReport
from hookline.engine.model_fingerprint import RecordedModel
from hookline.errors import FolderError
from hookline.files.local_files import is_deleted, open_regular
from hookline.statistics import Statistic, stats
from hookline.statistics.covariance import CovarianceStatistic
from hookline.statistics.histogram import HistogramStatistic
from hookline.statistics.moments import MomentsStatistic
from hookline.statistics.quantiles import QuantilesStatistic
from hookline.util.fork_safe_lock import fork_safe_lock

FILE = "curves.bin"
_MAGIC = b"hlcurve1"
_HEADER = struct.Struct("<4sIQQ")  # kind, unused, length, checksum
_LAYOUT, _ORDER, _REPORT, _LOGGED, _END = b"layo", b"ordr", b"step", b"logs", b"ends"
_STEP = struct.Struct("<qdQ")  # step, seconds, number of ranks
_SECONDS = struct.Struct("<d")  # of an order: the time of its first report
_MAPPED_BYTES = 2**20  # what is longer is mapped, not read
_MOST_RANKS = 2**20
_MOST_SECONDS = 8e12  # from the epoch: what a date can hold, in browsers too


def is_run(folder: str | os.PathLike[str]) -> bool:
    """Tell whether a folder holds the curves of a run."""
    try:
        path = Path(folder) / FILE
        with os.fdopen(open_regular(path), "rb") as file:
            return bool(_read_head(file.fileno()))
    except PermissionError:
        return os.path.exists(path)  # reading it says what is wrong
    except (OSError, TypeError, ValueError):
        return False


def run_version(folder: str | os.PathLike[str]) -> str:
    """Return a text that changes if a run is replaced; empty if the folder holds no run.

    While a run grows, the text changes once: with the first step.
    """
    try:
        with os.fdopen(open_regular(Path(folder) / FILE), "rb") as file:
            return _version_text(file.fileno(), _read_head(file.fileno()))
    except (OSError, TypeError, ValueError):
        return ""


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

    Attributes:
        model: the identity of the model, written with the first report; None leaves it out.

    Raises:
        FolderError: the folder holds files, or cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path: Path = Path(folder)
        self.model: RecordedModel | None = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = sorted(os.listdir(self.path))
        except OSError as error:
            raise FolderError(
                f"{self.path} cannot be written: {error.strerror}.\nGive to= a folder that you may"
                " write, such as to='runs/1'."
            ) from error
        if names:
            raise FolderError(
                f"{self.path} must be empty, got files in it ({', '.join(names[:3])}"
                f"{', …' * (len(names) > 3)}).\nGive each run a folder of its own."
            )
        self._layout: Layout | None = None
        self._order: NDArray[np.int32] | None = None
        self._size = 0
        self._file: int | None = None
        self._begun: _StartedAppend | None = None

    def add(self, report: StepReport) -> None:
        """Append the report of a step, whole or not at all.

        A report that is added again after an interrupt is written to the same place.

        Raises:
            OSError: the disk is full or gone. Whole frames stay as they are.
            FolderError: another monitor writes to the folder, or the file was deleted.
        """
        if self._file is None:
            self._file = self._create_file()
        if is_deleted(self._file):
            raise FolderError(f"{self.path / FILE} was deleted while the monitor wrote to it.")
        if not self._size:  # also after the disk was full
            self._append_bytes(_MAGIC)
        if self._begun is not None and self._begun.report is report:
            self._size, self._layout, self._order = self._begun.before
        else:
            self._begun = _StartedAppend(report, (self._size, self._layout, self._order))
        if report.logged:
            self._append_bytes(_frame_bytes(_LOGGED, _logged_bytes(report)))
        if report.is_measured:
            self._append_measured_report(report)

    def _append_measured_report(self, report: StepReport) -> None:
        if report.layout is not self._layout:
            model = self.model if self._layout is None else None
            self._append_bytes(_frame_bytes(_LAYOUT, _layout_bytes(report.layout, model)))
            self._layout, self._order = report.layout, None
        if report.order is not None and not _are_equal(report.order, self._order):
            self._append_bytes(_frame_bytes(_ORDER, _order_bytes(report.order, report.seconds)))
            self._order = report.order
        head = _STEP.pack(report.step, report.seconds, len(report.slots))
        self._append_bytes(
            _frame_bytes(_REPORT, head + report.slots.astype("<f8", copy=False).tobytes())
        )

    def _create_file(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            return os.open(self.path / FILE, flags, 0o666)
        except FileExistsError as error:
            raise FolderError(
                f"{self.path} must be of one run, got another monitor's {FILE} in it."
                "\nGive each run a folder of its own."
            ) from error

    def finish(self) -> None:
        """Say that the run has ended, and close the file. Idempotent.

        Raises:
            OSError: the disk is full or gone. The file is closed, and lacks its end.
        """
        if self._file is not None:
            try:
                self._append_bytes(_frame_bytes(_END, b""))
            finally:
                os.close(self._file)
                self._file = None

    def _append_bytes(self, data: bytes) -> None:
        assert self._file is not None
        written = 0
        try:
            while written < len(data):
                written += _write_at(self._file, data[written:], self._size + written)
        except OSError:
            os.ftruncate(self._file, self._size)  # no half of a frame stays
            raise
        self._size += len(data)


@final
@dataclass(frozen=True, slots=True)
class _StartedAppend:
    """Hold a report that is being appended, and the state of the folder before."""

    report: StepReport
    before: tuple[int, Layout | None, NDArray[np.int32] | None]


def _are_equal(order: NDArray[np.int32], other: NDArray[np.int32] | None) -> bool:
    return order is other or (other is not None and np.array_equal(order, other))


def _frame_bytes(kind: bytes, payload: bytes) -> bytes:
    payload += b" " * (-len(payload) % 8)  # slots are aligned in the file
    return _HEADER.pack(kind, 0, len(payload), xxh3_64_intdigest(payload)) + payload


def _layout_bytes(layout: Layout, model: RecordedModel | None) -> bytes:
    entries = [[entry.site, entry.statistic, entry.width, entry.ranks] for entry in layout.entries]
    statistics = [statistic_to_json(statistic) for statistic in layout.statistics]
    identity = {} if model is None else {"model": model.as_json()}
    return json.dumps({"statistics": statistics, "entries": entries, **identity}).encode()


def _order_bytes(order: NDArray[np.int32], seconds: float) -> bytes:
    return _SECONDS.pack(seconds) + order.astype("<i4", copy=False).tobytes()


def _logged_bytes(report: StepReport) -> bytes:
    spelled = {"step": report.step, "seconds": report.seconds, "numbers": dict(report.logged)}
    return json.dumps(spelled).encode()


def _read_logged(payload: Any) -> StepReport:
    fields = json.loads(bytes(payload))
    step, seconds, numbers = fields["step"], fields["seconds"], fields["numbers"]
    if type(step) is not int or abs(step) >= 2**63 or not abs(seconds) < _MOST_SECONDS:
        raise ValueError("a step must have a number and a time")
    return StepReport.from_logged(step, seconds, {str(k): float(n) for k, n in numbers.items()})


def _read_layout(payload: Any) -> tuple[Layout, RecordedModel | None]:
    fields = json.loads(bytes(payload))
    statistics = tuple(map(statistic_from_json, fields["statistics"]))
    entries = [
        Entry(site, statistic, width, None if ranks is None else tuple(ranks))
        for site, statistic, width, ranks in fields["entries"]
    ]
    for entry in entries:
        numbers = (entry.statistic, entry.width, *(entry.ranks or ()))
        if not isinstance(entry.site, str) or any(type(k) is not int or k < 0 for k in numbers):
            raise ValueError("an entry must be of a site and of numbers from 0 up")
        _ = statistics[entry.statistic]
    return Layout(statistics, tuple(entries)), RecordedModel.from_json(fields.get("model"))


@final
class RunReader:
    """Read the reports of a run's folder, and those that are appended later.

    Attributes:
        has_ended: whether the monitor has ended; False of a run that goes on or was killed.
        version: the `run_version` of the folder when it was last read.
        model: the identity of the model, once the first report was read; None if the folder lacks
            it.
    """

    def __init__(self, folder: Path) -> None:
        self.has_ended: bool = False
        self.model: RecordedModel | None = None
        self._path = folder.absolute() / FILE  # the working directory may change
        self._reports: list[StepReport] = []
        self._logged: list[StepReport] = []
        self._layout: Layout | None = None
        self._order: NDArray[np.int32] | None = None
        self._offset = len(_MAGIC)
        self._head = b""
        self._state: tuple[int, ...] = ()  # of the file when it was last read
        self._lock = fork_safe_lock()
        self.version: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the folder, which the copy reads again."""
        return RunReader, (self._path.parent,)

    def read(self) -> Sequence[StepReport]:
        """Return the reports of measured steps so far, in order.

        Raises:
            FolderError: a whole frame is damaged; or the file is gone, or another run's now.
        """
        self._read_if_changed()
        return self._reports

    def read_logged(self) -> Sequence[StepReport]:
        """Return the reports with the user's own numbers so far, in order.

        Raises:
            FolderError: a whole frame is damaged; or the file is gone, or another run's now.
        """
        self._read_if_changed()
        return self._logged

    def _read_if_changed(self) -> None:
        with self._lock:
            state = _file_state(self._path)
            if state and state == self._state:
                return  # nothing was appended
            self._read_appended()
            self._state = state

    def _read_appended(self) -> None:
        with self._open() as file:
            handle = file.fileno()
            head, size = _read_head(handle), os.fstat(handle).st_size
            if not self._is_same_run(head, size):
                raise FolderError(
                    f"{self._path} must be the file that was opened, got another run's or a shorter"
                    f" one.\nOpen it again: hl.open({str(self._path.parent)!r})."
                )
            self._head, self.version = head, _version_text(handle, head)
            if size > self._offset:
                self._parse_frames(_read_or_map(handle, self._offset, size - self._offset))

    def is_replaced(self) -> bool:
        """Tell whether the file is another run's now, or shorter than what was read.

        Raises:
            FolderError: the file cannot be read.
        """
        with self._lock, self._open() as file:
            return not self._is_same_run(_read_head(file.fileno()), os.fstat(file.fileno()).st_size)

    @contextmanager
    def _open(self) -> Iterator[IO[bytes]]:
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                yield file
        except FolderError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a pipe, or cut short while it is read
            why = error.strerror if isinstance(error, OSError) else error
            raise FolderError(
                f"{self._path.parent} cannot be read: {why}.\nCheck that it still holds the run."
            ) from error

    def _is_same_run(self, head: bytes, size: int) -> bool:
        has_read = self._offset > len(_MAGIC)
        return head.startswith(self._head) and (size >= self._offset or not has_read)

    def _parse_frames(self, data: memoryview) -> None:
        at = 0
        while at + _HEADER.size <= len(data):
            kind, unused, length, checksum = _HEADER.unpack_from(data, at)
            payload = data[at + _HEADER.size : at + _HEADER.size + length]
            if kind not in _KINDS or unused or not self._is_length_possible(kind, length, payload):
                raise self._damage_error(at)
            if len(payload) < length:
                if data[-_HEADER.size :] == _frame_bytes(_END, b""):
                    raise self._damage_error(at)  # the length is wrong: no frame follows the last
                break  # it is being written, or its writer was killed
            if xxh3_64_intdigest(payload) != checksum:
                raise self._damage_error(at)
            try:
                self._parse_frame(kind, payload)
            except Exception as error:  # whatever the options of a statistic raise
                raise self._damage_error(at) from error
            at += _HEADER.size + length
        self._offset += at

    def _parse_frame(self, kind: bytes, payload: memoryview) -> None:
        if kind == _LAYOUT:
            self._layout, model = _read_layout(payload)
            self._order, self.model = None, self.model or model
        elif kind == _ORDER:
            assert self._layout is not None
            n_sites = len(self._layout.by_site)
            self._order = np.frombuffer(payload, "<i4", n_sites, _SECONDS.size)
            if (self._order < NO_TURN).any():
                raise ValueError("a rank must be from 0 up")
        elif kind == _LOGGED:
            self._logged.append(_read_logged(payload))
        elif kind == _END:
            self.has_ended = True
        else:
            self._reports.append(self._parse_report(payload))

    def _is_length_possible(self, kind: bytes, length: int, payload: memoryview) -> bool:
        """Tell whether a frame has the length of its kind, before all of it is there."""
        if kind in (_LAYOUT, _LOGGED):
            return True
        if kind == _ORDER and self._layout is not None:
            n_bytes = _SECONDS.size + 4 * len(self._layout.by_site)
            return length == n_bytes + -n_bytes % 8
        if kind == _END or self._layout is None:
            return kind == _END and length == 0
        if len(payload) < _STEP.size:
            return length > len(payload)  # it is being written
        _, seconds, n_ranks = _STEP.unpack_from(payload, 0)
        if not 0 < n_ranks <= _MOST_RANKS or not abs(seconds) < _MOST_SECONDS:
            return False
        return length == _STEP.size + 8 * int(n_ranks) * self._layout.width

    def _parse_report(self, payload: memoryview) -> StepReport:
        step, seconds, n_ranks = _STEP.unpack_from(payload, 0)
        assert self._layout is not None
        width = self._layout.width
        slots = np.frombuffer(payload, "<f8", n_ranks * width, _STEP.size)
        slots = slots.reshape(n_ranks, width)
        return StepReport(step, seconds, self._layout, slots, self._order)

    def _damage_error(self, at: int) -> FolderError:
        self._offset += at  # the reports before it are read, and are not read again
        return FolderError(
            f"{self._path} is damaged at byte {self._offset}.\nCopy the folder again from a"
            " whole one."
        )


_KINDS = (_LAYOUT, _ORDER, _REPORT, _LOGGED, _END)


def _file_state(path: Path) -> tuple[int, ...]:
    """Return numbers that change if a file is replaced or written to; none if there is no file."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _read_head(handle: int) -> bytes:
    """Return the magic bytes and the headers of the first two frames, as far as they are there.

    Raises:
        ValueError: the file is not of a run.
    """
    head = _read_at(handle, len(_MAGIC) + _HEADER.size, 0)
    if not head.startswith(_MAGIC):
        raise ValueError("the file must begin as that of a run")
    if len(head) < len(_MAGIC) + _HEADER.size:
        return _MAGIC
    _, _, length, _ = _HEADER.unpack_from(head, len(_MAGIC))
    if len(head) + length > os.fstat(handle).st_size:
        return head
    second = _read_at(handle, _HEADER.size, len(head) + length)
    return head + second if len(second) == _HEADER.size else head


def _version_text(handle: int, head: bytes) -> str:
    status = os.fstat(handle)
    has_step = len(head) == len(_MAGIC) + 2 * _HEADER.size
    first = f"{xxh3_64_intdigest(head):016x}" if has_step else ""
    return f"run-{status.st_dev}-{status.st_ino}-{first}"


# Windows has no os.pread and no os.pwrite. Each handle here is used by one thread at a time.
def _read_at(handle: int, length: int, offset: int) -> bytes:
    os.lseek(handle, offset, os.SEEK_SET)
    return os.read(handle, length)


def _write_at(handle: int, data: bytes, offset: int) -> int:
    os.lseek(handle, offset, os.SEEK_SET)
    return os.write(handle, data)


def _read_or_map(handle: int, offset: int, length: int) -> memoryview:
    if length < _MAPPED_BYTES:
        return memoryview(_read_at(handle, length, offset))
    return memoryview(mmap.mmap(handle, offset + length, access=mmap.ACCESS_READ))[offset:]


# -- statistics as JSON ----------------------------------------------------------------------------

# The statistics of `hl.stats` by the name of their function; what is written must stay readable.
_KNOWN: dict[str, tuple[type, Callable[..., Any]]] = {
    "moments": (MomentsStatistic, stats.moments),
    "histogram": (HistogramStatistic, stats.histogram),
    "quantiles": (QuantilesStatistic, stats.quantiles),
    "covariance": (CovarianceStatistic, stats.covariance),
}


def statistic_to_json(statistic: Any) -> dict[str, Any]:
    """Describe a statistic as JSON."""
    exact_type = type(statistic)
    for name, (kind, _) in _KNOWN.items():
        if exact_type is kind:
            return {"name": name, "options": statistic.options}
    return {"type": type(statistic).__name__}


def statistic_from_json(spelled: Any) -> Statistic[Any]:
    """Make a statistic from its description. One of a user's own class gives its slots alone."""
    entry = _KNOWN.get(spelled.get("name"))
    if entry is not None:
        statistic: Statistic[Any] = entry[1](**spelled.get("options", {}))
        return statistic
    return UnknownStatistic(str(spelled.get("type", spelled.get("name"))))


@final
class UnknownStatistic:
    """Stand for a statistic whose class is not known here: the results are the bare slots."""

    def __init__(self, name: str) -> None:
        self._name = name

    def start(self, value: Tensor) -> Never:
        """Refuse: nothing can be measured by it."""
        raise self._unknown_class_error("measure")

    def update(self, slots: Tensor, value: Tensor) -> Never:
        """Refuse: nothing can be measured by it."""
        raise self._unknown_class_error("measure")

    def merge(self, slots: Tensor, other: Tensor) -> Never:
        """Refuse: only the class knows how slots add up."""
        raise self._unknown_class_error("merge the ranks")

    def result(self, slots: Tensor) -> Any:
        """Return the slots as they are."""
        return slots.numpy()

    def _unknown_class_error(self, purpose: str) -> FolderError:
        return FolderError(
            f"the statistic {self._name} must be known to {purpose}, and the run's folder holds its"
            " slots only.\nRead one rank's slots: curves.rank(0)[site].results."
        )
