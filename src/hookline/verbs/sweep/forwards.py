"""Run a model under many changes, so that changes share forwards as far as the model allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from hookline.display.text import listed
from hookline.engine import ModuleTree, hooked_operations_on, is_scripted, parse_site
from hookline.engine.pytree import tree
from hookline.errors import FolderError
from hookline.verbs.record.model_state_tracker import ModelStateTracker, may_keep_state
from hookline.verbs.shared.run_model import copy_inputs
from hookline.verbs.shared.run_settings import RandomStates, generators_of
from hookline.verbs.sweep.agreement import may_be_rounding, numbers_agree, outputs_agree
from hookline.verbs.sweep.change_hooks import ChangeHooks
from hookline.verbs.sweep.grid import GridPoint, SiteGroup
from hookline.verbs.sweep.metric import Metric, metric_number
from hookline.verbs.sweep.repeatable_runs import refuse_random
from hookline.verbs.sweep.repeated_batches import RepeatedBatches
from hookline.verbs.sweep.rows_per_change import (
    N_PERTURBED,
    NoRowsError,
    batch_size,
    copy_tensors,
    drop_perturbed_batches,
    repeat_inputs,
    split_output,
)
from hookline.verbs.sweep.sweep_folder import Results
from hookline.verbs.sweep.tape import Tape, has_active_hooks

_FEWEST = 4  # changes; for fewer, the recorded and the checked runs cost more than they save
# Changes at several sites share a forward if it stays small: the values at a site fit a cache of
# the processor, beyond which a larger batch gains nothing, and the outputs fit any memory.
_SITE_BYTES, _OUTPUT_BYTES = 2**18, 2**26


class _MetricReading(NamedTuple):
    """Hold what a metric has read, and what it returned."""

    output: Any
    number: float


@final
class Forwards:
    """Runs of one model on one input, each with a change or with several.

    Args:
        changing: makes the changes of a run. What it knows is from the unchanged run, which is the
            first.
        run: runs the model on inputs, and returns what the metric reads.
        inputs: the inputs.
        metric: the metric.

    Attributes:
        baseline: the metric of the unchanged run.
        output: what the metric has read in the unchanged run.
        results: the metric of each change so far, and whether it has moved a value, by its index.
        n_rows: how many changes at one site share a forward.
        joins: whether changes at several sites share a forward.
        count: how many forwards have run.
        notes: why forwards are not shared, where they are not.
    """

    def __init__(
        self, changing: ChangeHooks, run: Callable[[Any], Any], inputs: Any, metric: Metric
    ) -> None:
        self._changing, self._run, self._inputs, self._metric = changing, run, inputs, metric
        model = changing.modules.root
        assert model is not None
        self.results: Results = {}
        self.n_rows: int = 1
        self.joins: bool = False
        # While ways are compared, what the metric has read; by () of the inputs' own row.
        self._readings: dict[tuple[int, ...], _MetricReading] | None = None
        # Whether the running forward, which all changes share, tells whether rows are apart, too.
        self._perturbs: bool = False
        self._most_joined: int = 0  # changes at several sites that may share a forward
        self.count: int = 0
        self.notes: list[str] = []
        state = ModelStateTracker(model) if may_keep_state(model) else None
        self.output: Any = None
        self._batches = self._run_unchanged()
        changed = state.changed_names() if state else []
        if state and changed:  # a first run may fill a cache, or register hooks that collect
            self._batches = self._run_unchanged()
            changed = state.changed_names()
        self.baseline: float = metric_number(metric, copy_tensors(self.output))
        self._may_share = not changed
        if changed:
            self.notes.append(
                f"One forward a change: each run changes the model's state ({listed(changed, 3)})."
            )

    def _run_unchanged(self) -> RepeatedBatches:
        """Run the model without a change, keep what the metric reads, and see what the model does.

        Raises:
            InputError: the model gives another metric when it runs again.
            NotRecordedError: the model does not reach one of the sites.
        """
        changing, again = self._changing, partial(self._forward, self._inputs)
        around = _modules_around(changing.modules, changing.sites)
        tape = Tape(around)
        modules = [node.module for node in changing.modules.nodes]
        random = RandomStates(generators_of(modules))
        # Hooks in such a layer switch its fast path off, which rounds otherwise.
        may_fuse = any(isinstance(module, nn.TransformerEncoderLayer) for module in modules)
        recording = tape.record_calls(is_over=changing.are_all_recorded)
        with nullcontext() if may_fuse else recording:
            self.output, values = changing.record_values(again)
        changing.known = {site: calls[0] for site, calls in values.items()}
        if may_fuse:
            with tape.record_calls():
                self.output = again()
        if changing.is_hooked or not random.are_current():
            refuse_random(self._metric, lambda: copy_tensors(self.output), again)
        return RepeatedBatches(around, self._forward, self._inputs, tape)

    def _forward(self, inputs: Any) -> Any:
        self.count += 1
        return self._run(copy_inputs(inputs))

    # -- the changes -----------------------------------------------------------------------------

    def _measure_alone(self, point: GridPoint) -> _MetricReading:
        """Measure one change by a whole forward of its own."""
        sites = [change.site for change in point.changes]
        with self._changing.attached(sites), self._changing.apply_changes([[point]], 1):
            return self._read_metric(self._forward(self._inputs))

    def _read_metric(self, output: Any) -> _MetricReading:
        number = metric_number(self._metric, output)  # which may write to the output
        return _MetricReading(output, number)

    def resume_from(self, groups: Sequence[SiteGroup], results: Results, place: str) -> None:
        """Take over the results of an earlier run, and compare the one with the largest effect.

        Raises:
            FolderError: it was measured with other changes.
        """
        points = [point for group in groups for point in group.points if point.index in results]
        if points:
            largest = max(points, key=lambda point: self._effect_size(results[point.index][0]))
            number, plain = results[largest.index][0], self._measure_alone(largest).number
            if not may_be_rounding(number, plain, self.output):
                raise FolderError(
                    f"{place} must hold this sweep, got one with other changes."
                    "\nGive a new folder for this one."
                )
        self.results = {point.index: results[point.index] for point in points}

    def choose_sharing(self, groups: Sequence[SiteGroup], n_most: int) -> None:
        """Choose how changes share forwards: the first way that agrees with whole forwards.

        Args:
            groups: the changes.
            n_most: the most changes at one site that share a forward.
        """
        groups = [group for group in groups if self._unmeasured_points(group.points)]
        if not self._may_share or sum(len(group.points) for group in groups) < _FEWEST:
            self._batches.keep_outputs(())
            return
        self._batches.keep_outputs({self._independent_until(group) for group in groups})
        if self._batches.is_written_unseen:
            self.notes.append(_UNSEEN)
        largest = max(len(group.points) for group in groups)
        n_rows = math.ceil(largest / math.ceil(largest / n_most))
        has_rows = n_rows > 1 and batch_size(self._inputs) is not None
        groups = sorted(groups, key=self._independent_until)
        plain: dict[tuple[int, ...], _MetricReading] = {}
        widest = max(_n_bytes(self._changing.known[str(group.sites[0])]) for group in groups)
        self._most_joined = min(_SITE_BYTES // widest, _OUTPUT_BYTES // _n_bytes(self.output))
        for joins, self.n_rows in [(True, n_rows), (False, n_rows)] * has_rows + [(False, 1)]:
            self.joins = joins
            if self._measure_and_check_agreement(groups, plain):
                return
            self._batches.clear()
            if not joins:
                self.notes.append(_REFUSED[self.n_rows > 1])
        self._batches.reuses = False

    @cached_property
    def _are_rows_independent(self) -> bool:
        """Tell whether a batch keeps its metric beside others with other values at the sites."""
        try:
            with self._changing.perturb_batches():
                output = self._forward(repeat_inputs(self._inputs, N_PERTURBED))
            own = self._read_metric(split_output(output, self.output, N_PERTURBED)[1])
        except Exception:  # of the model or the metric: a whole forward will raise it again
            return False
        return self._agrees_with_alone(own, _MetricReading(self.output, self.baseline))

    def _measure_and_check_agreement(
        self, groups: Sequence[SiteGroup], plain: dict[tuple[int, ...], _MetricReading]
    ) -> bool:
        """Measure some changes, and tell whether the largest effects are those of whole forwards.

        If they are not, no number is kept.

        Args:
            groups: the changes, in the order of their sites.
            plain: what whole forwards have given, each of which runs once.
        """
        joins, before = self.joins, dict(self.results)
        shares = self.joinable_groups(groups)
        self._perturbs = len(shares) == 1 < len(groups)
        if self.n_rows > 1 and not self._perturbs and not self._are_rows_independent:
            return False
        # Behind the first site most calls see several rows; before the last most are left out.
        # Where all share a forward, the rows of the first site go the way of all others.
        self._readings = {}
        for way in [groups] if len(shares) == 1 else [groups, groups[::-1]]:
            for points in self._measure_in_turn(shares, way):
                if self.joins != joins or not self._match_alone(points, plain):
                    self.results, self._readings, self._perturbs = before, None, False
                    return False
                if any(self.results[point.index][1] for point in points):
                    break
        self._readings, self._perturbs = None, False
        self.joins = any(len(share) > 1 for share in shares)  # no other way was checked
        return True

    def _measure_in_turn(
        self, shares: Sequence[list[SiteGroup]], groups: Sequence[SiteGroup]
    ) -> Iterator[list[GridPoint]]:
        """Measure changes of groups, a forward at a time, and yield those that were measured.

        If several groups cannot share a forward, it yields none once, and `joins` is False.
        """
        for group in groups:
            share = next(share for share in shares if group in share)
            missing = [self._unmeasured_points(other.points) for other in share]
            if len(share) > 1 and any(missing):
                yield from missing if self._measure_joined(share) else [[]]
            while points := self._last_unmeasured_points(group):
                self._readings = {}  # those before agree
                self.measure([replace(group, points=points)])
                yield points

    def _last_unmeasured_points(self, group: SiteGroup) -> list[GridPoint]:
        """Return the last changes without a result, as many as share a forward.

        If it is known which of them move a value, there is one that does.
        """
        points = self._unmeasured_points(group.points)
        moved = [number for number, point in enumerate(points) if point.has_moved]
        last = moved[-1] + 1 if moved else len(points)
        return points[max(last - self.n_rows, 0) :][: self.n_rows]

    def _match_alone(
        self, points: Sequence[GridPoint], plain: dict[tuple[int, ...], _MetricReading]
    ) -> bool:
        """Tell whether the largest effects among changes are those of whole forwards.

        Args:
            points: changes that were measured, in the order of their rows.
            plain: what whole forwards have given.
        """
        readings = self._readings or {}
        ranked = sorted(
            points, key=lambda point: self._effect_size(self.results[point.index][0]), reverse=True
        )
        moved = [point for point in ranked if self.results[point.index][1]]
        still = [point.index for point in ranked if not self.results[point.index][1]]
        base = _MetricReading(self.output, self.baseline)  # what a change gives that moves nothing
        own = [index for index in (*still[:1], ()) if index in readings]
        if not all(self._agrees_with_alone(readings[index], base) for index in own):
            return False
        for point in moved[:1]:
            if point.index not in plain:
                plain[point.index] = self._measure_alone(point)
            if not self._agrees_with_alone(readings[point.index], plain[point.index]):
                return False
        return True

    def _effect_size(self, number: float) -> float:
        """Return how far a metric lies from that of the unchanged run; NaN is the farthest."""
        size = abs(number - self.baseline)
        return math.inf if math.isnan(size) else size

    def _independent_until(self, group: SiteGroup) -> int:
        """Return the time up to which a run does not depend on the changes of a group."""
        return min(
            self._batches.tape.independent_until(site, module) for site, module in group.places
        )

    def _agrees_with_alone(self, reading: _MetricReading, plain: _MetricReading) -> bool:
        """Tell whether a change has the metric, or else the output, of a whole forward."""
        if numbers_agree(reading.number, plain.number, self.baseline, self.output):
            return True
        base = self._read_metric(copy_tensors(self.output)).output
        whole = base if plain.output is self.output else plain.output
        return outputs_agree(reading.output, whole, base)

    def joinable_groups(self, groups: Sequence[SiteGroup]) -> list[list[SiteGroup]]:
        """Return the groups that may be measured together, in the order of their sites."""
        if not self.joins:
            return [[group] for group in groups]
        together: list[list[SiteGroup]] = []
        n, may_follow = 0, False
        for group in sorted(groups, key=self._independent_until):
            may_join, size = self._may_join(group), len(self._unmeasured_points(group.points))
            if may_join and may_follow and n + size <= self._most_joined:
                together[-1].append(group)
                n += size
            else:
                together.append([group])
                n, may_follow = size, may_join
        return together

    def _may_join(self, group: SiteGroup) -> bool:
        """Tell whether a group is a few changes of one tensor, at a module that runs once."""
        site, module = group.places[0]
        is_tensor = isinstance(self._changing.known[str(site)], Tensor) and not site.leaf
        is_whole = len(group.places) == 1 and self._batches.tape.runs_once(module)
        return (
            is_tensor and is_whole and 1 < len(self._unmeasured_points(group.points)) <= self.n_rows
        )

    def measure(self, groups: Sequence[SiteGroup]) -> None:
        """Measure those changes of groups that have no result yet, in one forward if possible."""
        # The row of the inputs themselves costs little where several sites could share a forward.
        is_small = len(groups) > 1 or (
            self._most_joined >= 2 * self.n_rows and self._may_join(groups[0])
        )
        if self.joins and is_small and self._measure_joined(groups):
            return
        for group in groups:
            with self._changing.attached(group.sites):
                try:
                    self._measure_shared(group)
                except Exception:  # of the model, too: in a whole forward it will be raised again
                    self.notes += [_NO_ROWS] * (_NO_ROWS not in self.notes)
                for point in self._unmeasured_points(group.points):
                    self._store_result(point, self._measure_alone(point))

    def _unmeasured_points(self, points: Sequence[GridPoint]) -> list[GridPoint]:
        return [point for point in points if point.index not in self.results]

    def _measure_shared(self, group: SiteGroup) -> None:
        """Measure the changes of a group as far as forwards are shared, or calls are left out."""
        points = self._unmeasured_points(group.points)
        n = self.n_rows if len(points) > 1 else 1
        if n == 1 and not self._batches.reuses:
            return
        for first in range(0, len(points), n):
            shared = points[first : first + n]
            self._read_results(
                shared, self._run_with_changes([shared], self._independent_until(group), n)
            )

    def _measure_joined(self, groups: Sequence[SiteGroup]) -> bool:
        """Measure groups in one forward of the inputs, to which each adds rows at its site.

        Args:
            groups: the groups, in the order of their sites.

        Returns:
            Whether this was possible. The model may go on with other values, such as the sum in a
            residual block, that have no such rows.
        """
        shares = [self._unmeasured_points(group.points) for group in groups]
        sites = [site for group in groups for site in group.sites]
        changing = self._changing
        try:
            with changing.perturb_batches() if self._perturbs else changing.attached(sites):
                own, *outputs = self._run_with_changes(shares, self._independent_until(groups[0]))
            if self._readings is not None:
                self._readings[()] = self._read_metric(own)
            self._read_results([point for share in shares for point in share], outputs)
        except Exception:  # of the model; a change will raise it again
            self.joins = False
            return False
        return True

    def _run_with_changes(
        self, shares: Sequence[Sequence[GridPoint]], start: int, n: int | None = None
    ) -> list[Any]:
        """Make changes in one forward, and return the output of each.

        Args:
            shares: the changes of each group.
            start: the time up to which the forward does not depend on them.
            n: how often the batch is repeated; None adds rows, behind those of the inputs, whose
                output comes first.

        Raises:
            NoRowsError: a value has no rows, or the forward has not come to the site of a change.
        """
        batch = self._batches.repeat(n or 1)
        with self._batches.skip_known_calls(batch, start), self._changing.apply_changes(shares, n):
            output = self._forward(batch.inputs)
        points = [point for share in shares for point in share]
        # A call that was left out may have held an earlier call of the changed module, so that the
        # number in the site is that of another call.
        if not all(change.n_calls for point in points for change in point.changes):
            raise NoRowsError
        if n is not None:
            return split_output(output, self.output, n)
        if not self._perturbs:
            return split_output(output, self.output, 1 + len(points))
        return drop_perturbed_batches(split_output(output, self.output, N_PERTURBED + len(points)))

    def _read_results(self, points: Sequence[GridPoint], outputs: Sequence[Any]) -> None:
        for point, output in zip(points, outputs, strict=False):
            self._store_result(point, self._read_metric(output))

    def _store_result(self, point: GridPoint, reading: _MetricReading) -> None:
        self.results[point.index] = reading.number, point.has_moved
        if self._readings is not None:
            self._readings[point.index] = reading


_REFUSED = {
    True: "Each change has its own forward: sharing one gave another metric.",
    False: "Whole forwards: leaving calls out gave another metric.",
}
_UNSEEN = "Whole forwards: the model writes to outputs of modules unseen, as by .data."
_NO_ROWS = "Some changes have a whole forward each: they could not share one, or leave calls out."


def _n_bytes(value: Any) -> int:
    """Return how many bytes the tensors of a value take, at least 1."""
    return max(sum(tensor.nbytes for _, tensor in tree.tensors(value)), 1)


def _modules_around(modules: ModuleTree, sites: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Return the modules that a forward has to pass by, or to go into, on its way to the sites.

    What is called inside of a module that ends before a site need not be known, unless it is
    hooked.
    """
    entered: set[int] = set()
    waiting = [node.parent for node in modules.nodes if has_active_hooks(node.module)]
    waiting += [node for node in modules.nodes if hooked_operations_on(node.module)]
    for site in sites:
        path = parse_site(site, modules.by_path).path
        changed = modules.by_path.get(path)
        # The calls inside of a changed module need not be known; those around an operation must.
        waiting.append(changed.parent if changed else modules.by_path[path.rpartition("@")[0]])
    while waiting:
        node = waiting.pop()
        if node is not None and id(node.module) not in entered:
            entered.add(id(node.module))
            waiting.append(node.parent)
    return [
        (node.path, node.module)
        for node in modules.nodes
        if node.parent is None or {id(node.module), id(node.parent.module)} & entered
        if not is_scripted(node.module)
    ]
