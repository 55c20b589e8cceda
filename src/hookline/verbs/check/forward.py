"""Judge the outputs of each run of the model when it ends, and find who made a bad one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import first_line, plural
from hookline.engine import (
    Line,
    ModuleNode,
    Order,
    Pass,
    Selection,
    Site,
    SplitCallback,
    is_in_transform,
    is_uncompiled_leaf,
    module_tree,
    path_text,
)
from hookline.errors import warn
from hookline.statistics import finiteness
from hookline.statistics.finiteness import (
    Measure,
    NonFinite,
    non_finite_kinds,
    probe_in_transform,
    probe_sum,
)
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.check.loss_graph import NodeNumbers
from hookline.verbs.check.nonfinite_origins import Origin, measure
from hookline.verbs.check.pending_findings import CheckedModel, PendingFindings
from hookline.verbs.check.replay import RUN, CheckedRun, Replay
from hookline.verbs.check.unusual_outputs import (
    OutputHistory,
    TraitReader,
    Traits,
    judge_extremes_of_run,
)
from hookline.verbs.shared.rerun import ChangingBuffers

# The key in `Pass.opened` of the extremes of a pass's outputs, where `also=` asks for them.
_EXTREMES = object()
# The most sums that wait where the model itself is never called, only parts of it.
_MOST_SUMS = 10_000


NOT_REPEATED = "the run did not repeat itself, first at {}"
_NOTHING = (
    "hl.check checked nothing in {runs} of the model: no output held floating numbers. On the meta"
    " device, tensors hold shapes alone.\nLoad the weights, or fill them:"
    " model.to_empty(device='cpu'), then initialise."
)


@final
@dataclass(slots=True)
class _MeasuredOutput:
    """The output of one module."""

    site: Site  # its site
    measure: Measure = (
        probe_sum  # the function that is measured; it changes where the sum says nothing
    )
    is_excused: bool = False  # whether what is not finite there is known to vanish


@final
class ForwardChecks:
    """Measure the outputs of a run, and judge them when it ends.

    Hooks hold it, so it must not hold the line.
    """

    def __init__(
        self, checked: CheckedModel, outcome: PendingFindings, also: frozenset[str]
    ) -> None:
        self._checked, self._passes, self._model = checked, checked.passes, checked.model
        self._outcome = outcome
        self._also = also
        self._outputs: list[_MeasuredOutput] = []
        self._traits = TraitReader(also)
        self._histories: list[OutputHistory] = []
        self._changing = ChangingBuffers()
        self.node_numbers: NodeNumbers = NodeNumbers()
        self._n_runs = 0
        self._has_measured = False

    def attach(self, line: Line, places: list[tuple[Site, ModuleNode]]) -> None:
        """Attach a tap to each place, all or none."""
        single = {site.path for site, node in places if is_uncompiled_leaf(node.module)}

        def bind(site: Site) -> SplitCallback:
            callback = self._make_callback(site, is_single=site.path in single)
            return callback if site.path else _keep_root_output(callback)

        line.attach_taps(Selection(line.module_tree, places), bind, Order.RECORD)
        self._passes.sink, self._passes.at_root = self, self._root_begins

    @property
    def last_step(self) -> int | None:
        """The number of the last run; None before the first."""
        return self._n_runs - 1 if self._n_runs else None

    def judge_dead_units(self) -> None:
        """Warn of what the whole block has shown, such as dead units."""
        for history in self._histories:
            history.judge_dead_units()

    def warn_if_nothing_measured(self) -> None:
        """Warn if no value had numbers. Call it when all passes have ended, and were judged."""
        if self._n_runs and not self._has_measured and not self._passes.failed:
            warn(_NOTHING.format(runs=plural(self._n_runs, "run")))

    def _make_callback(self, site: Site, *, is_single: bool) -> SplitCallback:
        number, output = len(self._outputs), _MeasuredOutput(site)
        self._outputs.append(output)

        def measure_output(current: Pass, value: Any) -> None:
            is_plain = not is_in_transform()
            number_of = (
                output.measure(value) if is_plain else probe_in_transform(output.measure, value)
            )
            if number_of is not None:
                current.log.append((number, number_of, output.measure))
                if not current.roots and len(current.log) > _MOST_SUMS:
                    self.judge_partial_run(current)

        def log_graph_measure(current: Pass, number_of: Tensor | None) -> None:
            if number_of is not None:
                # What is measured in the graph stays the sum: only a NaN in it counts from now on.
                is_plain = output.measure is probe_sum
                entry = number_of if is_plain else finiteness.zero_infinities(number_of)
                current.log.append((number, entry, None))

        # A container's output is a part's, seen already.
        if not self._traits.is_on or not is_single:
            return SplitCallback(measure_output, probe_sum, log_graph_measure)
        reader = self._traits
        history = OutputHistory(site, self._also, self._outcome.add)
        self._histories.append(history)

        def compare_traits(current: Pass, traits: Traits) -> None:
            run: CheckedRun = current.opened[RUN][0]
            call = run.n_calls[history]
            run.n_calls[history] += 1
            history.compare_with_earlier_runs(traits, call, run.step)
            if traits.extremes is not None:
                current.opened[_EXTREMES].append((history, call, traits.extremes))

        def measure_and_compare(current: Pass, value: Any) -> None:
            measure_output(current, value)
            if not is_in_transform():
                compare_traits(current, reader.read(value, site.module_type))

        def log_and_compare(current: Pass, measured_in_graph: tuple[Tensor | None, Traits]) -> None:
            log_graph_measure(current, measured_in_graph[0])
            if not current.is_transformed:
                compare_traits(current, measured_in_graph[1])

        def total_and_traits(value: Any) -> tuple[Tensor | None, Traits]:
            return probe_sum(value), reader.read(value, site.module_type)

        return SplitCallback(measure_and_compare, total_and_traits, log_and_compare)

    def begin_pass(self, current: Pass) -> None:
        """Make the run of a pass, and judge it when the pass ends."""
        is_sharded = self._checked.sharded_over is not None
        run = CheckedRun(self._n_runs, is_sharded, current.is_transformed)
        self._n_runs += 1
        current.opened[RUN], current.opened[_EXTREMES] = [run], []
        run.sums = current.log
        current.at_end.append(lambda: self._pass_ends(current, run))

    def _root_begins(self, current: Pass, frame: FrameType) -> None:
        model = self._model()
        if model is not None and not current.is_transformed:
            current.opened[RUN][0].record_start(frame, model, self._changing)

    def _pass_ends(self, current: Pass, run: CheckedRun) -> None:
        try:
            finding = self._judge_run(run)
            if not current.failed:
                finding = self._checked.earliest(finding)
            judge_extremes_of_run(current.opened[_EXTREMES], run.step)
        finally:
            current.opened[_EXTREMES] = []
            if run.start is not None:
                self._changing.copies_inputs |= run.start.are_inputs_overwritten()
                self._changing.find_changed()
            current.log = []
            current.log_entry = current.log.append
            run.output = None
            if run.first_node is not None:
                self.node_numbers.add_run(
                    run.first_node, is_finite=run.is_output_finite, called_at=run.called_at
                )
            if not run.has_grad:
                run.release()
        if finding is None or finding.vanished:
            return
        error, outcome = sys.exception(), self._outcome
        if error is not None and id(error) != current.exception_at_start:
            error.add_note(f"hookline: before that, {finding.message}")
        elif self._passes.closed:
            outcome.at_end = outcome.at_end or finding
        elif run.has_grad and self._checked.others_would_wait:
            outcome.until_step = outcome.until_step or finding
        else:
            raise finding.error()

    def judge_partial_run(self, current: Pass) -> None:
        """Judge what has run so far, where parts of the model run and the model itself does not."""
        run: CheckedRun = current.opened[RUN][0]
        if run.start is not None or current.roots:
            return
        try:
            finding = self._judge_run(run)
        finally:
            run.sums.clear()
        if finding is not None:
            raise finding.error()

    def begin_partial_run(self, current: Pass) -> None:
        """Count what parts of the model run after an optimizer's step as another run."""
        if not current.roots:
            current.opened[RUN][0].step = self._n_runs
            self._n_runs += 1

    def _judge_run(self, run: CheckedRun) -> CheckFinding | None:
        """Find who made a value that is not finite in a run; None if all is well."""
        self._has_measured = self._has_measured or any(not n.is_meta for _, n, _ in run.sums)
        bad = finiteness.indices_of_non_finite([number for _, number, _ in run.sums])
        run.is_output_finite = all(self._output_at_sum(run, k).site.path for k in bad)
        suspects = [k for k in bad if not self._output_at_sum(run, k).is_excused]
        if not suspects:
            return None
        model, finding, why = self._model(), None, None
        if model is not None and any(map(non_finite_kinds, model.parameters())):
            # The weights have stepped without an optimizer of torch, with what a backward made.
            finding = self._outcome.pop_backward_finding()
        if finding is None:
            finding, why = self.repeat_run(
                run, lambda replay: self._explain_by_replay(replay, run, suspects)
            )
        if why is not None:
            finding = self._judge_by_sums(run, suspects, why)
        return None if finding is None else self._outcome.add(finding)

    def repeat_run(
        self, run: CheckedRun, explain: Callable[[Replay], tuple[CheckFinding | None, str | None]]
    ) -> tuple[CheckFinding | None, str | None]:
        """Repeat a run, and explain it by its repetition.

        Returns:
            The finding; or the reason why the run stays unexplained; or neither, if all is well.
        """
        model = self._model()
        why = "the model is gone" if model is None else run.why_not_repeatable()
        if model is None or why is not None:
            return None, why
        paths = [output.site.path for output in self._outputs]
        try:
            with torch.set_grad_enabled(run.has_grad):
                replay = Replay(model, run, self._passes, paths)
                replay.forward()
                return explain(replay)
        except Exception as error:
            return None, f"the run could not be repeated ({first_line(error)})"

    def _output_at_sum(self, run: CheckedRun, index: int) -> _MeasuredOutput:
        return self._outputs[run.sums[index][0]]

    def _explain_by_replay(
        self, replay: Replay, run: CheckedRun, suspects: list[int]
    ) -> tuple[CheckFinding | None, str | None]:
        """Explain a run by its repetition, as far as both were the same."""
        origins = replay.proven_origins()
        difference = _unexplained_difference(replay, run, origins)
        if difference is not None:
            return None, NOT_REPEATED.format(difference)
        outputs = [self._output_at_sum(run, k) for k in suspects]
        if not origins:
            for output in outputs:
                calls = [call for call in replay.calls if call.node.path == output.site.path]
                output.measure = _measure_for_expected_kinds(
                    finiteness.union_of_kinds(call.kinds for call in calls)
                )
            return None, None
        # Origins in the output count. If the output has no numbers, all origins count.
        leaving = replay.origin if replay.has_numbers else origins[0]
        origin = leaving or min(origins, key=lambda candidate: candidate.number)
        finding = replay.finding(origin, "forward")
        if leaving is not None:
            return self._outcome.write_file(replay, origin, finding), None
        for output in outputs:
            output.is_excused = True
        return finding.with_(vanished=True), None

    def _judge_by_sums(self, run: CheckedRun, suspects: list[int], why: str) -> CheckFinding | None:
        """Describe a run that cannot be repeated, or does not repeat itself.

        Returns:
            None if nothing is wrong, or finite numbers may have overflowed in their sums. Then the
            next run is measured exactly.
        """
        kinds = _non_finite_kinds(run.output)
        if kinds is None or kinds & ~NonFinite.MINUS_INF:
            if kinds is not None or any(bool(run.sums[k][1].isnan()) for k in suspects):
                return self._describe_first_bad_output(run, suspects, why)
            exact = []
        else:
            # It has vanished, or a sum has overflowed.
            exact = [k for k in suspects if run.sums[k][2] not in (probe_sum, None)]
        for k in suspects:
            self._output_at_sum(run, k).measure = finiteness.probe_except_negative_infinity
        inner = [k for k in exact if self._output_at_sum(run, k).site.path]
        for k in inner:
            self._output_at_sum(run, k).is_excused = True
        return (
            self._describe_first_bad_output(run, inner, why).with_(vanished=True) if inner else None
        )

    def _describe_first_bad_output(
        self, run: CheckedRun, suspects: list[int], why: str
    ) -> CheckFinding:
        """Describe the first output that has a NaN, or else the root's, or the first."""
        has_nan = [k for k in suspects if bool(run.sums[k][1].isnan())]
        roots = [k for k in suspects if not self._output_at_sum(run, k).site.path]
        index = [*has_nan, *roots, *suspects][0]
        number = run.sums[index][0]
        call = sum(site_number == number for site_number, _, _ in run.sums[:index])
        site = self._outputs[number].site
        model = self._model()
        nodes = [] if model is None else module_tree(model).nodes
        node = next((candidate for candidate in nodes if candidate.path == site.path), None)
        parameters = [] if node is None else node.module.named_parameters(recurse=False)
        passed = [path_text(self._output_at_sum(run, k).site.path) for k in suspects if k > index]
        output = [] if site.path else finiteness.find_measurable_tensors(run.output)
        counts = [finiteness.count_nan_and_inf(tensor) for tensor in output]
        return CheckFinding(
            "forward", site.path, site.module_type, call, run.step,
            n_nan=sum(n_nan for n_nan, _ in counts),
            n_inf=sum(n_inf for _, n_inf in counts),
            n_total=sum(tensor.numel() for tensor in output),
            parameters=tuple(measure(name, weight) for name, weight in parameters),
            passed_on=tuple(passed),
            notes=(f"the operation is not known: {why}",),
        )  # fmt: skip


def _keep_root_output(callback: SplitCallback) -> SplitCallback:
    """Let a callback keep the root's output until its pass ends: there it is judged exactly."""
    measure_output = callback.callback

    def measure_and_keep(current: Pass, value: Any) -> None:
        measure_output(current, value)
        if current.roots and RUN in current.opened:
            current.opened[RUN][0].output = value

    return callback._replace(callback=measure_and_keep)


def _unexplained_difference(replay: Replay, run: CheckedRun, origins: list[Origin]) -> str | None:
    """Return the first output that differs from the first run's; None if none that matters does.

    `origins` are those before the difference.
    """
    kinds, difference = _non_finite_kinds(run.output), replay.comparison.difference
    if kinds is not None and replay.root_kinds not in (None, kinds):
        difference = difference or path_text("")
    # An operation of the repeated run explains only a value that the first run returned.
    has_left = not run.is_output_finite if kinds is None else bool(kinds & ~NonFinite.MINUS_INF)
    return None if has_left and replay.origin in origins else difference


def _non_finite_kinds(output: Any) -> NonFinite | None:
    """Return the kinds of numbers in an output that are not finite; None if it has no numbers."""
    tensors = finiteness.find_measurable_tensors(output)
    return finiteness.union_of_kinds(map(non_finite_kinds, tensors)) if tensors else None


def _measure_for_expected_kinds(meant: NonFinite) -> Measure:
    """Return the measure for a site where these kinds are meant; without any, its sum overflows."""
    if meant is NonFinite.MINUS_INF:
        return finiteness.probe_except_negative_infinity
    return finiteness.probe_nan if meant else finiteness.probe_extremes
