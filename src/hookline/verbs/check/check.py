"""Stop at the first value that is not finite, and say who made it."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.display.text import plural
from hookline.engine import (
    GradientCallback,
    Line,
    Order,
    Pass,
    Passes,
    PendingGradient,
    Report,
    Selection,
    Site,
    SplitCallback,
    at_end_of_backward,
    hides,
    is_grouped,
    no_callback,
    path_text,
    sharding,
)
from hookline.engine.selection.module_tree import walk
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.modules import buffers, has_forward, is_leaf, is_scripted
from hookline.errors import AttachError, FolderError, NonFiniteError, warn
from hookline.recordings.manifest import first_line
from hookline.verbs.check.also import Habits, choices, judge_all, say_missing
from hookline.verbs.check.finding import Finding
from hookline.verbs.check.finiteness import (
    Kind,
    Measure,
    are_finite,
    extremes,
    is_measurable,
    kinds_in,
    total,
    total_nan,
    without_infinity,
)
from hookline.verbs.check.kept import folder_for
from hookline.verbs.check.origins import Origin, measured
from hookline.verbs.check.ranks import earliest, is_on_any, rank_here, shared
from hookline.verbs.check.replay import Replay
from hookline.verbs.check.run import ChangingBuffers, Run
from hookline.verbs.shared.verb_line import VerbLine

# The key in `Pass.opened` of a pass's run.
_RUN = object()
# The key of the extremes of its outputs, where these are looked at by choice.
_SEEN = object()
_MOST_KEPT = 100
_MOST_FILES = 10
# The most sums that wait where the model itself is never called, only parts of it.
_MOST_SUMS = 10_000


@final
class _Site:
    """Hold what is measured at one site.

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
@hides("start")
class CheckLine(VerbLine[Line]):
    """A line that checks: a context manager, or ended by `remove()`.

    Attributes:
        findings: everything that was found, also what was not raised because it vanished.
    """

    def __init__(
        self, line: Line, model: nn.Module, folder: Path | None, also: frozenset[str]
    ) -> None:
        super().__init__(line)
        self.findings: list[Finding] = []
        self._checker = _Checker(line.passes, model, self.findings, folder, also)

    def __enter__(self) -> Self:
        self._line.__enter__()
        return self

    def __repr__(self) -> str:
        return f"{super().__repr__()}; {plural(len(self.findings), 'finding')}"

    def start(self) -> None:
        """Attach the taps."""
        self._checker.start(self._line)

    def report(self) -> Report:
        """Report the sites that were checked, and how often each fired."""
        return self._line.report()

    def remove(self) -> None:
        """End the line, and raise an error for what no optimizer has stepped with. Idempotent."""
        self._checker.end(None)
        super().remove()

    def _ending(self, error: BaseException | None) -> None:
        self._checker.end(error)

    def _ended(self, error: BaseException | None) -> None:
        raised, self._checker.unraised = self._checker.unraised, None
        if raised is not None and error is None:
            self._checker.is_told = True
            raise raised.error()
        if error is None and not self._checker.is_told:
            self._checker.is_told = True
            swallowed = [one for one in self.findings if not one.vanished]
            if swallowed:
                warn(
                    f"hl.check: {swallowed[0].message.splitlines()[0]}"
                    "\nThe error was caught on its way; line.findings has all that was found."
                )


@final
class _Checker:
    """The work of a check: measure, suspect, repeat, find.

    Hooks hold it, so it must not hold the line.

    Args:
        passes: the line's passes.
        model: the model.
        findings: the list to which findings are added.
        folder: the folder that keeps what is needed to run modules again, or None.
        also: what is looked for by choice.
    """

    def __init__(
        self,
        passes: Passes,
        model: nn.Module,
        findings: list[Finding],
        folder: Path | None,
        also: frozenset[str],
    ) -> None:
        self._also = also
        self._habits: list[Habits] = []
        self._is_missing_told = False
        self._passes = passes
        self._folder = folder
        self._n_kept = 0
        self._model = weakref.ref(model)
        self._findings = findings
        self._sites: list[_Site] = []
        self._weights: list[tuple[str, Tensor]] = []
        self._changing = ChangingBuffers()
        self._n_runs = 0
        # Where weights are sharded, the ranks run each pass and each backward together.
        self._is_sharded = is_grouped() and bool(sharding(model))
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        # What was found in a backward, until an optimizer steps with it.
        self._pending: Finding | None = None
        # What was found in a forward, in a job of several ranks, until they step.
        self._held: Finding | None = None
        self._grads: list[tuple[int, int | None]] = []
        self.unraised: Finding | None = None
        self.is_told = False

    # -- attaching -------------------------------------------------------------------------------

    def start(self, line: Line) -> None:
        """Refuse a model that is poisoned already, and attach the taps, all or none."""
        self._refuse_poisoned(line)
        places = [
            (Site(node.path, aliases=node.aliases, module_type=node.type_name), node)
            for node in line.nodes
            if has_forward(node.module) and (is_leaf(node.module) or not node.path)
        ]
        root = [place for place in places if not place[0].path]
        gradients = [(_gradient(site), node) for site, node in root if not is_scripted(node.module)]
        self._weights = [(node.path, node.tensor) for node in line.module_tree.tensors]
        single = {site.path for site, node in places if is_leaf(node.module)}

        def bind(site: Site) -> SplitCallback:
            return self._bind(site, is_single=site.path in single)

        with line.all_or_nothing() as registrations:
            line.tap(Selection(line.module_tree, places), bind, Order.RECORD)
            line.tap(Selection(line.module_tree, gradients), self._bind_gradient, Order.RECORD)
            step = _StepTap(self._passes, self)
            registrations.register_everywhere("step_pre", step.fire)
        self._passes.sink, self._passes.at_root = self, self._root_begins

    def _bind(self, site: Site, *, is_single: bool) -> SplitCallback:
        number, one = len(self._sites), _Site(site)
        self._sites.append(one)

        def see(current: Pass, value: Any) -> None:
            number_of = one.measure(value)
            if number_of is not None and not current.is_transformed:
                current.log.append((number, number_of))
                if not current.roots and len(current.log) > _MOST_SUMS:
                    self._judge_parts(current)

        def after(current: Pass, number_of: Tensor | None) -> None:
            if number_of is not None:
                # What is measured in the graph stays the sum: only a NaN in it counts from now on.
                is_plain = one.measure is total
                current.log.append((number, number_of if is_plain else without_infinity(number_of)))

        # A container's output is a part's, seen already.
        if not self._also & {"magnitude", "dead", "constant", "shapes"} or not is_single:
            return SplitCallback(see, total, after)
        place, habits = len(self._habits), Habits(site, self._also)
        self._habits.append(habits)

        def look(current: Pass, value: Any) -> None:
            see(current, value)
            extremes = None if current.is_transformed else habits.look(value)
            if extremes is not None:
                current.opened[_SEEN].append((place, extremes))

        return SplitCallback(look, total, after)

    def _bind_gradient(self, site: Site) -> GradientCallback:
        return _RootGradient(self)

    def _refuse_poisoned(self, line: Line) -> None:
        """Raise an error if a parameter or a buffer is poisoned before anything has run."""
        held = [
            ("parameter", node.path, node.tensor, Kind.NONE) for node in line.module_tree.tensors
        ]
        meant = Kind.INF | Kind.MINUS_INF
        held += [
            ("buffer", f"{node.path}.{name}".lstrip("."), one, meant)
            for node in line.nodes
            for name, one in buffers(node.module).items()
            if one is not None
        ]
        held = [one for one in held if is_measurable(one[2])]
        sums = [total(tensor) for _, _, tensor, _ in held]
        flags = are_finite([one for one in sums if one is not None])
        for (kind, path, tensor, allowed), is_finite in zip(held, flags, strict=False):
            if not is_finite and kinds_in(tensor) & ~allowed:
                finding = _held_finding(kind, path, tensor, None)
                self._add(finding)
                raise finding.error()

    # -- passes ----------------------------------------------------------------------------------

    def begin_pass(self, current: Pass) -> None:
        """Make the run of a pass, and judge it when the pass ends."""
        run = Run(self._n_runs)
        self._n_runs += 1
        current.opened[_RUN], current.opened[_SEEN] = [run], []
        run.sums = current.log
        current.at_end.append(lambda: self._pass_ends(current, run))

    def _root_begins(self, current: Pass, frame: FrameType) -> None:
        model = self._model()
        if model is not None and not current.is_transformed:
            current.opened[_RUN][0].begin(frame, model, self._changing)

    def _pass_ends(self, current: Pass, run: Run) -> None:
        try:
            finding = self._judge(run)
            if self._is_sharded and not current.failed:
                finding = shared(finding, self._device)
            judge_all(self._habits, current.opened[_SEEN])
        finally:
            current.opened[_SEEN] = []
            self._changing.copies_inputs |= run.are_inputs_overwritten()
            run.sums = current.log = []
            current.note = current.log.append
            if not run.has_grad:
                run.drop()
        if finding is None or finding.vanished:
            return
        error = sys.exception()
        if error is not None and id(error) != current.exception_at_start:
            error.add_note(f"hookline: before that, {finding.message}")
        elif is_grouped() and run.has_grad and not (self._passes.closed or self._is_sharded):
            self._held = self._held or finding  # until all ranks step
        elif self._passes.closed:
            self.unraised = self.unraised or finding
        else:
            raise finding.error()

    def _judge_parts(self, current: Pass) -> None:
        """Judge what has run so far, where parts of the model run and the model itself does not."""
        run: Run = current.opened[_RUN][0]
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
            if not is_finite and not self._sites[number].is_excused
        ]
        if not suspects:
            return None
        model, why = self._model(), self._why_not_repeatable(run)
        finding: Finding | None = None
        if self._pending is not None:  # the weights have stepped without an optimizer of torch
            finding, self._pending = self._pending, None
        elif model is not None and why is None:
            replay = Replay(model, run, self._passes)
            try:
                replay.forward()
                finding, why = self._found(replay, suspects)
            except Exception as error:
                why = f"the run could not be repeated ({first_line(error)})"
        if finding is None and why is not None:
            finding = self._without_repeating(run, suspects, why)
        return None if finding is None else self._add(finding)

    def _why_not_repeatable(self, run: Run) -> str | None:
        if self._is_sharded:
            return "weights are sharded, and a repeated run would wait for the other ranks"
        return run.why_not_repeatable()

    def _found(
        self, replay: Replay, suspects: list[tuple[int, int]]
    ) -> tuple[Finding | None, str | None]:
        """Judge what a repeated run has shown.

        Returns:
            The finding; or why there is none although there should be; or neither.
        """
        made = [one.origin for one in replay.calls if one.origin is not None]
        made += [replay.origin] if replay.origin is not None else []
        sites = {number: self._sites[number] for _, number in suspects}
        if made:
            # What leaves the model counts. Without numbers in its output, everything does.
            leaving = replay.origin if replay.has_numbers else made[0]
            origin = leaving or min(made, key=lambda one: one.number)
            finding = replay.finding(origin, "forward")
            if leaving is not None:
                finding = self._kept(replay, origin, finding)
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

    def _kept(self, replay: Replay, origin: Origin, finding: Finding) -> Finding:
        """Keep what is needed to run the module again, if that was asked for."""
        if self._folder is None or self._n_kept >= _MOST_FILES:
            return finding
        self._n_kept += 1
        if is_grouped():
            finding = finding.with_(rank=rank_here())
        situation = replay.situation(origin, finding)
        try:
            return situation.finding.with_(file=situation.write(self._folder))
        except FolderError as error:  # a full disk must not hide the finding
            return finding.with_(notes=(*finding.notes, str(error)))

    def _without_repeating(
        self, run: Run, suspects: list[tuple[int, int]], why: str
    ) -> Finding | None:
        """Describe what is known of a run that cannot be repeated.

        Returns:
            None if finite numbers may have overflowed in their sum; the extremes of the next run
            will tell.
        """
        sites = [self._sites[number] for _, number in suspects]
        is_sure = any(bool(run.sums[index][1].isnan().any()) for index, _ in suspects)
        if not is_sure and all(one.measure is total for one in sites):
            for one in sites:
                one.measure = extremes
            return None
        index, number = suspects[0]
        call = sum(other == number for other, _ in run.sums[:index])
        site = self._sites[number].site
        model = self._model()
        nodes = [] if model is None else walk(model)
        node = next((one for one in nodes if one.path == site.path), None)
        passed = [path_text(self._sites[other].site.path) for _, other in suspects[1:]]
        held = [] if node is None else [
            measured(name, one) for name, one in node.module.named_parameters(recurse=False)
        ]  # fmt: skip
        return Finding(
            "forward", site.path, site.module_type, call, run.step,
            parameters=tuple(held),
            passed_on=tuple(passed),
            notes=(f"the operation is not known: {why}",),
        )  # fmt: skip

    def _add(self, finding: Finding) -> Finding:
        if len(self._findings) < _MOST_KEPT:
            self._findings.append(finding)
        return finding

    # -- gradients -------------------------------------------------------------------------------

    def gradient_arrives(self, current: Pass, slot: int, grad: Tensor) -> None:
        """Keep the gradient of an output of the root, and judge the backward at its end."""
        found = current.opened.get(_RUN)
        if not found:
            return
        run: Run = found[0]
        run.gradients[slot] = grad.detach()
        if not run.is_waiting:
            run.is_waiting = True
            # Behind others: there DDP writes the reduced gradients.
            at_end_of_backward(lambda: at_end_of_backward(lambda: self._backward_ends(run)))

    def _backward_ends(self, run: Run) -> None:
        run.is_waiting = False
        try:
            if self._pending is None and not self._gradients_are_finite():
                held, self._held = self._held, None
                self._pending = held or self._judge_backward(run)
                self._grads = self._grads_now()
            elif self._pending is not None and self._gradients_are_finite():
                self._pending = None  # the step was skipped, and this is another one
            if self._is_sharded:
                self._pending = shared(self._pending, self._device)
        finally:
            run.gradients = {}

    def _grads_now(self) -> list[tuple[int, int | None]]:
        """Return what tells whether somebody has changed or dropped a gradient."""
        grads = [tensor.grad for _, tensor in self._weights]
        return [(id(one), None if one is None else one._version) for one in grads]

    def _gradients_are_finite(self, of: set[int] | None = None) -> bool:
        grads = [
            tensor.grad
            for _, tensor in self._weights
            if tensor.grad is not None and (of is None or id(tensor) in of)
        ]
        sums = [one for one in map(total, grads) if one is not None]
        if not are_finite(sums):
            return True
        return not any(kinds_in(one) for one in grads)

    def _judge_backward(self, run: Run) -> Finding:
        model = self._model()
        why = self._why_not_repeatable(run) if model is not None else "the model is gone"
        if any(map(kinds_in, run.gradients.values())):
            return self._of_loss(run)
        if model is not None and why is None:
            try:
                with torch.enable_grad():
                    replay = Replay(model, run, self._passes)
                    replay.forward()
                    origin = replay.backward()
                if origin is not None:
                    return self._kept(replay, origin, replay.finding(origin, "backward"))
                why = "the run did not repeat itself"
            except Exception as error:
                why = f"the run could not be repeated ({first_line(error)})"
        bad = [(path, one.grad) for path, one in self._weights
               if one.grad is not None and kinds_in(one.grad)]  # fmt: skip
        path, grad = bad[-1]
        assert grad is not None
        return _held_finding("gradient", path, grad, run.step).with_(
            notes=(f"the operation is not known: {why}",)
        )

    def _of_loss(self, run: Run) -> Finding:
        grad = next(one for one in run.gradients.values() if kinds_in(one))
        found = _held_finding("loss", "", grad, run.step)
        return found.with_(
            inputs=(measured("gradient of the output", grad),),
            notes=("the output was finite, and its gradient is not: look at the loss",),
        )

    def step_begins(self, optimizer: Optimizer) -> None:
        """Raise an error before an optimizer steps with a gradient that is not finite."""
        outside = self._passes.in_thread.outside
        if outside is not None and _RUN in outside.opened:
            self._judge_parts(outside)
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if "missing_grad" in self._also and not self._is_missing_told:
            self._is_missing_told = say_missing(one for one in self._weights if id(one[1]) in held)
        finding = self._stepped_with(optimizer, held)
        if finding is None:
            return
        if is_grouped():
            finding = earliest(finding, is_known=finding.kind != "gradient") or finding
        if finding not in self._findings:
            self._add(finding)
        raise finding.error()

    def _stepped_with(self, optimizer: Optimizer, held: set[int]) -> Finding | None:
        """Return what an optimizer is about to step with; None if its gradients are finite."""
        if self._pending is None or not any(id(one) in held for _, one in self._weights):
            return None
        skipped = getattr(optimizer, "found_inf", None)
        if isinstance(skipped, Tensor) and bool(skipped):
            return None  # the optimizer itself skips the step, as GradScaler asks it to
        is_bad = not self._gradients_are_finite(held)
        if self._is_sharded:
            is_bad = is_on_any(is_bad, self._device)
        finding, self._pending = self._pending, None
        return finding if is_bad else None

    def end(self, error: BaseException | None) -> None:
        """Say at the end of the block what no optimizer has stepped with."""
        if error is None:
            for habits in self._habits:
                habits.end()
        self.unraised, self._held = self.unraised or self._held, None
        finding, self._pending = self._pending, None
        # Gradients that were unscaled, clipped or dropped, and no optimizer has stepped with, were
        # skipped on purpose.
        if finding is None or self._grads_now() != self._grads:
            return
        if finding not in self._findings:
            self._add(finding)
        if error is None:
            self.unraised = self.unraised or finding
        elif not isinstance(error, NonFiniteError):
            error.add_note(f"hookline: before that, {finding.message}")


@final
class _RootGradient(GradientCallback):
    """See the gradients of the root's outputs."""

    __slots__ = ("_checker",)
    optional = True

    def __init__(self, checker: _Checker) -> None:
        self._checker = checker

    def arrived(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Keep the gradient, and judge the backward at its end."""
        self._checker.gradient_arrives(current, slot, grad)


@final
class _StepTap(Tap):
    """A hook before each step of an optimizer; it is called for every optimizer."""

    __slots__ = ("_checker",)
    is_on_calls = False

    def __init__(self, passes: Passes, checker: _Checker) -> None:
        super().__init__(Site("any optimizer", "step_pre"), passes, no_callback, Order.HOOK)
        self._checker = checker

    def fire(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Judge the gradients: the hook."""
        if self.passes.is_ours():
            self._checker.step_begins(optimizer)


def _gradient(site: Site) -> Site:
    return Site(site.path, "grad_output", aliases=site.aliases, module_type=site.module_type)


def _held_finding(kind: str, path: str, tensor: Tensor, step: int | None) -> Finding:
    n_nan = int(tensor.isnan().sum())
    n_bad = int((~tensor.isfinite()).sum())
    return Finding(
        kind, path, step=step, n_nan=n_nan, n_inf=n_bad - n_nan, n_total=tensor.numel(),
        suspect=f"{kind} {path}" if path else None,
    )  # fmt: skip


def check(
    model: nn.Module,
    *,
    also: str | Iterable[str] = (),
    keep: str | os.PathLike[str] | None = None,
    every_thread: bool = False,
) -> CheckLine:
    """Stop at the first value that is not finite, in forward or backward, and say who made it.

        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> try:
        ...     with check(model):
        ...         _ = model(torch.tensor([[1.0, float("nan")]]))
        ... except hl.NonFiniteError as error:
        ...     print(error.finding.kind, error.finding.path, error.finding.n_nan)
        input :input 1

    While the model trains, the outputs of leaf modules and of the model are added up, and the sums
    are read once at the end of each run of the model. If one is not finite, the run is repeated
    once, operation by operation, with the same inputs and random numbers, and the error is raised
    out of the model's call. `print(error.finding)` names the operation, the line of code, the
    module, the inputs and the likely cause.

    An infinity that is meant is no trouble: a mask of -inf, a buffer, memory that is not written
    yet. What vanishes before the model returns is kept in `line.findings`, and not raised. A
    gradient is judged when an optimizer steps with it, so that a step which a `GradScaler` or the
    loop skips is no trouble; without an optimizer, at the end of the block.

    Args:
        model: the model, as it is called.
        also: what to warn of besides: "magnitude" (outputs that explode or vanish, by ten thousand
            times since the first run), "dead" (units that were 0 in all of at least ten runs),
            "constant" (outputs of one number), "shapes" (that changed since the first run, the
            batch's size apart, and dtypes), "missing_grad" (parameters without a gradient when an
            optimizer steps). Each costs more; what is in compiled code is not looked at.
        keep: a folder. The module that made the value is kept there: its inputs, its parameters
            and buffers and the random state, in a file that `hookline replay` shows and runs
            again. At most ten files are written.
        every_thread: True checks runs in every thread and async task. False checks those of the
            calling thread or task, and of code that runs in a copy of its context.

    Returns:
        A line: a context manager, or ended by `remove()`. `line.findings` has all that was found,
        also if the error was caught on its way.

    Raises:
        AttachError: `model` is not a model, or `also` names something unknown.
        FolderError: `keep` cannot be written.
        NonFiniteError: a parameter or a buffer is poisoned already. Later, out of the model's call
            or of the optimizer's step: a value is not finite.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(
            f"hl.check must be given a model, got {type(model).__name__}.\nGive the model itself."
        )
    wanted = choices(also)
    folder = None if keep is None else folder_for(keep)
    line = Line(model, name="check", every_thread=every_thread)
    line.options.lenient = True
    line.options.quiet = True
    checking = CheckLine(line, model, folder, wanted)
    checking.start()
    return checking
