"""The state of the page: rows, statistics measured so far, and a recording to compare with.

Only statistics are kept. A value is read on request and its file is closed again, so memory does
not grow with the number of values viewed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.engine import as_written
from hookline.errors import FolderError, InputError
from hookline.recordings import Recording
from hookline.statistics.of_values import Statistics, main_tensor
from hookline.views.page.core import findings_data, judged
from hookline.views.page.entries import Place, ValueEntry, list_values, measured
from hookline.views.page.flow import Edge, flow_of
from hookline.views.page.keys import ValuesByKey
from hookline.views.page.links import text_of
from hookline.views.page.rows import Row, rows_of


class FolderContents(NamedTuple):
    """Hold the recording of a folder, or some items of a store."""

    recording: Recording  # the recording, or the items
    # of a store, the statistics of all items by site, for the table
    whole: Mapping[str, Statistics] = {}
    about: str = ""  # of a store, a sentence that says what is shown
    items: tuple[int, ...] = ()  # of a store, the items whose values are shown
    n_items: int = 0  # of a store, how many items it has
    # opens the recording once more, to judge it; None for a store
    judge: Callable[[], Recording] | None = None

    def values(self) -> list[ValueEntry]:
        """List the values, none of them measured; of a store, each with its whole statistics."""
        entries = list_values(self.recording)
        return [replace(entry, whole=self.whole.get(entry.place.at)) for entry in entries]


@final
class PageState:
    """One recording, or two side by side.

    Args:
        contents: the recording whose sites are listed.
        other: a recording to compare with, or None.
        names: the names of both.

    Raises:
        FolderError: a folder is gone or damaged.
    """

    def __init__(
        self, contents: FolderContents, other: FolderContents | None, names: tuple[str, str]
    ) -> None:
        self._contents = contents
        self.recording: Recording = contents.recording
        self.other: Recording | None = None if other is None else other.recording
        self.names = names
        # One reader at a time: values are large, and reading ends by closing the files.
        self._lock = threading.Lock()
        self._judging = threading.Lock()
        self._findings: dict[str, Any] | None = None
        self.values: list[ValueEntry] = contents.values()
        twins = list_values(self.other) if self.other is not None else []
        self._twins = {entry.place: entry for entry in twins}
        self.rows: list[Row] = rows_of(self.recording, self.values)
        self._number_of = {entry.place: entry.order for entry in self.values}
        self._by_site: dict[str, list[ValueEntry]] = {}
        for entry in self.values:
            self._by_site.setdefault(entry.place.at, []).append(entry)
        self._by_key = ValuesByKey(self.values)
        self._release()

    @property
    def about(self) -> str:
        """A sentence that says what is shown of a store; empty for a recording."""
        return self._contents.about

    @property
    def items(self) -> tuple[str, int]:
        """The items of a store that are shown, as text, and how many it has; ("", 0) if none."""
        return text_of(self._contents.items), self._contents.n_items

    # -- finding ---------------------------------------------------------------------------------

    def find(
        self, at: str, pass_number: int | None, call: int | None, backward: int | None
    ) -> ValueEntry:
        """Return the first value that an address names; a None parameter matches any number.

        Raises:
            InputError: no value matches.
        """
        at = as_written(at)
        of_site = self._by_site.get(at, [])
        matches = [
            entry
            for entry in of_site
            if pass_number in (None, entry.place.pass_number)
            and call in (None, entry.place.call)
            and backward in (None, entry.place.backward)
        ]
        if matches:
            return self.values[matches[0].order]
        problem = f"it has no such pass or call of {at}" if of_site else f"it has no value at {at}"
        raise InputError(f"{self.names[0]}: {problem}.\nSearch for it on the start page.")

    def beside(self, place: Place) -> ValueEntry | None:
        """Return the value at a place, or None."""
        number = self._number_of.get(place)
        return None if number is None else self.values[number]

    def twin(self, place: Place) -> ValueEntry | None:
        """Return the other recording's value at a place, or None."""
        return self._twins.get(place)

    # -- reading ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the read lock in the block, and close the files at its end."""
        with self._lock:
            try:
                yield
            finally:
                self._release()

    def tensor(self, entry: ValueEntry) -> Tensor:
        """Read a value's main tensor; call it inside `reading`.

        Raises:
            OverwrittenError: the value was changed in place.
            FolderError: the folder is gone or damaged.
            InputError: the value holds no tensor.
        """
        tensor = main_tensor(entry.recorded.read())
        if tensor is None:
            raise InputError("the value holds no tensor.")
        return tensor

    def measure(self, entry: ValueEntry, *, of_other: bool = False) -> ValueEntry:
        """Measure a value once and return it with its statistics; call it inside `reading`."""
        entry = self._twins[entry.place] if of_other else self.values[entry.order]
        if entry.statistics is None and not entry.problem:
            try:
                entry = measured(entry)
            except FolderError as error:
                entry = replace(entry, problem=str(error).splitlines()[0])
        if of_other:
            self._twins[entry.place] = entry
            return entry
        self._remember(entry)
        return entry

    def measure_some(self, start: int, seconds: float) -> tuple[list[ValueEntry], int]:
        """Measure values that are not measured yet in firing order, for a limited time.

        Args:
            start: the position in firing order to begin at.
            seconds: the time limit; a value that has been started is finished.

        Returns:
            The measured values, and the position to continue from, which may be past the last.
        """
        end = time.monotonic() + seconds
        measured_now: list[ValueEntry] = []
        order = max(start, 0)
        while order < len(self.values) and (not measured_now or time.monotonic() < end):
            if not self.is_measured(self.values[order]):
                with self.reading():
                    measured_now.append(self.measure(self.values[order]))
            order += 1
        return measured_now, order

    def findings(self) -> dict[str, Any]:
        """Judge the recording once, with a row for each finding; those of a store are not judged.

        The values are read from files of its own, so that other pages go on meanwhile.
        """
        with self._judging:
            if self._findings is None:
                self._findings = self._judge()
            return self._findings

    def _judge(self) -> dict[str, Any]:
        if self._contents.judge is None:
            return findings_data(None, "", self.rows, self.values)
        try:
            recording = self._contents.judge()
        except FolderError as error:
            return findings_data(None, str(error).splitlines()[0], self.rows, self.values)
        try:
            return findings_data(*judged(recording), self.rows, self.values)
        finally:
            recording.release()

    def flow(self, pass_number: int) -> list[Edge]:
        """Return what flows into what in a pass, as far as its values are measured."""
        with self.reading():
            return flow_of(self.rows, self.values, pass_number)

    def is_measured(self, entry: ValueEntry) -> bool:
        """Return whether a value needs no more measuring."""
        return entry.statistics is not None or bool(entry.problem) or entry.numel is None

    @property
    def bytes_to_measure(self) -> int:
        """The bytes of all values that are not measured yet."""
        return sum(entry.n_bytes for entry in self.values if not self.is_measured(entry))

    def _release(self) -> None:
        for recording in (self.recording, self.other):
            if recording is not None:
                recording.release()

    def _remember(self, entry: ValueEntry) -> None:
        self.values[entry.order] = entry

    # -- comparing -------------------------------------------------------------------------------

    def entry_at(self, site: str) -> ValueEntry | None:
        """Return the value that a row of a comparison is about, by the row's site; or None."""
        return self._by_key.get(site)


def notices_of(recording: Recording) -> list[str]:
    """List what a reader must know of a recording: passes that raised, and what was not saved."""
    notices = [
        f"Pass {record.number} ended with an exception: only the values before it are here."
        for record in recording.passes
        if record.failed
    ]
    lost = recording.lost
    if lost:
        notices.append(f"Not saved in the folder: {lost[0]}{', …' * (len(lost) > 1)}")
    return notices
