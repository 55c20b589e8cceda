"""The state of the page: rows, statistics measured so far, and a recording to compare with.

Only statistics are kept. A value is read on request and its file is closed again, so memory does
not grow with the number of values viewed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.display.text import plural
from hookline.engine import as_written
from hookline.errors import FolderError, HooklineError, InputError, OverwrittenError
from hookline.recordings import Recording
from hookline.views.page.columns import Column, columns
from hookline.views.page.items import text_of
from hookline.views.page.tree_rows import Row, tree_rows
from hookline.views.page.values import Place, ValueEntry, list_values, measured, read_value
from hookline.views.plots.differences import Difference, difference
from hookline.views.statistics import Statistics, main_tensor, measured_tensors

Notice = tuple[str, str]


class Shown(NamedTuple):
    """What the page shows of a folder.

    Args:
        recording: a recording, or some items of a store.
        whole: of a store, the statistics of all items by site, for the table.
        about: of a store, a sentence that says what is shown.
        items: of a store, the items whose values are shown.
        n_items: of a store, how many items it has.
    """

    recording: Recording
    whole: Mapping[str, Statistics] = {}
    about: str = ""
    items: tuple[int, ...] = ()
    n_items: int = 0


@final
class PageState:
    """One recording, or two side by side.

    Args:
        shown: the recording whose sites are listed, and one to compare with, or None.
        names: the names of both.

    Raises:
        FolderError: a folder is gone or damaged.
    """

    def __init__(self, shown: tuple[Shown, Shown | None], names: tuple[str, str]) -> None:
        self._shown, other = shown
        self.recording = self._shown.recording
        self.other = None if other is None else other.recording
        self.names = names
        # One reader at a time: values are large, and reading ends by closing the files.
        self._lock = threading.Lock()
        whole = self._shown.whole
        self.values = [
            replace(seen, whole=whole.get(seen.place.at)) for seen in list_values(self.recording)
        ]
        others = list_values(self.other) if self.other is not None else []
        self._others = {seen.place: seen for seen in others}
        self.rows = tree_rows(self.recording, self.values)
        self.columns: list[Column] = columns(self.rows, is_compared=self.other is not None)
        self._row_of = {row.seen.order: row for row in self.rows if row.seen is not None}
        self._number_of = {seen.place: seen.order for seen in self.values}
        self._by_site: dict[str, list[ValueEntry]] = {}
        for seen in self.values:
            self._by_site.setdefault(seen.place.at, []).append(seen)
        self.only_there = [
            seen for place, seen in self._others.items() if place not in self._number_of
        ]
        if self.other is not None:
            self._note_what_is_missing()
        self._release()

    @property
    def about(self) -> str:
        """A sentence that says what is shown of a store; empty for a recording."""
        return self._shown.about

    @property
    def items(self) -> tuple[str, int]:
        """The items of a store that are shown, as text, and how many it has; ("", 0) if none."""
        return text_of(self._shown.items), self._shown.n_items

    # -- finding ---------------------------------------------------------------------------------

    def find(
        self, at: str, pass_number: int | None, call: int | None, backward: int | None
    ) -> ValueEntry:
        """Return the first value that an address names; a None parameter matches any number.

        Raises:
            InputError: no value matches.
        """
        at = as_written(at)
        found = [
            seen
            for seen in self._by_site.get(at, ())
            if pass_number in (None, seen.pass_number)
            and call in (None, seen.call)
            and backward in (None, seen.backward)
        ]
        if found:
            return self.values[found[0].order]
        here = self._by_site.get(at)
        what = f"it has no such pass or call of {at}" if here else f"it has no value at {at}"
        raise InputError(f"{self.names[0]}: {what}.\nSearch for it on the start page.")

    def beside(self, place: Place) -> ValueEntry | None:
        """Return the value at a place, or None."""
        number = self._number_of.get(place)
        return None if number is None else self.values[number]

    def there(self, place: Place) -> ValueEntry | None:
        """Return the other recording's value at a place, or None."""
        return self._others.get(place)

    def of_site(self, at: str) -> Sequence[ValueEntry]:
        """List the values of a site in firing order."""
        return self._by_site.get(at, ())

    def row(self, seen: ValueEntry) -> Row:
        """Return the row that shows a value."""
        return self._row_of[seen.order]

    # -- reading ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the read lock in the block, and close the files at its end."""
        with self._lock:
            try:
                yield
            finally:
                self._release()

    def tensor(self, seen: ValueEntry, *, of_other: bool = False) -> Tensor:
        """Read a value's main tensor; call it inside `reading`.

        Raises:
            OverwrittenError: the value was changed in place.
            FolderError: the folder is gone or damaged.
            InputError: the value holds no tensor.
        """
        recording = self.other if of_other else self.recording
        assert recording is not None
        found = main_tensor(read_value(recording, seen))
        if found is None:
            raise InputError("the value holds no tensor.")
        return found

    def measure(self, seen: ValueEntry, *, of_other: bool = False) -> ValueEntry:
        """Measure a value once and return it with its statistics; call it inside `reading`."""
        known = self._others[seen.place] if of_other else self.values[seen.order]
        recording = self.other if of_other else self.recording
        assert recording is not None
        if known.statistics is None and not known.problem:
            try:
                known = measured(recording, known)
            except FolderError as error:
                known = replace(known, problem=str(error).splitlines()[0])
        if not of_other and known.difference is None:
            known = self._compared(known)
        self._remember(known, of_other)
        return known

    def measure_some(self, start: int, seconds: float) -> tuple[list[int], int]:
        """Measure values that are not measured yet, row by row, for a limited time.

        Args:
            start: the index of the first row.
            seconds: the time limit; a value that has been started is finished.

        Returns:
            The indices of the measured rows, and the index to continue from, which may be past the
            last row.
        """
        end = time.monotonic() + seconds
        done: list[int] = []
        at = max(start, 0)
        while at < len(self.rows) and (not done or time.monotonic() < end):
            seen = self.rows[at].seen
            if seen is not None and not self.is_measured(seen):
                with self.reading():
                    self.measure(seen)
                done.append(at)
            at += 1
        return done, at

    def is_measured(self, seen: ValueEntry) -> bool:
        """Return whether a value needs no more measuring."""
        compared = self.other is None or seen.difference is not None
        return compared and (
            seen.statistics is not None or bool(seen.problem) or seen.numel is None
        )

    @property
    def bytes_to_measure(self) -> int:
        """The bytes of all values that are not measured yet."""
        return sum(seen.n_bytes for seen in self.values if not self.is_measured(seen))

    def _release(self) -> None:
        for one in (self.recording, self.other):
            if one is not None:
                one.release()

    def _remember(self, seen: ValueEntry, of_other: bool) -> None:
        if of_other:
            self._others[seen.place] = seen
        else:
            self.values[seen.order] = self._row_of[seen.order].seen = seen

    # -- comparing -------------------------------------------------------------------------------

    def _note_what_is_missing(self) -> None:
        for seen in self.values:
            if seen.place not in self._others:
                gap = Difference(seen.place.at, problem=f"only in {self.names[0]}")
                self._remember(replace(seen, difference=gap), False)

    def _compared(self, seen: ValueEntry) -> ValueEntry:
        twin = self._others.get(seen.place)
        if self.other is None or twin is None:
            return seen
        label = seen.place.at
        try:
            gap = self._largest_difference(seen, twin)
        except OverwrittenError:
            gap = Difference(label, problem="overwritten in place in one of them")
        except (HooklineError, RuntimeError, TypeError) as error:
            gap = Difference(label, problem=(str(error).splitlines() or ["cannot be compared"])[0])
        return replace(seen, difference=gap)

    def _largest_difference(self, seen: ValueEntry, twin: ValueEntry) -> Difference:
        """Compare every tensor of two values; return the difference of those that differ most."""
        assert self.other is not None
        values = measured_tensors(read_value(self.recording, seen))
        twin_values = measured_tensors(read_value(self.other, twin))
        if not values or not twin_values:
            raise InputError("the value holds no tensor.")
        if [leaf for leaf, _ in values] != [leaf for leaf, _ in twin_values]:
            return Difference(seen.place.at, problem="another structure")
        gaps = [
            difference(seen.place.at, tensor, twin_tensor)
            for (_, tensor), (_, twin_tensor) in zip(values, twin_values, strict=True)
        ]
        return max(gaps, key=lambda gap: (bool(gap.problem), gap.relative))


def notices_of(shown: PageState) -> list[Notice]:
    """List the notices of a page, as (text, label of the row concerned)."""
    notices = failed_passes(shown.recording) + notices_of_rows(shown.rows)
    if shown.only_there:
        names = ", ".join(seen.place.at for seen in shown.only_there[:3])
        names += ", …" if len(shown.only_there) > 3 else ""
        values = plural(len(shown.only_there), "value")
        notices.append((f"Only in {shown.names[1]}: {values} ({names}).", ""))
    if shown.recording.lost:
        lost = shown.recording.lost
        notices.append((f"Not saved in the folder: {lost[0]}{', …' * (len(lost) > 1)}", ""))
    return notices


def failed_passes(recording: Recording) -> list[Notice]:
    """List a notice for each pass in which the model raised."""
    return [
        (f"Pass {one.number} ended with an exception: only the values before it are here.", "")
        for one in recording.passes
        if one.failed
    ]


def notices_of_rows(rows: Sequence[Row]) -> list[Notice]:
    """List notices of NaN, infinity and overwritten values among the measured rows."""
    seen = [(row.seen, row.label) for row in rows if row.seen is not None]
    notices = []
    broken = sorted((one.order, label) for one, label in seen if one.non_finite)
    if broken:
        values = plural(len(broken), "value holds", "values hold")
        text = f"{values} NaN or infinity; the first in firing order is"
        notices.append((text, broken[0][1]))
    n_overwritten = sum(one.is_overwritten for one, _ in seen)
    if n_overwritten:
        values = plural(n_overwritten, "value was", "values were")
        advice = "Record copies to see them: hl.record(..., copy=True)."
        notices.append((f"{values} overwritten in place after being recorded. {advice}", ""))
    return notices


def data_of(value: Any) -> Any:
    """Replace infinity, which JSON lacks, by a very large number."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return 1e308 if value > 0 else -1e308
    return value
