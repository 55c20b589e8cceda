"""Change values in the forwards of a model by hooks that stay: each change has its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from hookline.engine import Line, ModuleTree, Order, Pass, Selector, Site
from hookline.errors import InputError
from hookline.recordings import Recording
from hookline.verbs.record.record import start_recording
from hookline.verbs.sweep.grid import Point
from hookline.verbs.sweep.rows import (
    NoRowsError,
    batch_size,
    changed_rows,
    copy_of,
    stirred,
    with_further_rows,
)
from hookline.verbs.sweep.site_change import SiteChange


@final
@dataclass(slots=True, eq=False)
class _Rows:
    """The changes at one site in the running forward.

    Args:
        site: the site.
        known: the value at the site in the unchanged run; None during that run.
        size: the size of the batch.

    Attributes:
        changes: the changes, each with its own rows; several such lists, if the site is changed
            several times. Empty in the forwards of other sites.
        n: how often the batch is repeated in the value.
        adds: whether the rows of the changes come to the value here, behind those that it has.
        stirs: whether the first and the last of three batches get large values.
        noted: for each site a copy of the value of each call so far; None where none is noted.
    """

    site: str
    known: Any
    size: int
    changes: list[Sequence[SiteChange]] = field(default_factory=list)
    n: int = 1
    adds: bool = False
    stirs: bool = False
    noted: dict[str, list[Any]] | None = None

    def changed(self, current: Pass, value: Any) -> Any:
        """Return the changed value; None in the forwards of other sites."""
        if self.noted is not None:
            self.noted.setdefault(self.site, []).append(copy_of(value))
        if self.stirs:
            return stirred(value, self.known)
        for changes in self.changes:
            if self.n == 1 and not self.adds:
                value = changes[0](value)
            elif isinstance(value, Tensor) and isinstance(self.known, Tensor):
                if self.adds:
                    value = with_further_rows(value, self.known, changes, self.n, self.size)
                else:
                    value = changed_rows(value, self.known, changes, self.n)
            else:
                raise NoRowsError
        return value if self.changes else None


@final
class Changing:
    """Hooks at the sites of changes, which change what one forward is asked to.

    Args:
        modules: the model's modules.
        sites: the sites of all changes.
        inputs: the inputs.

    Attributes:
        known: the value at each site in the unchanged run; of several calls, that of the first.
    """

    def __init__(self, modules: ModuleTree, sites: Sequence[str], inputs: Any) -> None:
        self.modules: ModuleTree = modules
        self.sites: Sequence[str] = sites
        self._size = batch_size(inputs) or 0
        self.known: dict[str, Any] = {}
        self._rows: dict[str, _Rows] = {}
        self._noted: dict[str, list[Any]] = {}

    @contextmanager
    def hooked(self, sites: Iterable[Site | str]) -> Iterator[None]:
        """Register hooks at sites for the block, as far as they have none."""
        rows = {
            site: _Rows(site, self.known.get(site), self._size)
            for site in map(str, sites)
            if site not in self._rows
        }
        if not rows:
            yield
            return
        line = Line(self.modules, name="sweep")
        line.options.lenient = True
        line.tap(line.select(list(rows)), lambda site: rows[str(site)].changed, Order.EDIT)
        with line:
            self._rows |= rows
            try:
                yield
            finally:
                line.options.quiet = not any(tap.fired for tap in line.taps)  # no run was needed
                for site in rows:
                    del self._rows[site]

    def noting(self, forward: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        """Run a forward without a change, and note the values that come to the sites.

        Returns:
            What the forward returns; and for each site a copy of the value of each call.

        Raises:
            NotRecordedError: the forward does not reach one of the sites.
        """
        values = self._noted = {}
        with self.hooked(self.sites):
            try:
                for rows in self._rows.values():
                    rows.noted = values
                output = forward()
            finally:
                self._noted = {}
                for rows in self._rows.values():
                    rows.noted = None
        missing = [site for site in self.sites if site not in values]
        if missing:
            recorded_run(self.modules, forward, missing)  # raises an error that says why
            raise InputError(
                f"the model must reach the same sites in each run, got {missing[0]} in the second"
                " run alone: it keeps state.\nReset this state first, or leave the site out."
            )
        return output, values

    def are_all_noted(self) -> bool:
        """Tell whether a value has come to each site in the running forward."""
        return len(self._noted) == len(self.sites)

    def know(self, known: Mapping[str, Any]) -> None:
        """Take these values for those of the unchanged run."""
        self.known = dict(known)
        for site, rows in self._rows.items():
            rows.known = known[site]

    @contextmanager
    def making(self, points: Sequence[Point], n: int) -> Iterator[None]:
        """Make the changes of one group in the forward of the block.

        Args:
            points: the changes; each has its own rows of the batch.
            n: how often the batch is repeated.
        """
        asked = self._asked(points, n, adds=False)
        try:
            yield
        finally:
            for rows in asked:
                rows.changes.clear()

    @contextmanager
    def adding(self, shares: Sequence[Sequence[Point]]) -> Iterator[None]:
        """Make the changes of several groups in the forward of the block, in further rows.

        Args:
            shares: the changes of each group, in the order in which the forward comes to the sites.
                From its site on, each has rows behind those of the inputs and of earlier groups.
        """
        asked: list[_Rows] = []
        n = 1
        try:
            for points in shares:
                asked += self._asked(points, n, adds=True)
                n += len(points)
            yield
        finally:
            for rows in asked:
                rows.changes.clear()

    @contextmanager
    def stirring(self) -> Iterator[None]:
        """In the block, give large values to the first and the last of three batches, at all sites.

        The batch between keeps its own, unless its rows depend on others.
        """
        with self.hooked(self.sites):
            for rows in self._rows.values():
                rows.stirs = True
            try:
                yield
            finally:
                for rows in self._rows.values():
                    rows.stirs = False

    def _asked(self, points: Sequence[Point], n: int, *, adds: bool) -> list[_Rows]:
        """Ask the hooks at the sites of a group for its changes."""
        asked = []
        for changes in zip(*[point.changes for point in points], strict=True):
            rows = self._rows[str(changes[0].site)]
            rows.n, rows.adds = n, adds
            rows.changes.append(changes)
            asked.append(rows)
        functions: dict[int, Callable[..., Any]] = {}
        for change in (change for point in points for change in point.changes):
            change.begin(functions)
        return asked


def recorded_run(
    modules: ModuleTree, forward: Callable[[], Any], sites: Selector
) -> tuple[Any, Recording]:
    """Run a forward, and record the values at sites as copies.

    Raises:
        NotRecordedError: the model does not reach one of the sites.
    """
    line = Line(modules, name="sweep")
    line.options.quiet = True
    with start_recording(line, sites, ("output",), {"copy": True}) as recording:
        output = forward()
    for site in recording.sites:
        if str(site) not in recording:
            recording[site]  # raises an error that says why
    return output, recording
