"""Judge the outputs of each run of the model when it ends, and find who made a bad one."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, final

from torch import Tensor

from hookline.display.text import first_line
from hookline.engine import (
    Line,
    Order,
    Pass,
    Selection,
    Site,
    SplitCallback,
    is_grouped,
    path_text,
)
from hookline.engine.selection.module_tree import ModuleNode, walk
from hookline.engine.torch_private.modules import is_leaf
from hookline.verbs.check.also import Habits, Look, Looking, judge_all
from hookline.verbs.check.finding import Finding
from hookline.verbs.check.finiteness import (
    Measure,
    are_finite,
    beside_masks,
    extremes,
    kinds_in,
    total,
    total_nan,
    transformed,
    without_infinity,
)
from hookline.verbs.check.origins import measured
from hookline.verbs.check.outcome import Checked, Outcome
from hookline.verbs.check.ranks import shared
from hookline.verbs.check.replay import Replay
from hookline.verbs.check.run import RUN, ChangingBuffers, Run

# The key in `Pass.opened` of the extremes of a pass's outputs, where these are looked at by choice.
_SEEN = object()
# The most sums that wait where the model itself is never called, only parts of it.
_MOST_SUMS = 10_000


@final
class _Output:
    """Hold what is measured of one module's output.

    Attributes:
        measure: the function that is measured; it changes where the sum says nothing.
        is_excused: whether what is not finite there is known to vanish.
    """

    __slots__ = ("is_excused", "measure", "site")

    def __init__(self, site: Site) -> None:
        self.site = site
        self.measure: Measure = total
        self.is_excused = False


@final
class ForwardChecks:
    """Measure the outputs of a run, and judge them when it ends.

    Hooks hold it, so it must not hold the line.

    Args:
        checked: the model and its passes.
        outcome: what was found.
        also: what is looked for by choice.
    """

    def __init__(self, checked: Checked, outcome: Outcome, also: frozenset[str]) -> None:
        self._passes, self._model, self._sharded_on = checked
        self._outcome = outcome
        self._also = also
        self._outputs: list[_Output] = []
        self._looking = Looking(also)
        self._habits: list[Habits] = []
        self._changing = ChangingBuffers()
        self._n_runs = 0

    def start(self, line: Line, places: list[tuple[Site, ModuleNode]]) -> None:
        """Attach a tap to each place, all or none."""
        single = {site.path for site, node in places if is_leaf(node.module)}

        def bind(site: Site) -> SplitCallback:
            return self._bind(site, is_single=site.path in single)

        line.tap(Selection(line.module_tree, places), bind, Order.RECORD)
        self._passes.sink, self._passes.at_root = self, self._root_begins

    @property
    def last_step(self) -> int | None:
        """The number of the last run; None before the first."""
        return self._n_runs - 1 if self._n_runs else None

    def end(self) -> None:
        """Warn of what the whole block has shown, such as dead units."""
        for habits in self._habits:
            habits.end()

    def _bind(self, site: Site, *, is_single: bool) -> SplitCallback:
        number, one = len(self._outputs), _Output(site)
        self._outputs.append(one)

        def see(current: Pass, value: Any) -> None:
            is_plain = not current.is_transformed
            number_of = one.measure(value) if is_plain else transformed(one.measure, value)
            if number_of is not None:
                current.log.append((number, number_of))
                if not current.roots and len(current.log) > _MOST_SUMS:
                    self.judge_parts(current)

        def after(current: Pass, number_of: Tensor | None) -> None:
            if number_of is not None:
                # What is measured in the graph stays the sum: only a NaN in it counts from now on.
                is_plain = one.measure is total
                current.log.append((number, number_of if is_plain else without_infinity(number_of)))

        # A container's output is a part's, seen already.
        if not self._looking.is_on or not is_single:
            return SplitCallback(see, total, after)
        place, looking = len(self._habits), self._looking
        habits = Habits(site, self._also, self._outcome.add)
        self._habits.append(habits)

        def note(current: Pass, look: Look) -> None:
            habits.note(look, current.opened[RUN][0].step)
            if look.extremes is not None:
                current.opened[_SEEN].append((place, look.extremes))

        def see_and_look(current: Pass, value: Any) -> None:
            see(current, value)
            if not current.is_transformed:
                note(current, looking.look(value))

        def after_both(current: Pass, found: tuple[Tensor | None, Look]) -> None:
            after(current, found[0])
            if not current.is_transformed:
                note(current, found[1])

        return SplitCallback(see_and_look, self._total_and_look, after_both)

    def _total_and_look(self, value: Any) -> tuple[Tensor | None, Look]:
        return total(value), self._looking.look(value)

    def begin_pass(self, current: Pass) -> None:
        """Make the run of a pass, and judge it when the pass ends."""
        run = Run(
            self._n_runs,
            is_sharded=self._sharded_on is not None,
            is_transformed=current.is_transformed,
        )
        self._n_runs += 1
        current.opened[RUN], current.opened[_SEEN] = [run], []
        run.sums = current.log
        current.at_end.append(lambda: self._pass_ends(current, run))

    def _root_begins(self, current: Pass, frame: FrameType) -> None:
        model = self._model()
        if model is not None and not current.is_transformed:
            current.opened[RUN][0].begin(frame, model, self._changing)

    def _pass_ends(self, current: Pass, run: Run) -> None:
        try:
            finding = self._judge(run)
            if self._sharded_on is not None and not current.failed:
                finding = shared(finding, self._sharded_on)
            judge_all(self._habits, current.opened[_SEEN], run.step)
        finally:
            current.opened[_SEEN] = []
            self._changing.copies_inputs |= run.are_inputs_overwritten()
            if run.args is not None:
                self._changing.learn()
            run.sums = current.log = []
            current.note = current.log.append
            if not run.has_grad:
                run.drop()
        if finding is None or finding.vanished:
            return
        error, outcome = sys.exception(), self._outcome
        if error is not None and id(error) != current.exception_at_start:
            error.add_note(f"hookline: before that, {finding.message}")
        elif self._passes.closed:
            outcome.at_end = outcome.at_end or finding
        elif is_grouped() and run.has_grad and self._sharded_on is None:
            outcome.until_step = outcome.until_step or finding
        else:
            raise finding.error()

    def judge_parts(self, current: Pass) -> None:
        """Judge what has run so far, where parts of the model run and the model itself does not."""
        run: Run = current.opened[RUN][0]
        if run.args is not None or current.roots:
            return
        try:
            finding = self._judge(run)
        finally:
            run.sums.clear()
        if finding is not None:
            raise finding.error()

    def _judge(self, run: Run) -> Finding | None:
        """Find who made a value that is not finite in a run; None if all is well."""
        flags = are_finite([one for _, one in run.sums])
        suspects = [
            (index, number)
            for index, ((number, _), is_finite) in enumerate(zip(run.sums, flags, strict=False))
            if not is_finite and not self._outputs[number].is_excused
        ]
        if not suspects:
            return None
        model, why = self._model(), run.why_not_repeatable()
        finding = None
        if model is not None and any(map(kinds_in, model.parameters())):
            # The weights have stepped without an optimizer of torch, with what a backward made.
            finding = self._outcome.take_backward()
        if finding is None and model is not None and why is None:
            replay = Replay(model, run, self._passes)
            try:
                replay.forward()
                finding, why = self._found(replay, suspects)
            except Exception as error:
                why = f"the run could not be repeated ({first_line(error)})"
        if finding is None and why is not None:
            finding = self._without_repeating(run, suspects, why)
        return None if finding is None else self._outcome.add(finding)

    def _found(
        self, replay: Replay, suspects: list[tuple[int, int]]
    ) -> tuple[Finding | None, str | None]:
        """Judge what a repeated run has shown.

        Returns:
            The finding; or why there is none although there should be; or neither.
        """
        made = [one.origin for one in replay.calls if one.origin is not None]
        made += [replay.origin] if replay.origin is not None else []
        sites = {number: self._outputs[number] for _, number in suspects}
        if made:
            # What leaves the model counts. Without numbers in its output, everything does.
            leaving = replay.origin if replay.has_numbers else made[0]
            origin = leaving or min(made, key=lambda one: one.number)
            finding = replay.finding(origin, "forward")
            if leaving is not None:
                finding = self._outcome.keep(replay, origin, finding)
            for one in sites.values() if leaving is None else ():
                one.is_excused = True
            return finding.with_(vanished=leaving is None), None
        bad = {one.node.path for one in replay.calls if one.bad}
        if any(s.site.path not in bad and s.measure is not total for s in sites.values()):
            return None, "the run did not repeat itself"
        for one in sites.values():
            # Infinities are meant there; or the sum has overflowed.
            one.measure = total_nan if one.site.path in bad else extremes
        return None, None

    def _without_repeating(
        self, run: Run, suspects: list[tuple[int, int]], why: str
    ) -> Finding | None:
        """Describe what is known of a run that cannot be repeated.

        Returns:
            None if finite numbers may have overflowed in their sum; the extremes of the next run
            will tell.
        """
        sites = [self._outputs[number] for _, number in suspects]
        is_sure = any(bool(run.sums[index][1].isnan().any()) for index, _ in suspects)
        if not is_sure and all(one.measure is total for one in sites):
            for one in sites:
                one.measure = beside_masks
            return None
        # A mask of -inf is meant, unless nothing else is wrong.
        index, number = next(
            (one for one in suspects if not bool(run.sums[one[0]][1].isneginf())), suspects[0]
        )
        call = sum(other == number for other, _ in run.sums[:index])
        site = self._outputs[number].site
        model = self._model()
        nodes = [] if model is None else walk(model)
        node = next((one for one in nodes if one.path == site.path), None)
        passed = [path_text(self._outputs[other].site.path) for _, other in suspects[1:]]
        held = [] if node is None else [
            measured(name, one) for name, one in node.module.named_parameters(recurse=False)
        ]  # fmt: skip
        return Finding(
            "forward", site.path, site.module_type, call, run.step,
            parameters=tuple(held),
            passed_on=tuple(passed),
            notes=(f"the operation is not known: {why}",),
        )  # fmt: skip
