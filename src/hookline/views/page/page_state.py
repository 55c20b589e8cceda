"""The state of the page: rows, statistics measured so far, and a recording to compare with.

Only statistics are kept. A value is read on request and its file is closed again, so memory does
not grow with the number of values viewed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, final

from hookline.display.text import plural
from hookline.display.units import size
from hookline.engine import normalize_root
from hookline.errors import FolderError, InputError
from hookline.findings import Findings
from hookline.recordings import Recording
from hookline.stores import Store
from hookline.views.page.dataflow import Edge, find_edges
from hookline.views.page.module_rows import Row, list_rows
from hookline.views.page.recording_data import (
    findings_data,
    rows_and_values_data,
    silent_sites_data,
    try_to_judge,
)
from hookline.views.page.store_data import store_data, with_whole_statistics
from hookline.views.page.url_parameters import format_items
from hookline.views.page.value_entries import ValueEntry, ValueKey, list_values, measure_entry
from hookline.views.page.values_by_site import ValuesBySite


class FolderContents(NamedTuple):
    """Hold the recording of a folder, of one of its ranks, or some items of a store."""

    recording: Recording  # the recording, or the items
    judge: Callable[[], Findings]  # says what is wrong, from files of its own
    about: str = ""  # of a store or of several ranks, a sentence that says what is shown
    # of a store, the items whose values are shown; of several ranks, the rank
    items: tuple[int, ...] = ()
    store: Store | None = None
    n_ranks: int = 0  # 0 of a recording of one process

    @property
    def shown_items_and_total(self) -> tuple[str, int]:
        """The items of a store, or the rank, that are shown, as text, and how many there are.

        ("", 0) of a recording of one process.
        """
        return format_items(self.items), self.n_ranks if self.store is None else len(self.store)

    def list_values(self) -> list[ValueEntry]:
        """List the values, none of them measured; of a store, each with its whole statistics."""
        entries = list_values(self.recording)
        if self.store is None:
            return entries
        return [with_whole_statistics(entry, self.store) for entry in entries]


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
        self.contents = contents
        self.recording: Recording = contents.recording
        self.other: Recording | None = None if other is None else other.recording
        self.names = names
        # One reader at a time: values are large, and reading ends by closing the files.
        self._lock = threading.Lock()
        self._judging = threading.Lock()
        self._findings: dict[str, Any] | None = None
        self.values: list[ValueEntry] = contents.list_values()
        twins = list_values(self.other) if self.other is not None else []
        self._twins = {entry.key: entry for entry in twins}
        self.rows: list[Row] = list_rows(self.recording, self.values)
        self._number_of = {entry.key: entry.order for entry in self.values}
        self._by_site: dict[str, list[ValueEntry]] = {}
        for entry in self.values:
            self._by_site.setdefault(entry.key.at, []).append(entry)
        self.by_key = ValuesBySite(self.values)
        self._close_files()

    # -- finding ---------------------------------------------------------------------------------

    def find(
        self, at: str, pass_number: int | None, call: int | None, backward: int | None
    ) -> ValueEntry:
        """Return the first value that an address names; a None parameter matches any number.

        Raises:
            InputError: no value matches.
        """
        at = normalize_root(at)
        of_site = self._by_site.get(at, [])
        matches = [
            entry
            for entry in of_site
            if pass_number in (None, entry.key.pass_number)
            and call in (None, entry.key.call)
            and backward in (None, entry.key.backward)
        ]
        if matches:
            return self.values[matches[0].order]
        problem = f"it has no such pass or call of {at}" if of_site else f"it has no value at {at}"
        raise InputError(f"{self.names[0]}: {problem}.\nSearch for it on the start page.")

    def entry_at(self, key: ValueKey) -> ValueEntry | None:
        """Return the value of a key, or None."""
        number = self._number_of.get(key)
        return None if number is None else self.values[number]

    def entry_of_other_recording(self, key: ValueKey) -> ValueEntry | None:
        """Return the other recording's value of a key, or None."""
        return self._twins.get(key)

    # -- reading ---------------------------------------------------------------------------------

    @contextmanager
    def read_lock(self) -> Iterator[None]:
        """Hold the read lock in the block, and close the files at its end."""
        with self._lock:
            try:
                yield
            finally:
                self._close_files()

    def measure(self, entry: ValueEntry, *, of_other: bool = False) -> ValueEntry:
        """Measure a value once and return it with its statistics; call it inside `read_lock`."""
        entry = self._twins[entry.key] if of_other else self.values[entry.order]
        if not entry.is_measured:
            try:
                entry = measure_entry(entry)
            except FolderError as error:
                entry = replace(entry, problem=str(error).splitlines()[0])
        if of_other:
            self._twins[entry.key] = entry
        else:
            self.values[entry.order] = entry
        return entry

    def measure_within_time(self, start: int, seconds: float) -> tuple[list[ValueEntry], int]:
        """Measure values in firing order, for a limited time; those measured before take none.

        Args:
            start: the position in firing order to begin at.
            seconds: the time limit; one value is measured in any time.

        Returns:
            The values, measured now or before, and the position to continue from, which may be
            past the last.
        """
        end = time.monotonic() + seconds
        after = max(start, 0)
        with self.read_lock():
            for entry in self.values[after:]:
                if after > start and time.monotonic() >= end:
                    break
                self.measure(entry)
                after += 1
        return self.values[max(start, 0) : after], after

    def findings(self) -> dict[str, Any]:
        """Judge the values once, with a row for each finding.

        They are read from files of its own, so that other pages go on meanwhile.
        """
        with self._judging:
            if self._findings is None:
                judgement = try_to_judge(self.contents.judge)
                self._findings = findings_data(*judgement, self.rows, self.values)
            return self._findings

    def dataflow_edges(self, pass_number: int) -> list[Edge]:
        """Return what flows into what in a pass, as far as its values are measured."""
        with self.read_lock():
            return find_edges(self.rows, self.values, pass_number)

    @property
    def bytes_to_measure(self) -> int:
        """The bytes of all values that are not measured yet."""
        return sum(entry.n_bytes for entry in self.values if not entry.is_measured)

    def _close_files(self) -> None:
        for recording in (self.recording, self.other):
            if recording is not None:
                recording.release()


def page_data(
    contents: FolderContents, rows: Sequence[Row], entries: Sequence[ValueEntry]
) -> dict[str, Any]:
    """Return rows and values as plain data, what never fired, and what is known of a store."""
    store = None if contents.store is None else store_data(contents.store)
    silent = silent_sites_data(contents.recording)
    return rows_and_values_data(rows, entries) | {"silent": silent, "store": store}


def template_variables(contents: FolderContents, n_values: int) -> dict[str, Any]:
    """Return what the template of a recording shows beside its core."""
    recording = contents.recording
    return {
        "subtitle": contents.about,
        "model_type": recording.report().model_type,
        "facts": recording_totals(recording, n_values, contents.store),
        "notices": failed_pass_notices(recording),
        "gaps": missing_values_text(recording),
        "is_store": contents.store is not None,
    }


def recording_totals(
    recording: Recording, n_values: int, store: Store | None
) -> list[tuple[str, str]]:
    """List the totals at the top of the page as (label, text)."""
    sites = number_fact(len(recording.sites), "Site", "Sites")
    if store is not None:
        n_items = number_fact(len(store), "Item", "Items")
        return [sites, n_items, ("Size", size(store.nbytes))]
    values = number_fact(n_values, "Value", "Values")
    return [sites, values, number_fact(len(recording.passes), "Pass", "Passes")]


def number_fact(number: int, noun: str, nouns: str) -> tuple[str, str]:
    """Return a total as (label, text)."""
    return noun if number == 1 else nouns, f"{number:,}"


def failed_pass_notices(recording: Recording) -> list[str]:
    """List what a reader must know of a recording: passes that raised."""
    return [
        f"Pass {record.number} ended with an exception: only the values before it are here."
        for record in recording.passes
        if record.failed
    ]


def missing_values_text(recording: Recording) -> str:
    """Say how many sites have no value, and what was not saved; empty if all is there."""
    n_silent, n_lost = len(recording.report().silent), len(recording.lost)
    parts = [f"{plural(n_silent, 'selected site')} without a value"] * bool(n_silent)
    parts += [f"{plural(n_lost, 'part')} of values not saved"] * bool(n_lost)
    return ", ".join(parts)
