"""Run a model under many changes, so that changes share forwards as far as the model allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn

from hookline.display.text import listed
from hookline.engine import Line, Selector, is_scripted, module_tree
from hookline.engine.pytree import tree
from hookline.errors import FolderError, InputError
from hookline.recordings import Recording
from hookline.recordings.walk import walk
from hookline.verbs.edit.edit import edit
from hookline.verbs.record.kept_state import KeptState, may_keep_state
from hookline.verbs.record.record import start_recording
from hookline.verbs.shared.rerun import RandomStates, copied, generators_of
from hookline.verbs.sweep.folder import Results
from hookline.verbs.sweep.grid import Group, Point, SiteChange
from hookline.verbs.sweep.metric import Metric, number_of
from hookline.verbs.sweep.rows import (
    NoRowsError,
    batch_size,
    changed_rows,
    parts_of,
    repeated,
    tolerance,
)
from hookline.verbs.sweep.tape import Tape

_FEWEST = 4  # changes; for fewer, the recorded and the checked runs cost more than they save


@final
@dataclass(slots=True, eq=False)
class _Rows:
    """The changes at one site that share the running forward.

    Args:
        known: the value at the site in the unchanged run.
        n: how often the batch is repeated.

    Attributes:
        changes: the changes, each with its own rows.
    """

    known: Any
    n: int
    changes: list[SiteChange] = field(default_factory=list)

    def __call__(self, value: Any) -> Any:
        if self.n == 1:
            return self.changes[0](value)
        if not isinstance(value, Tensor) or not isinstance(self.known, Tensor):
            raise NoRowsError
        return changed_rows(value, self.known, self.changes, self.n)


@final
@dataclass(slots=True, eq=False)
class _Batch:
    """The inputs n times in a row.

    Attributes:
        tape: the tape of their unchanged run; None until the shapes of its outputs are known.
        n_tries: how often a run has shown other calls, so that there is no tape.
    """

    inputs: Any
    n: int
    tape: Tape | None = None
    n_tries: int = 0


@final
class Forwards:
    """Runs of one model on one input, each with a change or with several.

    Args:
        model: the model.
        run: runs the model on inputs, and returns what the metric reads.
        inputs: the inputs.
        metric: the metric.
        sites: the sites that are changed.

    Attributes:
        known: the value at each site in the unchanged run; of several calls, that of the first.
        baseline: the metric of the unchanged run.
        output: what the metric has read in the unchanged run.
        results: the metric of each change so far, and whether it has moved a value, by its index.
        n_rows: how many changes share a forward.
        reuses: whether calls that ended before a changed site are left out.
        count: how many forwards have run.
        notes: why forwards are not shared, where they are not.
    """

    def __init__(
        self,
        model: nn.Module,
        run: Callable[[Any], Any],
        inputs: Any,
        metric: Metric,
        sites: Sequence[str],
    ) -> None:
        self._model, self._run, self._inputs, self._metric = model, run, inputs, metric
        self._named_modules = [
            (node.path, node.module)
            for node in module_tree(model).nodes
            if not is_scripted(node.module)
        ]
        self.results: Results = {}
        self.n_rows: int = 1
        self.reuses: bool = False
        self.count: int = 0
        self.notes: list[str] = []
        self._batches: dict[int, _Batch] = {}
        self._kept: set[int] = set()
        self._tape = Tape(self._named_modules)
        state = KeptState(model) if may_keep_state(model) else None
        self.output: Any
        self.output, recording = self._first_run(sites)
        self.known: dict[str, Any] = first_values(recording)
        self._written = self._tape.written_to()
        self.baseline: float = number_of(metric, copy_of(self.output))
        changed = state.changed() if state else []
        self._may_share = not changed
        if changed:
            self.notes.append(
                f"One forward a change: each run changes the model's state ({listed(changed, 3)})."
            )

    def _first_run(self, sites: Sequence[str]) -> tuple[Any, Recording]:
        """Run the model without a change, and see what it does.

        Raises:
            InputError: the model gives another metric when it runs again.
        """
        random = RandomStates(generators_of(self._model.modules()))
        # Hooks in such a layer switch its fast path off, which rounds otherwise.
        may_fuse = any(isinstance(m, nn.TransformerEncoderLayer) for _, m in self._named_modules)
        with nullcontext() if may_fuse else self._tape.recording():
            output, recording = recorded_run(self._model, self._forward, self._inputs, sites)
        if may_fuse:
            with self._tape.recording():
                output = self._forward(self._inputs)
        if not random.are_current():
            again, first = self._forward(self._inputs), copy_of(output)
            if not _is_same(*[number_of(self._metric, other) for other in (again, first)]):
                raise InputError(
                    "the model must give the same metric twice, got another one the second time:"
                    " its forward draws random numbers.\nSwitch this off, as model.eval() does"
                    " for dropout."
                )
        return output, recording

    def _forward(self, inputs: Any, points: Sequence[Point] = ()) -> Any:
        self.count += 1
        for change in (change for point in points for change in point.changes):
            change.begin()
        return self._run(copied(inputs))

    # -- the changes -----------------------------------------------------------------------------

    def _plain(self, point: Point) -> float:
        """Return the metric under one change, by an ordinary edit and a whole forward."""
        with ExitStack() as lines:
            for change in point.changes:
                lines.enter_context(edit(self._model, str(change.site), change))
            return number_of(self._metric, self._forward(self._inputs, [point]))

    def go_on(self, groups: Sequence[Group], results: Results, place: str) -> None:
        """Take over the results of an earlier run, and compare one of them.

        Raises:
            FolderError: it was measured with other changes.
        """
        points = [point for group in groups for point in group.points if point.index in results]
        if points and not self._agrees(self._plain(points[-1]), results[points[-1].index][0]):
            raise FolderError(
                f"{place} must hold this sweep, got one with other changes."
                "\nGive a new folder for this one."
            )
        self.results = {point.index: results[point.index] for point in points}

    def settle(self, groups: Sequence[Group], n_most: int) -> None:
        """Choose how changes share forwards: the first way that agrees with ordinary edits.

        Args:
            groups: the changes.
            n_most: the most changes that share a forward.
        """
        groups = [group for group in groups if self._missing(group.points)]
        if not self._may_share or sum(len(group.points) for group in groups) < _FEWEST:
            self._tape.keep(())
            return
        self.reuses = True
        starts = [self._start(group) for group in groups]
        self._keep_outputs(set(starts))
        largest = max(len(group.points) for group in groups)
        n_rows = math.ceil(largest / math.ceil(largest / n_most))
        has_rows = n_rows > 1 and batch_size(self._inputs) is not None
        # Behind the first site most calls see several rows; before the last most are left out.
        ends = (groups[starts.index(time)] for time in (min(starts), max(starts)))
        checked = [(group, self._missing(group.points)) for group in ends]
        plain = [(points[-1].index, self._plain(points[-1])) for _, points in checked]
        before = dict(self.results)
        for self.n_rows in [n_rows] * has_rows + [1]:
            for group, points in checked:
                self.measure(group, points[-self.n_rows :])
            if all(self._agrees(self.results[index][0], number) for index, number in plain):
                return
            self.results = dict(before)
            self._batches.clear()
            self.notes.append(_REFUSED[self.n_rows > 1])
        self.reuses = False

    def _keep_outputs(self, starts: set[int]) -> None:
        """Keep the outputs that stand in for calls, as they were before later calls wrote to them.

        Args:
            starts: the times up to which calls are left out.
        """
        kept = {call.number for time in starts for call in self._tape.outermost(time)}
        self._kept = kept
        if kept & self._written:
            tape = Tape(self._named_modules)
            with tape.recording(kept=kept, copied=self._written):
                self._forward(self._inputs)
            self.reuses = tape.same_calls(self._tape)
            self._tape = tape
        self._tape.keep(kept)

    def _start(self, group: Group) -> int:
        """Return the time up to which a run does not depend on the changes of a group."""
        pairs = zip(group.sites, group.modules, strict=True)
        return min(self._tape.start_of(site, module) for site, module in pairs)

    def _agrees(self, fast: float, plain: float) -> bool:
        floats = [t for _, t in tree.tensors(self.output) if t.is_floating_point() and t.numel()]
        size = max([float(t.abs().max()) for t in floats], default=0.0)
        size = max(abs(plain), abs(self.baseline), size if math.isfinite(size) else 0.0)
        error = tolerance(floats[0].dtype) * size if floats else 0.0
        return _is_same(fast, plain) or abs(fast - plain) <= error

    def measure(self, group: Group, points: Sequence[Point]) -> None:
        """Measure those of a group's changes that have no result yet."""
        points = self._missing(points)
        if not points:
            return
        try:
            self._measure(group, points, self.n_rows if len(points) > 1 else 1)
        except NoRowsError:
            self.notes += [_NO_ROWS] * (_NO_ROWS not in self.notes)
            self._measure(group, self._missing(points), 1)

    def _missing(self, points: Sequence[Point]) -> list[Point]:
        return [point for point in points if point.index not in self.results]

    def _measure(self, group: Group, points: Sequence[Point], n: int) -> None:
        rows = [_Rows(self.known[str(site)], n) for site in group.sites]
        batch = self._batch(n)
        start = self._start(group)
        with ExitStack() as lines:
            for site, change in zip(group.sites, rows, strict=True):
                lines.enter_context(edit(self._model, str(site), change))
            for first in range(0, len(points), n):
                shared = points[first : first + n]
                for number, change in enumerate(rows):
                    change.changes = [point.changes[number] for point in shared]
                with self._shortened(batch, start):
                    output = self._forward(batch.inputs, shared)
                self._note(shared, output, n)

    @contextmanager
    def _shortened(self, batch: _Batch, start: int) -> Iterator[None]:
        """Leave calls out of the forward in the block, if their outputs are known."""
        if not self.reuses or (batch.tape is None and batch.n_tries):
            yield
        elif batch.tape is None:
            with self._learning(batch):
                yield
        else:
            with batch.tape.replaying(start, self._written):
                yield

    @contextmanager
    def _learning(self, batch: _Batch) -> Iterator[None]:
        """Learn the shapes of a repeated batch's outputs from the forward in the block."""
        forms = Tape(self._named_modules)
        with forms.recording(kept=()):
            yield
        batch.tape = self._tape.repeated(forms, batch_size(self._inputs) or 0, batch.n)
        batch.n_tries += 1

    def _record(self, batch: _Batch) -> None:
        """Record the outputs of a repeated batch, where they cannot be told from its shapes.

        A change may have led to other calls, or its hook to those that a fast path leaves out.
        """
        tape = Tape(self._named_modules)
        with tape.recording(kept=self._kept, copied=self._written):
            self._forward(batch.inputs)
        batch.tape = tape if tape.same_calls(self._tape) else None
        batch.n_tries += 1

    def _note(self, points: Sequence[Point], output: Any, n: int) -> None:
        for point, part in zip(points, parts_of(output, self.output, n), strict=False):
            has_moved = any(change.has_moved for change in point.changes)
            self.results[point.index] = number_of(self._metric, part), has_moved

    def _batch(self, n: int) -> _Batch:
        """Return the inputs n times in a row."""
        if n not in self._batches:
            inputs = repeated(self._inputs, n) if n > 1 else self._inputs
            self._batches[n] = _Batch(inputs, n, self._tape if n == 1 else None)
        batch = self._batches[n]
        if self.reuses and batch.tape is None and batch.n_tries == 1:
            self._record(batch)
        return batch


_REFUSED = {
    True: "Each change has its own forward: sharing one gave another metric than hl.edit.",
    False: "Whole forwards: leaving calls out gave another metric than hl.edit.",
}
_NO_ROWS = "Some sites have values without the rows of a batch: each change there has a forward."


def _is_same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def copy_of(output: Any) -> Any:
    """Copy an output, because a metric may write to it."""
    return tree.map_tensors(Tensor.clone, output)


def recorded_run(
    model: nn.Module, run: Callable[[Any], Any], inputs: Any, sites: Selector
) -> tuple[Any, Recording]:
    """Run a model, and record the values at sites as copies.

    Raises:
        NotRecordedError: the model does not reach one of the sites.
    """
    line = Line(model, name="sweep")
    line.options.quiet = True
    with start_recording(line, sites, ("output",), {"copy": True}) as recording:
        output = run(inputs)
    for site in recording.sites:
        if str(site) not in recording:
            recording[site]  # raises an error that says why
    return output, recording


def first_values(recording: Recording) -> dict[str, Any]:
    """Return the value of each site; of several calls, that of the first."""
    values: dict[str, Any] = {}
    for recorded in walk(recording):
        if str(recorded.site) not in values:
            values[str(recorded.site)] = recorded.read()
    return values
