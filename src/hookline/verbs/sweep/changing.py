"""Change values in the forwards of a model by hooks that stay: each change has its own rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor

from hookline.engine import Line, ModuleTree, Order, Pass, Site
from hookline.verbs.sweep.grid import Point
from hookline.verbs.sweep.rows import (
    NoRowsError,
    batch_size,
    changed_rows,
    copy_of,
    with_further_rows,
)
from hookline.verbs.sweep.site_change import SiteChange


@final
@dataclass(slots=True, eq=False)
class _Rows:
    """The changes at one site in the running forward.

    Args:
        site: the site.
        known: the values that are known, by site.
        size: the size of the batch.

    Attributes:
        changes: the changes, each with its own rows; several such lists, if the site is changed
            several times. Empty in the forwards of other sites.
        n: how often the batch is repeated in the value.
        adds: whether the rows of the changes come to the value here, behind those that it has.
    """

    site: str
    known: dict[str, Any]
    size: int
    changes: list[Sequence[SiteChange]] = field(default_factory=list)
    n: int = 1
    adds: bool = False

    def changed(self, current: Pass, value: Any) -> Any:
        """Return the changed value; None in the forwards of other sites."""
        known = self.known.get(self.site)
        if known is None:
            self.known[self.site] = copy_of(value)
        for changes in self.changes:
            if self.n == 1 and not self.adds:
                value = changes[0](value)
            elif isinstance(value, Tensor) and isinstance(known, Tensor):
                if self.adds:
                    value = with_further_rows(value, known, changes, self.n, self.size)
                else:
                    value = changed_rows(value, known, changes, self.n)
            else:
                raise NoRowsError
        return value if self.changes else None


@final
class Changing:
    """Hooks at the sites of changes, which change what one forward is asked to.

    The first forward must make none: the values that it has at the sites are known from then on.

    Args:
        modules: the model's modules.
        sites: the sites of all changes.
        inputs: the inputs.

    Attributes:
        known: a copy of the first value that came to each site.
    """

    def __init__(self, modules: ModuleTree, sites: Sequence[str], inputs: Any) -> None:
        self.modules: ModuleTree = modules
        self.sites: Sequence[str] = sites
        self._size = batch_size(inputs) or 0
        self.known: dict[str, Any] = {}
        self._rows: dict[str, _Rows] = {}

    def knows_all(self) -> bool:
        """Tell whether a value has come to each site."""
        return len(self.known) == len(self.sites)

    @contextmanager
    def hooked(self, sites: Iterable[Site | str]) -> Iterator[None]:
        """Register hooks at sites for the block, as far as they have none."""
        rows = {
            site: _Rows(site, self.known, self._size)
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

    def _asked(self, points: Sequence[Point], n: int, *, adds: bool) -> list[_Rows]:
        """Ask the hooks at the sites of a group for its changes."""
        asked = []
        for changes in zip(*[point.changes for point in points], strict=True):
            rows = self._rows[str(changes[0].site)]
            rows.n, rows.adds = n, adds
            rows.changes.append(changes)
            asked.append(rows)
        for change in (change for point in points for change in point.changes):
            change.begin()
        return asked
