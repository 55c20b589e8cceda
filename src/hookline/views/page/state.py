"""A recording as it is shown: its rows, what has been measured of it, another beside it.

Statistics are kept as numbers; a value is read when it is asked for, and its file is closed again,
so that memory does not grow with what was looked at.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from torch import Tensor

from hookline.display.text import plural
from hookline.engine import as_written
from hookline.errors import FolderError, HooklineError, InputError, OverwrittenError
from hookline.recordings import Recording
from hookline.views.page.columns import Column, columns
from hookline.views.page.rows import Row, tree_rows
from hookline.views.page.values import Place, ValueEntry, list_values, measured, read_value
from hookline.views.plots.differences import Difference, difference
from hookline.views.statistics import main_tensor

Notice = tuple[str, str]


@final
class PageState:
    """One recording, or two side by side.

    Args:
        recordings: the one whose sites are listed; and one to compare it with, or None.
        names: what they are called.

    Raises:
        FolderError: a folder is gone or damaged.
    """

    def __init__(
        self, recordings: tuple[Recording, Recording | None], names: tuple[str, str]
    ) -> None:
        self.recording, self.other = recordings
        self.names = names
        # One reader at a time: values are large, and files are opened and closed.
        self._lock = threading.Lock()
        self.values = list_values(self.recording)
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

    # -- finding ---------------------------------------------------------------------------------

    def find(
        self, at: str, pass_number: int | None, call: int | None, backward: int | None
    ) -> ValueEntry:
        """The value that an address names; what it leaves out is the first one that there is.

        Raises:
            InputError: there is none.
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
        """The value in the same place, if there is one."""
        number = self._number_of.get(place)
        return None if number is None else self.values[number]

    def there(self, place: Place) -> ValueEntry | None:
        """The other recording's value in the same place."""
        return self._others.get(place)

    def of_site(self, at: str) -> Sequence[ValueEntry]:
        """Every value of a site, in the order in which they fired."""
        return self._by_site.get(at, ())

    def row(self, seen: ValueEntry) -> Row:
        """The line that shows a value."""
        return self._row_of[seen.order]

    # -- reading ---------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While it lasts nobody else reads; at its end the files are closed."""
        with self._lock:
            try:
                yield
            finally:
                self._release()

    def tensor(self, seen: ValueEntry, *, of_other: bool = False) -> Tensor:
        """The tensor that stands for a value; to be called while `reading`.

        Raises:
            OverwrittenError: it was changed in place. FolderError: the folder is gone or damaged.
            InputError: it holds no tensor.
        """
        recording = self.other if of_other else self.recording
        assert recording is not None
        found = main_tensor(read_value(recording, seen))
        if found is None:
            raise InputError("it holds no tensor.")
        return found

    def measure(self, seen: ValueEntry, *, of_other: bool = False) -> ValueEntry:
        """A value with its statistics, which are remembered; to be called while `reading`."""
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
        """Measure what has not been, line by line, for about so long.

        Args:
            start: the first line.
            seconds: after these no further value is begun.

        Returns:
            The lines that were measured; the line to go on from, which may be past the last.
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
        """Whether a value's numbers are known, as far as they ever will be."""
        compared = self.other is None or seen.difference is not None
        return compared and (
            seen.statistics is not None or bool(seen.problem) or seen.numel is None
        )

    @property
    def bytes_to_measure(self) -> int:
        """How much would have to be read."""
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
            gap = difference(label, self.tensor(seen), self.tensor(twin, of_other=True))
        except OverwrittenError:
            gap = Difference(label, problem="overwritten in place in one of them")
        except (HooklineError, RuntimeError, TypeError) as error:
            gap = Difference(label, problem=(str(error).splitlines() or ["cannot be compared"])[0])
        return replace(seen, difference=gap)


def notices_of(shown: PageState) -> list[Notice]:
    """What a reader must not miss, as (text, label of the line that it is about)."""
    notices = failed_passes(shown.recording) + notices_of_rows(shown.rows)
    if shown.only_there:
        names = ", ".join(seen.place.at for seen in shown.only_there[:3])
        names += ", …" if len(shown.only_there) > 3 else ""
        values = plural(len(shown.only_there), "value")
        notices.append((f"Only in {shown.names[1]}: {values} ({names}).", ""))
    if shown.recording.lost:
        lost = shown.recording.lost
        notices.append((f"Not saved when it was written: {lost[0]}{', …' * (len(lost) > 1)}", ""))
    return notices


def failed_passes(recording: Recording) -> list[Notice]:
    """What is missing because the model raised."""
    return [
        (f"Pass {one.number} ended with an exception: only what ran before it is here.", "")
        for one in recording.passes
        if one.failed
    ]


def notices_of_rows(rows: Sequence[Row]) -> list[Notice]:
    """What stands out among the values that have been measured."""
    seen = [(row.seen, row.label) for row in rows if row.seen is not None]
    notices = []
    broken = sorted((one.order, label) for one, label in seen if one.non_finite)
    if broken:
        values = plural(len(broken), "value holds", "values hold")
        text = f"{values} NaN or infinity; the first, as they ran, is"
        notices.append((text, broken[0][1]))
    n_overwritten = sum(one.is_overwritten for one, _ in seen)
    if n_overwritten:
        values = plural(n_overwritten, "value was", "values were")
        advice = "Record copies to see them: hl.record(..., copy=True)."
        notices.append((f"{values} overwritten in place after being recorded. {advice}", ""))
    return notices


def data_of(value: Any) -> Any:
    """Numbers as JSON has them: no infinity."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return 1e308 if value > 0 else -1e308
    return value
