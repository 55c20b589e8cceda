"""Judge the gradients of each backward, and stop an optimizer before it steps with bad ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hookline.engine import (
    GradientCallback,
    Line,
    ModuleNode,
    OptimizerSteps,
    Order,
    Pass,
    PendingGradient,
    Registrations,
    Selection,
    Site,
    at_end_of_backward,
    is_scripted,
    local_part,
    outer_backward_number,
    parameter_ids,
    unreduced_gradients,
)
from hookline.errors import NonFiniteError, warn
from hookline.statistics.finiteness import (
    indices_of_non_finite,
    non_finite_kinds,
    probe_sum_of_each,
)
from hookline.verbs.check.agree_across_ranks import earliest_of_ranks, rank_here
from hookline.verbs.check.finding import CheckFinding
from hookline.verbs.check.forward import NOT_REPEATED, ForwardChecks
from hookline.verbs.check.loss_graph import LossGraph
from hookline.verbs.check.nonfinite_origins import measure
from hookline.verbs.check.pending_findings import CheckedModel, PendingFindings, finding_of_tensor
from hookline.verbs.check.replay import RUN, CheckedRun, RepeatedBackward, Replay
from hookline.verbs.check.unusual_outputs import warn_of_missing_gradients
from hookline.verbs.shared.model_state import tensor_version

# A backward that raises never ends here, so the oldest is forgotten.
_MOST_BACKWARDS = 16
_FINITE_BACKWARD = (
    "the repeated backward is finite; the run did not repeat itself, or something else writes"
    " gradients, such as a loss on weights or on values inside the model"
)
_WAITING = (
    "FSDP2 has not reduced it: set_requires_gradient_sync(False) keeps it for a later backward"
)
_MEANT = "infinities that are meant, as in a mask, have reached the gradients"
# A GradScaler that begins at 65,536 has long halved its scale to 1.
_MOST_SKIPPED = 32
_NEVER_STEPPED = (
    "hl.check: no optimizer has stepped, and the gradients of all {n} backwards were not finite."
    "\nThe first, which line.findings has in full: {message}"
    "\nA GradScaler skips such steps. Mend what overflows at any scale."
)
_FINITE_GRADIENTS = "the gradients are finite, so the step would hide it"


@final
class BackwardChecks:
    """Look at the gradients of parameters after each backward, and raise before a step.

    Hooks hold it, so it must not hold the line.
    """

    def __init__(
        self,
        checked: CheckedModel,
        outcome: PendingFindings,
        forward: ForwardChecks,
        *,
        warns_of_missing: bool,
    ) -> None:
        self._checked, self._passes, self._model = checked, checked.passes, checked.model
        self._outcome = outcome
        self._forward = forward
        self._warns_of_missing = warns_of_missing
        self._weights: list[tuple[str, Tensor]] = []
        # The runs whose outputs have got a gradient, by the number of the backward.
        self._runs: dict[int, list[CheckedRun]] = {}
        self._losses: list[LossGraph] = []
        self._nan_loss: CheckFinding | None = None
        self._at_start = self._judged = self._first_judged = _GradientSnapshot([])
        self._has_stepped = self._has_been_finite = False
        self._first_bad: CheckFinding | None = None
        self._n_bad = 0
        self._has_judged = False
        # Whether gradients that DDP reduced were not finite, and no step has raised the error.
        self._all_know = False
        # What is wrong with gradients that FSDP2 keeps until a later backward reduces them.
        self._waiting: CheckFinding | None = None

    def attach(
        self, line: Line, root: list[tuple[Site, ModuleNode]], registrations: Registrations
    ) -> None:
        """Look at the gradients of the model's outputs, and at each step of an optimizer."""
        hooked = [(site, node) for site, node in root if not is_scripted(node.module)]
        gradients = [(replace(site, port="grad_output"), node) for site, node in hooked]
        self._weights = [(node.path, node.tensor) for node in line.module_tree.tensors]
        self._at_start = _GradientSnapshot(self._weights)
        selection = Selection(line.module_tree, gradients)
        line.attach_taps(selection, lambda site: _RootGradientCallback(self), Order.RECORD)
        steps = OptimizerSteps(
            lambda _: self._passes.sees_backward(), self.check_at_step, _do_nothing
        )
        registrations.register_globally("step_pre", steps.begin_step)
        registrations.register_globally("backward", self.backward_begins)

    def backward_begins(self, roots: Sequence[Any], grads: Sequence[Any]) -> Callable[[], None]:
        """Look at the loss before a backward frees its graph: a hook on each run of autograd."""
        numbers = self._forward.node_numbers
        if not numbers or not self._passes.sees_backward():
            return _do_nothing
        try:
            loss = LossGraph(roots, numbers)
        except (RuntimeError, NotImplementedError):  # a tensor without these operations
            return _do_nothing
        loss.is_accumulating = self._nan_loss is not None and self._judged.are_same(self._weights)
        self._losses.append(loss)

        def end() -> None:
            self._losses.remove(loss)
            loss.release()

        return end

    def gradient_arrives(self, current: Pass, slot: int, grad: Tensor) -> None:
        """Keep the gradient of an output of the root, and judge the backward at its end."""
        opened = current.opened.get(RUN)
        if not opened:
            return
        run: CheckedRun = opened[0]
        number = outer_backward_number()
        runs = self._runs.get(number)
        if runs is None:
            if len(self._runs) >= _MOST_BACKWARDS:
                del self._runs[next(iter(self._runs))]
            runs = self._runs[number] = []
            loss = self._current_loss()
            judge = (
                self._backward_ends
                if loss is None
                else loss.bind_to_callers_context(self._backward_ends)
            )
            # Behind others: there DDP writes the reduced gradients.
            at_end_of_backward(lambda: at_end_of_backward(lambda: judge(number, loss)))
        if run not in runs:
            runs.append(run)
        run.gradients[slot] = grad.detach()

    def _current_loss(self) -> LossGraph | None:
        """Return the loss whose backward runs in this thread, or in autograd's thread for it."""
        losses = [loss for loss in self._losses if loss.thread == threading.get_ident()]
        if not losses and len(self._losses) == 1:
            losses = self._losses
        return losses[-1] if losses else None

    def _backward_ends(self, number: int, loss: LossGraph | None) -> None:
        runs = self._runs.pop(number, [])
        outcome = self._outcome
        try:
            is_known, is_finite = outcome.in_backward is not None, self._gradients_are_finite()
            self._has_judged = True
            # Under `no_sync`, DDP leaves each rank its own gradients.
            if not is_finite and getattr(self._model(), "require_backward_grad_sync", False):
                self._all_know = True
            if is_known and is_finite:
                outcome.in_backward = None  # the step was skipped, and this is another one
            elif not is_finite and not (
                # Where gradients accumulate, the first who made them so counts.
                is_known and self._judged.are_same(self._weights, compare_versions=False)
            ):
                known = outcome.until_step or self._reduced_finding()
                outcome.in_backward = known or self._find_cause(
                    runs, loss, self._bad_grads(self._weights)
                )
            self._has_been_finite |= is_finite
            self._n_bad += not is_finite
            self._first_bad = self._first_bad or outcome.in_backward
            self._update_nan_loss(runs, loss, is_finite=is_finite)
            self._judged = _GradientSnapshot(self._weights)
            self._first_judged = self._first_judged if is_known else self._judged
            self._agree_on_finding(runs, loss)
        finally:
            for run in runs:
                run.gradients = {}

    def _reduced_finding(self) -> CheckFinding | None:
        """Return the finding of gradients that were kept before, and are reduced now."""
        finding = self._waiting
        if finding is None:
            return None
        return finding.with_(notes=tuple(note for note in finding.notes if note != _WAITING))

    def _finding_of_unreduced_gradients(
        self, runs: list[CheckedRun], loss: LossGraph | None
    ) -> CheckFinding | None:
        """Judge the gradients that FSDP2 keeps until a later backward reduces them."""
        model = self._model()
        modules = [] if model is None else model.modules()
        waiting = [pair for module in modules for pair in unreduced_gradients(module)]
        if not waiting or self._waiting is not None:
            return self._waiting if waiting else None
        paths = {id(weight): path for path, weight in self._weights}
        bad = [
            (paths.get(id(weight), ""), grad) for weight, grad in waiting if non_finite_kinds(grad)
        ]
        if not bad:
            return None
        finding = self._find_cause(runs, loss, bad)
        return finding.with_(rank=rank_here(), notes=(*finding.notes, _WAITING))

    def _agree_on_finding(self, runs: list[CheckedRun], loss: LossGraph | None) -> None:
        """Agree with the other ranks on the finding of this backward, where weights are sharded."""
        if self._checked.sharded_over is None:
            return
        waiting = self._finding_of_unreduced_gradients(runs, loss)
        finding = self._checked.earliest(self._outcome.in_backward or self._nan_loss or waiting)
        is_loss = finding is not None and finding.is_loss
        is_waiting = finding is not None and _WAITING in finding.notes
        self._nan_loss = finding if is_loss else None
        self._waiting = finding if is_waiting else None
        self._outcome.in_backward = None if is_loss or is_waiting else finding

    def _update_nan_loss(
        self, runs: list[CheckedRun], loss: LossGraph | None, *, is_finite: bool
    ) -> None:
        """Note a loss that is NaN although its gradients are finite."""
        if not (self._nan_loss is not None and loss is not None and loss.is_accumulating):
            self._nan_loss = None
        if not is_finite or loss is None or not loss.is_nan or self._nan_loss is not None:
            return
        fault, last = loss.fault, max(run.step for run in runs)
        assert fault is not None
        finding = fault.added_to(finding_of_tensor("loss", "loss", fault.tensor, last))
        finding = finding.with_(suspect=None, notes=(*finding.notes, _FINITE_GRADIENTS))
        if self._checked.others_would_wait:
            # The other ranks know nothing of it, and would wait.
            finding = self._outcome.add(finding.with_(rank=rank_here()))
            self._outcome.warned.append(finding)
            warn(f"hl.check: {finding.message}")
        else:
            self._nan_loss = finding

    def _find_cause(
        self, runs: list[CheckedRun], loss: LossGraph | None, bad: list[tuple[str, Tensor]]
    ) -> CheckFinding:
        """Find the operation or the loss that made gradients that are not finite.

        Args:
            runs: the runs of the model that the backward went through, the last run first.
            loss: the loss, if it is known.
            bad: the gradients, with the paths of their parameters.
        """
        why: str | None = None
        for run in runs:
            if any(map(non_finite_kinds, run.gradients.values())):
                if why:
                    break  # it may come from a run that could not be repeated
                return self._finding_of_loss(run, loss)
            finding, why_not = self._forward.repeat_run(run, self._explain_by_repeating)
            if finding is not None:
                return finding
            why = why or why_not
        last = max(run.step for run in runs)
        return self._finding_of_gradients(bad, last, why or _FINITE_BACKWARD)

    def _explain_by_repeating(self, replay: Replay) -> tuple[CheckFinding | None, str | None]:
        """Repeat the backward of a repeated run, and explain it."""
        if replay.comparison.difference is not None:
            return None, NOT_REPEATED.format(replay.comparison.difference)
        repeated = replay.backward()
        if not self._agrees_with(repeated):
            return None, NOT_REPEATED.format("its gradients")
        if repeated.origin is not None:
            finding = replay.finding(repeated.origin, "backward")
            return self._outcome.write_file(replay, repeated.origin, finding), None
        return None, None if repeated.is_finite else _MEANT

    def _agrees_with(self, repeated: RepeatedBackward) -> bool:
        """Tell whether the gradients are not finite wherever those of a repeated backward are."""
        grads = [weight.grad for weight in repeated.not_finite]
        return all(grad is not None and non_finite_kinds(grad) for grad in grads)

    @staticmethod
    def _bad_grads(weights: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Return the gradients of weights that are not finite."""
        grads = [(path, weight.grad) for path, weight in weights]
        return [(path, grad) for path, grad in grads if grad is not None and non_finite_kinds(grad)]

    def _finding_of_gradients(
        self, bad: list[tuple[str, Tensor]], step: int | None, why: str
    ) -> CheckFinding:
        """Describe the gradients that are not finite, where the operation is not known."""
        path, grad = bad[-1]
        notes = [f"the operation is not known: {why}"]
        if len(bad) > 1:
            notes.append(f"{len(bad)} of {len(self._weights)} gradients are not finite")
        return finding_of_tensor("gradient", path, grad, step).with_(notes=tuple(notes))

    def _finding_of_loss(self, run: CheckedRun, loss: LossGraph | None) -> CheckFinding:
        """Describe a gradient of the output that is not finite: all code outside is the loss."""
        grad = next(gradient for gradient in run.gradients.values() if non_finite_kinds(gradient))
        finding = finding_of_tensor("loss", "", grad, run.step)
        finding = finding.with_(inputs=(measure("gradient of the output", grad),))
        notes = []
        if run.is_output_finite:
            notes.append("the output was finite, and its gradient is not: look at the loss")
        if loss is not None and loss.value is not None:
            notes.append(f"the loss was {loss.value:.4g}")
        fault = None if loss is None else loss.fault or loss.fault_of_backward()
        finding = finding if fault is None else fault.added_to(finding)
        return finding.with_(notes=(*notes, *finding.notes))

    def check_at_step(self, optimizer: Optimizer, has_gradients: bool) -> None:
        """Raise an error before an optimizer steps with a gradient that is not finite."""
        if not has_gradients:
            return
        outside = self._passes.in_thread.outside
        has_run = outside is not None and RUN in outside.opened and bool(outside.log)
        if outside is not None and has_run:
            self._forward.judge_partial_run(outside)
        params = set(parameter_ids(optimizer))
        if self._warns_of_missing:
            stepped = (entry for entry in self._weights if id(entry[1]) in params)
            step, add = self._forward.last_step, self._outcome.add
            self._warns_of_missing = not warn_of_missing_gradients(stepped, step, add)
        finding = self._finding_at_step(optimizer, params)
        if finding is None:
            if outside is not None and has_run:
                self._forward.begin_partial_run(outside)
            return
        if self._checked.others_would_wait:
            finding = earliest_of_ranks(finding) or finding
            self._outcome.until_step, self._all_know = None, False
        raise self._outcome.add(finding).error()

    def _finding_at_step(self, optimizer: Optimizer, param_ids: set[int]) -> CheckFinding | None:
        """Return what an optimizer is about to step with; None if its gradients are finite."""
        if not param_ids <= {id(weight) for _, weight in self._weights}:
            model = self._model()  # parts of it may have been replaced
            self._weights = self._weights if model is None else list(model.named_parameters())
        stepped = [entry for entry in self._weights if id(entry[1]) in param_ids]
        skipped = getattr(optimizer, "found_inf", None)
        if not stepped or (isinstance(skipped, Tensor) and bool(skipped)):
            return None  # the optimizer itself skips the step, as GradScaler asks it to
        self._has_stepped = True
        known = self._outcome.in_backward or self._outcome.until_step
        is_judged = known is None and self._judged.are_same(stepped)
        if is_judged and self._checked.others_would_wait:
            # A collective after the backward may have written to them: no version tells.
            is_judged = isinstance(self._model(), DistributedDataParallel)
        is_bad = not is_judged and not self._gradients_are_finite(param_ids)
        finding = (
            (known or self._describe_gradients_not_from_outputs(stepped))
            if is_bad
            else self._nan_loss_of(stepped)
        )
        # Each rank has shards of its own to step with, and all of them must stop.
        return self._checked.earliest(finding)

    def _nan_loss_of(self, weights: list[tuple[str, Tensor]]) -> CheckFinding | None:
        """Return the loss that was NaN when weights got the finite gradients that they have."""
        is_same = self._judged.are_same(weights, compare_versions=False)
        return self._nan_loss if is_same else None

    def _describe_gradients_not_from_outputs(
        self, stepped: list[tuple[str, Tensor]]
    ) -> CheckFinding:
        """Describe gradients that no backward through the model's outputs has made."""
        why = (
            "no backward through the model's outputs made it; look at what else writes gradients,"
            " such as a division after backward() or a loss on values inside the model"
        )
        return self._finding_of_gradients(self._bad_grads(stepped), self._forward.last_step, why)

    def report_unstepped_gradients(self, error: BaseException | None) -> None:
        """Say at the end of the block what no optimizer has stepped with."""
        outcome = self._outcome
        finding = self._unstepped_finding()
        if error is None and self._checked.others_would_wait:
            finding = self._agree_on_finding_at_end(
                outcome.pop_forward_finding() or finding, finding
            )
        if finding is None:
            self._warn_of_skipped_steps(error)
            return
        outcome.add(finding)
        if error is None:
            outcome.at_end = outcome.at_end or finding
        elif not isinstance(error, NonFiniteError):
            error.add_note(f"hookline: before that, {finding.message}")

    def _warn_of_skipped_steps(self, error: BaseException | None) -> None:
        """Warn if all steps were skipped, as by a `GradScaler` that no scale helps."""
        first, are_few = self._first_bad, self._n_bad <= _MOST_SKIPPED
        if first is None or are_few or error is not None or self._has_stepped:
            return
        if not self._has_been_finite:
            self._outcome.warned.append(self._outcome.add(first))
            warn(_NEVER_STEPPED.format(n=self._n_bad, message=first.message.splitlines()[0]))

    def _unstepped_finding(self) -> CheckFinding | None:
        """Return what is wrong with the gradients at the end, if nobody has raised it."""
        finding = self._outcome.pop_backward_finding() or self._nan_loss_of(self._weights)
        if self._waiting is not None:  # nobody could have stepped with it
            return self._waiting
        # Gradients that an optimizer could have stepped with, or that were clipped or dropped, were
        # skipped on purpose.
        if self._has_stepped or not (finding is None or self._first_judged.are_same(self._weights)):
            return None
        finding = finding or self._finding_of_gradients_not_from_outputs()
        is_told = finding in self._outcome.all and finding is not self._outcome.until_step
        return None if is_told else finding

    def _agree_on_finding_at_end(
        self, finding: CheckFinding | None, of_gradients: CheckFinding | None
    ) -> CheckFinding | None:
        """Agree with the other ranks on what to raise at the end, where they know of it.

        Args:
            finding: this rank's finding, if it has one.
            of_gradients: the finding of gradients that are still there, if there is one.
        """
        if self._all_know or of_gradients is not None:
            return earliest_of_ranks(finding)
        if finding is None or not self._has_judged:
            return finding
        # The gradients were finite, so the other ranks know nothing of it.
        self._outcome.warned.append(finding)
        warn(f"hl.check: {finding.message}")
        return None

    def _finding_of_gradients_not_from_outputs(self) -> CheckFinding | None:
        """Describe gradients that something else than a backward through the outputs has made."""
        if any(finding.is_error for finding in self._outcome.all):
            return None  # said already
        if self._at_start.are_same(self._weights) or self._gradients_are_finite():
            return None
        return self._describe_gradients_not_from_outputs(self._weights)

    def _gradients_are_finite(self, ids: set[int] | None = None) -> bool:
        weights = [weight for _, weight in self._weights if ids is None or id(weight) in ids]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        return not indices_of_non_finite(probe_sum_of_each(grads)) or not any(
            map(non_finite_kinds, grads)
        )


def _do_nothing() -> None:
    """Do nothing when a backward ends."""


# Stands for the gradient of a weight that is new. It equals no gradient.
_ABSENT: tuple[Callable[[], None], None] = (lambda: None, None)


@final
class _GradientSnapshot:
    """Remember which gradients some weights have, to tell whether they have changed since."""

    __slots__ = ("_grads",)

    def __init__(self, weights: list[tuple[str, Tensor]]) -> None:
        # Weakly, or the memory of gradients that are dropped would stay.
        self._grads = {
            id(weight): None if grad is None else (weakref.ref(grad), _local_version(grad))
            for weight, grad in ((weight, weight.grad) for _, weight in weights)
        }

    def are_same(self, weights: list[tuple[str, Tensor]], *, compare_versions: bool = True) -> bool:
        """Tell whether weights have the gradients they had; `compare_versions`, unwritten since."""
        for _, weight in weights:
            grad, before = weight.grad, self._grads.get(id(weight), _ABSENT)
            if grad is None or before is None:
                if (grad is None) != (before is None):
                    return False
            elif before[0]() is not grad or (
                compare_versions and before[1] != _local_version(grad)
            ):
                return False
        return True


def _local_version(grad: Tensor) -> int | None:
    return tensor_version(grad if type(grad) is Tensor else local_part(grad))


@final
class _RootGradientCallback(GradientCallback):
    """See the gradients of the root's outputs."""

    __slots__ = ("_checks",)
    optional = True

    def __init__(self, checks: BackwardChecks) -> None:
        self._checks = checks

    def on_gradient(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Keep the gradient, and judge the backward at its end."""
        self._checks.gradient_arrives(current, slot, grad)
