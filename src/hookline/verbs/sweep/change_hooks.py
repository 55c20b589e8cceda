"""Change values in the forwards of a model by hooks that stay: each change has its own rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, final

from torch import Tensor

from hookline.engine import Line, ModuleTree, Order, Pass, Selector, Site
from hookline.errors import AmbiguousError, InputError
from hookline.recordings import Recording
from hookline.verbs.record.record import start_recording
from hookline.verbs.sweep.grid import GridPoint
from hookline.verbs.sweep.repeatable_runs import has_hooks
from hookline.verbs.sweep.rows_per_change import (
    N_PERTURBED,
    NoRowsError,
    append_changed_rows,
    apply_changes_to_rows,
    batch_size,
    copy_tensors,
    perturb_other_batches,
)
from hookline.verbs.sweep.site_change import SiteChange


class _RequestedChanges(NamedTuple):
    """Changes at one site that the running forward is asked for."""

    changes: Sequence[SiteChange]  # the changes, each with its own rows
    n: int  # how often the batch is repeated in the value
    adds: bool  # whether the rows of the changes come to the value here, behind those that it has


@final
class ChangeHooks:
    """Hooks at the sites of changes, which change what one forward is asked to.

    Attributes:
        is_hooked: whether the model had hooks before.
        known: the value at each site in the unchanged run; of several calls, that of the first.
    """

    def __init__(self, modules: ModuleTree, sites: Sequence[str], inputs: Any) -> None:
        self.modules: ModuleTree = modules
        self.sites: Sequence[str] = sites
        self.is_hooked: bool = modules.root is not None and has_hooks(modules.root)
        self._size = batch_size(inputs) or 0
        self.known: dict[str, Any] = {}
        self._hooked: set[str] = set()
        # Of the running forward: the changes by site, several if a site is changed several times;
        # whether batches beside the inputs' own get other values; and for each site a copy of the
        # value of each call so far, None where none is noted.
        self._requested: dict[str, list[_RequestedChanges]] = {}
        self._perturbs = False
        self._recorded: dict[str, list[Any]] | None = None

    @contextmanager
    def attached(self, sites: Iterable[Site | str]) -> Iterator[None]:
        """Register hooks at sites for the block, as far as they have none."""
        new = [site for site in dict.fromkeys(map(str, sites)) if site not in self._hooked]
        if not new:
            yield
            return
        line = Line(self.modules, name="sweep")
        line.options.lenient = True
        line.attach_taps(
            line.select(new), lambda site: partial(self._changed_value, str(site)), Order.EDIT
        )
        with line:
            self._hooked.update(new)
            try:
                yield
            finally:
                line.options.quiet = not any(tap.fired for tap in line.taps)  # no run was needed
                self._hooked.difference_update(new)

    def _changed_value(self, site: str, _: Pass, value: Any) -> Any:
        """Return the changed value at a site; None in the forwards of other sites."""
        if self._recorded is not None:
            self._recorded.setdefault(site, []).append(copy_tensors(value))
        known, asked = self.known.get(site), self._requested.get(site)
        if self._perturbs and not self._requested:
            return perturb_other_batches(value, known)
        for changes, n, adds in asked or ():
            if n == 1 and not adds:
                value = changes[0](value)
            elif not isinstance(value, Tensor) or not isinstance(known, Tensor):
                raise NoRowsError
            elif adds:
                value = append_changed_rows(
                    value, known, changes, n, self._size, perturbs=self._perturbs
                )
            else:
                value = apply_changes_to_rows(value, known, changes, n)
        return value if asked else None

    def record_values(self, forward: Callable[[], Any]) -> tuple[Any, dict[str, list[Any]]]:
        """Run a forward without a change, and note the values that come to the sites.

        Returns:
            What the forward returns; and for each site a copy of the value of each call.

        Raises:
            NotRecordedError: the forward does not reach one of the sites.
        """
        values: dict[str, list[Any]] = {}
        with self.attached(self.sites):
            self._recorded = values
            try:
                output = forward()
            finally:
                self._recorded = None
        missing = [site for site in self.sites if site not in values]
        if missing:
            run_and_record(self.modules, forward, missing)  # raises an error that says why
            raise InputError(
                f"the model must reach the same sites in each run, got {missing[0]} in the second"
                " run alone: it keeps state.\nReset this state first, or leave the site out."
            )
        return output, values

    def are_all_recorded(self) -> bool:
        """Tell whether a value has come to each site in the running forward."""
        return self._recorded is not None and len(self._recorded) == len(self.sites)

    @contextmanager
    def apply_changes(
        self, shares: Sequence[Sequence[GridPoint]], n: int | None = None
    ) -> Iterator[None]:
        """Make changes in the forward of the block, each in rows of its own.

        Args:
            shares: the changes of each group, in the order in which the forward comes to the sites.
            n: how often the batch is repeated for the changes of one group; None adds rows: from
                its site on, each change has rows behind those of the inputs and of earlier groups.
        """
        n_before = 1
        try:
            for points in shares:
                self._request_changes(points, n_before if n is None else n, adds=n is None)
                n_before += len(points) + (N_PERTURBED - 1) * (self._perturbs and n_before == 1)
            yield
        finally:
            self._requested.clear()

    @contextmanager
    def perturb_batches(self) -> Iterator[None]:
        """In the block, change all of `N_PERTURBED` batches but the second, at all sites.

        The second keeps its values, unless its rows depend on others. Where changes add rows to the
        batch alone, the other batches come to it at the first site.
        """
        with self.attached(self.sites):
            self._perturbs = True
            try:
                yield
            finally:
                self._perturbs = False

    def _request_changes(self, points: Sequence[GridPoint], n: int, *, adds: bool) -> None:
        """Ask the hooks at the sites of a group for its changes."""
        for changes in zip(*[point.changes for point in points], strict=True):
            asked = self._requested.setdefault(str(changes[0].site), [])
            asked.append(_RequestedChanges(changes, n, adds))
        functions: dict[int, Callable[..., Any]] = {}
        for change in (change for point in points for change in point.changes):
            change.begin_forward(functions)


def run_and_record(
    modules: ModuleTree, forward: Callable[[], Any], sites: Selector
) -> tuple[Any, Recording]:
    """Run a forward, and record the values at sites as copies.

    Raises:
        AmbiguousError: a module of them runs several times.
        NotRecordedError: the model does not reach one of the sites.
    """
    line = Line(modules, name="sweep")
    line.options.quiet = True
    with start_recording(line, sites, ("output",), {"copy": True}) as recording:
        output = forward()
    for site in recording.sites:
        if str(site) not in recording:
            recording[site]  # raises an error that says why
        if len(recording.calls(site)) > 1:
            raise AmbiguousError(
                f"{site} must run once in a forward, got {len(recording.calls(site))} calls."
                f"\nName the call: {f'{site}#0'!r}."
            )
    return output, recording
