"""The state of the page: rows, statistics measured so far, and a recording to compare with.

Only statistics are kept. A value is read on request and its file is closed again, so memory does
not grow with the number of values viewed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.display.text import plural
from hookline.engine import as_written
from hookline.errors import FolderError, InputError
from hookline.recordings import Recording
from hookline.statistics.of_values import Statistics, main_tensor
from hookline.verbs.compare.comparison import ComparedSite, Comparison
from hookline.views.page.entries import (
    Place,
    Row,
    ValueEntry,
    columns,
    list_values,
    measured,
    tree_rows,
)
from hookline.views.page.links import text_of

Notice = tuple[str, str]  # a text, and the label of the row concerned


class FolderContents(NamedTuple):
    """Hold the recording of a folder, or some items of a store."""

    recording: Recording  # the recording, or the items
    # of a store, the statistics of all items by site, for the table
    whole: Mapping[str, Statistics] = {}
    about: str = ""  # of a store, a sentence that says what is shown
    items: tuple[int, ...] = ()  # of a store, the items whose values are shown
    n_items: int = 0  # of a store, how many items it has


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
        self.recording = contents.recording
        self.other = None if other is None else other.recording
        self.names = names
        # One reader at a time: values are large, and reading ends by closing the files.
        self._lock = threading.Lock()
        whole = contents.whole
        self.values = [
            replace(entry, whole=whole.get(entry.place.at)) for entry in list_values(self.recording)
        ]
        twins = list_values(self.other) if self.other is not None else []
        self._twins = {entry.place: entry for entry in twins}
        self.rows = tree_rows(self.recording, self.values)
        self.columns = columns(self.rows)
        self._row_of = {row.entry.order: row for row in self.rows if row.entry is not None}
        self._number_of = {entry.place: entry.order for entry in self.values}
        self._by_site: dict[str, list[ValueEntry]] = {}
        for entry in self.values:
            self._by_site.setdefault(entry.place.at, []).append(entry)
        self._compared: dict[str, ValueEntry] = {}
        for entry in self.values:
            key = _compared_key(entry)
            self._compared[key] = entry
            self._compared.setdefault(_without_pass(key), entry)
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

    def of_site(self, at: str) -> Sequence[ValueEntry]:
        """List the values of a site in firing order."""
        return self._by_site.get(at, ())

    def row(self, entry: ValueEntry) -> Row:
        """Return the row that shows a value."""
        return self._row_of[entry.order]

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

    def measure_some(self, start: int, seconds: float) -> tuple[list[int], int]:
        """Measure values that are not measured yet, row by row, for a limited time.

        Args:
            seconds: the time limit; a value that has been started is finished.

        Returns:
            The indices of the measured rows, and the index to continue from, which may be past the
            last row.
        """
        end = time.monotonic() + seconds
        measured_rows: list[int] = []
        index = max(start, 0)
        while index < len(self.rows) and (not measured_rows or time.monotonic() < end):
            entry = self.rows[index].entry
            if entry is not None and not self.is_measured(entry):
                with self.reading():
                    self.measure(entry)
                measured_rows.append(index)
            index += 1
        return measured_rows, index

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
        self.values[entry.order] = self._row_of[entry.order].entry = entry

    # -- comparing -------------------------------------------------------------------------------

    def entry_at(self, site: str) -> ValueEntry | None:
        """Return the value that a row of a comparison is about, by the row's site; or None."""
        keys = _without_leaf(site), _without_pass(site), _without_pass(_without_leaf(site))
        return next((self._compared[key] for key in (site, *keys) if key in self._compared), None)

    def compared_rows(self, entry: ValueEntry, comparison: Comparison) -> list[ComparedSite]:
        """Return the rows of a comparison that are about a value."""
        return [row for row in comparison if self.entry_at(row.site) is entry]


def notices_of(page: PageState) -> list[Notice]:
    """List the notices of a page."""
    notices = notices_of_recording(page.recording, page.rows)
    if page.recording.lost:
        lost = page.recording.lost
        notices.append((f"Not saved in the folder: {lost[0]}{', …' * (len(lost) > 1)}", ""))
    return notices


def notices_of_recording(recording: Recording, rows: Sequence[Row]) -> list[Notice]:
    """List notices of passes that raised, and of NaN, infinity and overwritten values in rows."""
    notices = [
        (f"Pass {record.number} ended with an exception: only the values before it are here.", "")
        for record in recording.passes
        if record.failed
    ]
    entries = [(row.entry, row.label) for row in rows if row.entry is not None]
    broken = sorted((entry.order, label) for entry, label in entries if entry.non_finite)
    if broken:
        values = plural(len(broken), "value holds", "values hold")
        text = f"{values} NaN or infinity; the first in firing order is"
        notices.append((text, broken[0][1]))
    n_overwritten = sum(entry.is_overwritten for entry, _ in entries)
    if n_overwritten:
        values = plural(n_overwritten, "value was", "values were")
        advice = "Record copies to see them: hl.record(..., copy=True)."
        notices.append((f"{values} overwritten in place after being recorded. {advice}", ""))
    return notices


def _compared_key(entry: ValueEntry) -> str:
    """Return the key of a value in a comparison, with its pass and its backward pass."""
    recorded = entry.recorded
    backward = "" if recorded.backward is None else f"#backward{recorded.backward}"
    return f"{recorded.key}{backward}#pass{recorded.record.number}"


def _without_pass(key: str) -> str:
    return re.sub(r"#pass\d+", "", key)


def _without_leaf(key: str) -> str:
    """Return the key of the whole value: `attn` for `attn:output[1]`."""
    parts = re.fullmatch(r"(.*?)(:\w+)((?:\[[^\]]*\]|\.\w+)+)((?:#\w+)*)", key, re.DOTALL)
    if parts is None:
        return key
    path, port, _, calls = parts.groups()
    return path + port * (port != ":output") + calls


def data_of(value: Any) -> Any:
    """Replace infinity, which JSON lacks, by a very large number."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return 1e308 if value > 0 else -1e308
    return value
