"""Judge the gradients of each backward, and stop an optimizer before it steps with bad ones."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.display.text import first_line
from hookline.engine import (
    GradientCallback,
    Line,
    Order,
    Pass,
    Passes,
    PendingGradient,
    Selection,
    Site,
    at_end_of_backward,
    is_grouped,
    local_part,
    no_callback,
    outer_backward,
)
from hookline.engine.line.registration import Registrations
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.modules import is_scripted
from hookline.errors import NonFiniteError, warn
from hookline.verbs.check.also import say_missing
from hookline.verbs.check.finding import Finding
from hookline.verbs.check.finiteness import are_finite, kinds_in, total
from hookline.verbs.check.forward import ForwardChecks
from hookline.verbs.check.loss import LossGraph
from hookline.verbs.check.origins import measured
from hookline.verbs.check.outcome import Checked, Outcome, of_fault, of_tensor
from hookline.verbs.check.ranks import earliest, rank_here, shared
from hookline.verbs.check.replay import RepeatedBackward
from hookline.verbs.check.run import RUN, Run, version
from hookline.verbs.shared.closures import closure_of, with_closure

# A backward that raises never ends here, so the oldest is forgotten.
_MOST_BACKWARDS = 16
_NOT_REPEATED = "the run did not repeat itself, first at {}"
_FINITE_BACKWARD = (
    "the repeated backward is finite; the run did not repeat itself, or something else writes"
    " gradients, such as a loss on weights or on values inside the model"
)
_MEANT = "infinities that are meant, as in a mask, have reached the gradients"
_FINITE_GRADIENTS = "the gradients are finite, so the step would hide it"


@final
class BackwardChecks:
    """Look at the gradients of parameters after each backward, and raise before a step.

    Hooks hold it, so it must not hold the line.

    Args:
        checked: the model and its passes.
        outcome: what was found.
        forward: the checks of the model's runs.
        warns_of_missing: whether to warn of parameters without a gradient.
    """

    def __init__(
        self,
        checked: Checked,
        outcome: Outcome,
        forward: ForwardChecks,
        *,
        warns_of_missing: bool,
    ) -> None:
        self._passes, self._model, self._sharded_on = checked
        self._outcome = outcome
        self._forward = forward
        self._warns_of_missing = warns_of_missing
        self._weights: list[tuple[str, Tensor]] = []
        # The runs whose outputs have got a gradient, by the number of the backward.
        self._runs: dict[int, list[Run]] = {}
        self._losses: list[LossGraph] = []
        self._nan_loss: Finding | None = None
        self._at_start = self._judged = self._found_with = _Gradients([])
        self._has_stepped = False

    def start(
        self, line: Line, root: list[tuple[Site, ModuleNode]], registrations: Registrations
    ) -> None:
        """Look at the gradients of the model's outputs, and at each step of an optimizer."""
        gradients = [
            (
                Site(site.path, "grad_output", aliases=site.aliases, module_type=site.module_type),
                node,
            )
            for site, node in root
            if not is_scripted(node.module)
        ]
        self._weights = [(node.path, node.tensor) for node in line.module_tree.tensors]
        self._at_start = _Gradients(self._weights)
        step = _StepTap(self._passes, self)
        line.tap(Selection(line.module_tree, gradients), self._bind, Order.RECORD)
        registrations.register_everywhere("step_pre", step.fire)
        registrations.register_everywhere("backward", self.backward_begins)

    def _bind(self, site: Site) -> GradientCallback:
        return _RootGradient(self)

    def backward_begins(self, roots: Sequence[Any], grads: Sequence[Any]) -> Callable[[], None]:
        """Look at the loss before a backward frees its graph: a hook on each run of autograd."""
        numbers = self._forward.node_numbers
        if numbers.is_empty or not self._passes.is_ours():
            return _nothing
        try:
            loss = LossGraph(roots, numbers)
        except (RuntimeError, NotImplementedError):  # a tensor without these operations
            return _nothing
        loss.is_accumulating = self._nan_loss is not None and self._judged.are_same(self._weights)
        self._losses.append(loss)

        def end() -> None:
            self._losses.remove(loss)
            loss.end()

        return end

    def gradient_arrives(self, current: Pass, slot: int, grad: Tensor) -> None:
        """Keep the gradient of an output of the root, and judge the backward at its end."""
        opened = current.opened.get(RUN)
        if not opened:
            return
        run: Run = opened[0]
        number = outer_backward()
        runs = self._runs.get(number)
        if runs is None:
            if len(self._runs) >= _MOST_BACKWARDS:  # some have raised, and never ended
                del self._runs[next(iter(self._runs))]
            runs = self._runs[number] = []
            loss = self._loss_here()
            # Behind others: there DDP writes the reduced gradients.
            at_end_of_backward(
                lambda: at_end_of_backward(lambda: self._backward_ends(number, loss))
            )
        if run not in runs:
            runs.append(run)
        run.gradients[slot] = grad.detach()

    def _loss_here(self) -> LossGraph | None:
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
            if is_known and is_finite:
                outcome.in_backward = None  # the step was skipped, and this is another one
            elif not is_finite and not (is_known and self._accumulates()):
                # Where gradients accumulate, the first who made them so counts.
                outcome.in_backward = outcome.take_until_step() or self._judge(runs, loss)
            self._judge_loss(runs, loss, is_finite=is_finite)
            self._judged = _Gradients(self._weights)
            self._found_with = self._found_with if is_known else self._judged
            if self._sharded_on is not None:
                self._share()
        finally:
            for run in runs:
                run.gradients = {}

    def _share(self) -> None:
        """Agree with the other ranks on the finding of this backward."""
        assert self._sharded_on is not None
        finding = shared(self._outcome.in_backward or self._nan_loss, self._sharded_on)
        is_loss = finding is not None and finding.is_loss
        self._nan_loss = finding if is_loss else None
        self._outcome.in_backward = None if is_loss else finding

    def _judge_loss(self, runs: list[Run], loss: LossGraph | None, *, is_finite: bool) -> None:
        """Note a loss that is NaN although its gradients are finite."""
        if not (self._nan_loss is not None and loss is not None and loss.is_accumulating):
            self._nan_loss = None
        if not is_finite or loss is None or not loss.is_nan or self._nan_loss is not None:
            return
        fault, last = loss.fault, max(run.step for run in runs)
        assert fault is not None
        finding = of_fault(of_tensor("loss", "loss", fault.tensor, last), fault)
        finding = finding.with_(suspect=None, notes=(*finding.notes, _FINITE_GRADIENTS))
        if is_grouped() and self._sharded_on is None:
            # The other ranks know nothing of it, and would wait.
            finding = self._outcome.add(finding.with_(rank=rank_here()))
            self._outcome.warned.append(finding)
            warn(f"hl.check: {finding.message}")
        else:
            self._nan_loss = finding

    def _accumulates(self) -> bool:
        """Tell whether the gradients are the tensors that the last backward wrote to."""
        return self._judged.are_same(self._weights, with_numbers=False)

    def _judge(self, runs: list[Run], loss: LossGraph | None) -> Finding:
        """Find the operation or the loss that made gradients that are not finite.

        Args:
            runs: the runs of the model that the backward went through, the last run first.
            loss: the loss that it began at, if known.
        """
        model, why = self._model(), ""
        for run in runs:
            if any(map(kinds_in, run.gradients.values())):
                if why:
                    break  # it may come from a run that could not be repeated
                return self._of_loss(run, loss)
            finding, why_not = self._repeated(model, run)
            if finding is not None:
                return finding
            why = why or why_not
        last = max(run.step for run in runs)
        return self._of_gradients(self._weights, last, why or _FINITE_BACKWARD)

    def _repeated(self, model: nn.Module | None, run: Run) -> tuple[Finding | None, str]:
        """Repeat a run and its backward.

        Returns:
            The finding. Without one, the reason why the origin is not known; an empty text if the
            repeated backward is finite.
        """
        why = run.why_not_repeatable() if model is not None else "the model is gone"
        if model is None or why is not None:
            return None, why or ""
        try:
            with torch.enable_grad():
                replay = self._forward.replay(model, run)
                replay.forward()
                if replay.likeness.difference is not None:
                    return None, _NOT_REPEATED.format(replay.likeness.difference)
                repeated = replay.backward()
            if not self._is_like(repeated):
                return None, _NOT_REPEATED.format("its gradients")
            if repeated.origin is not None:
                finding = replay.finding(repeated.origin, "backward")
                return self._outcome.keep(replay, repeated.origin, finding), ""
            return None, "" if repeated.is_finite else _MEANT
        except Exception as error:
            return None, f"the run could not be repeated ({first_line(error)})"

    def _is_like(self, repeated: RepeatedBackward) -> bool:
        """Tell whether the gradients are not finite wherever those of a repeated backward are."""
        actual = {id(weight): weight.grad for _, weight in self._weights}
        return all(
            grad is not None and bool(kinds_in(grad))
            for parameter in repeated.not_finite
            for grad in (actual.get(id(parameter)),)
        )

    @staticmethod
    def _of_gradients(weights: list[tuple[str, Tensor]], step: int | None, why: str) -> Finding:
        """Describe the gradients that are not finite, where the operation is not known."""
        bad = [(path, one.grad) for path, one in weights
               if one.grad is not None and kinds_in(one.grad)]  # fmt: skip
        path, grad = bad[-1]
        notes = [f"the operation is not known: {why}"]
        if len(bad) > 1:
            notes.append(f"{len(bad)} of {len(weights)} gradients are not finite")
        return of_tensor("gradient", path, grad, step).with_(notes=tuple(notes))

    def _of_loss(self, run: Run, loss: LossGraph | None) -> Finding:
        """Describe a gradient of the output that is not finite: all code outside is the loss."""
        grad = next(gradient for gradient in run.gradients.values() if kinds_in(gradient))
        finding = of_tensor("loss", "", grad, run.step)
        finding = finding.with_(inputs=(measured("gradient of the output", grad),))
        notes = []
        if run.is_output_finite:
            notes.append("the output was finite, and its gradient is not: look at the loss")
        if loss is not None and loss.value is not None:
            notes.append(f"the loss was {loss.value:.4g}")
        fault = None if loss is None else loss.fault or loss.fault_of_backward()
        finding = finding if fault is None else of_fault(finding, fault)
        return finding.with_(notes=(*notes, *finding.notes))

    def step_begins(self, optimizer: Optimizer) -> None:
        """Raise an error before an optimizer steps with a gradient that is not finite."""
        outside = self._passes.in_thread.outside
        if outside is not None and RUN in outside.opened:
            self._forward.judge_parts(outside)
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if self._warns_of_missing:
            stepped = (one for one in self._weights if id(one[1]) in held)
            step, add = self._forward.last_step, self._outcome.add
            self._warns_of_missing = not say_missing(stepped, step, add)
        finding = self._stepped_with(optimizer, held)
        if finding is None:
            return
        if is_grouped() and self._sharded_on is None:
            finding = earliest(finding, is_known=finding.kind != "gradient") or finding
        raise self._outcome.add(finding).error()

    def _stepped_with(self, optimizer: Optimizer, held: set[int]) -> Finding | None:
        """Return what an optimizer is about to step with; None if its gradients are finite."""
        if not held <= {id(one) for _, one in self._weights}:
            self._walk_again()  # parts of the model may have been replaced
        stepped = [one for one in self._weights if id(one[1]) in held]
        skipped = getattr(optimizer, "found_inf", None)
        if not stepped or (isinstance(skipped, Tensor) and bool(skipped)):
            return None  # the optimizer itself skips the step, as GradScaler asks it to
        self._has_stepped = True
        known = self._outcome.in_backward
        is_judged = known is None and self._judged.are_same(stepped)
        is_bad = not is_judged and not self._gradients_are_finite(held)
        finding = (known or self._of_step(stepped)) if is_bad else self._loss_of(stepped)
        # Each rank has shards of its own to step with, and all of them must stop.
        return finding if self._sharded_on is None else shared(finding, self._sharded_on)

    def _loss_of(self, weights: list[tuple[str, Tensor]]) -> Finding | None:
        """Return the loss that was NaN when weights got the finite gradients that they have."""
        is_same = self._judged.are_same(weights, with_numbers=False)
        return self._nan_loss if is_same else None

    def _of_step(self, stepped: list[tuple[str, Tensor]]) -> Finding:
        """Describe gradients that no backward through the model's outputs has made."""
        why = (
            "no backward through the model's outputs made it; look at what else writes gradients,"
            " such as a division after backward() or a loss on values inside the model"
        )
        return self._of_gradients(stepped, self._forward.last_step, why)

    def _walk_again(self) -> None:
        model = self._model()
        if model is not None:
            self._weights = list(model.named_parameters())

    def end(self, error: BaseException | None) -> None:
        """Say at the end of the block what no optimizer has stepped with."""
        outcome = self._outcome
        outcome.at_end = outcome.at_end or outcome.take_until_step()
        unstepped = outcome.take_backward() or self._loss_of(self._weights)
        # Gradients that an optimizer could have stepped with, or that were clipped or dropped, were
        # skipped on purpose.
        if self._has_stepped or not (unstepped is None or self._found_with.are_same(self._weights)):
            return
        finding = unstepped or self._written_meanwhile()
        if finding is None or finding in outcome.all:
            return
        outcome.add(finding)
        if error is None:
            outcome.at_end = outcome.at_end or finding
        elif not isinstance(error, NonFiniteError):
            error.add_note(f"hookline: before that, {finding.message}")

    def _written_meanwhile(self) -> Finding | None:
        """Describe gradients that something else than a backward through the outputs has made."""
        if any(finding.is_error for finding in self._outcome.all):
            return None  # said already
        if self._at_start.are_same(self._weights) or self._gradients_are_finite():
            return None
        return self._of_step(self._weights)

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


def _nothing() -> None:
    """Do nothing when a backward ends."""


# Stands for the gradient of a weight that was not there: no gradient is this.
_UNSEEN: tuple[Callable[[], None], None] = (lambda: None, None)


@final
class _Gradients:
    """Remember which gradients some weights have, to tell whether they have changed since.

    Args:
        weights: the weights, by path.
    """

    __slots__ = ("_seen",)

    def __init__(self, weights: list[tuple[str, Tensor]]) -> None:
        # Weakly, or the memory of gradients that are dropped would stay.
        self._seen = {
            id(one): None if grad is None else (weakref.ref(grad), _version_here(grad))
            for _, one in weights
            for grad in (one.grad,)
        }

    def are_same(self, weights: list[tuple[str, Tensor]], *, with_numbers: bool = True) -> bool:
        """Tell whether weights have the gradients that they had.

        Args:
            weights: the weights, by path.
            with_numbers: whether the gradients must not have been written to since.
        """
        for _, one in weights:
            grad, seen = one.grad, self._seen.get(id(one), _UNSEEN)
            if grad is None or seen is None:
                if not (grad is None and seen is None):
                    return False
            elif seen[0]() is not grad or (with_numbers and seen[1] != _version_here(grad)):
                return False
        return True


def _version_here(grad: Tensor) -> int | None:
    return version(grad if type(grad) is Tensor else local_part(grad))


@final
class _RootGradient(GradientCallback):
    """See the gradients of the root's outputs."""

    __slots__ = ("_checks",)
    optional = True

    def __init__(self, checks: BackwardChecks) -> None:
        self._checks = checks

    def arrived(self, current: Pass, pending: PendingGradient, slot: int, grad: Tensor) -> None:
        """Keep the gradient, and judge the backward at its end."""
        self._checks.gradient_arrives(current, slot, grad)


@final
class _StepTap(Tap):
    """A hook before each step of an optimizer; it is called for every optimizer."""

    __slots__ = ("_checks",)
    is_on_calls = False

    def __init__(self, passes: Passes, checks: BackwardChecks) -> None:
        super().__init__(Site("any optimizer", "step_pre"), passes, no_callback, Order.HOOK)
        self._checks = checks

    def fire(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Judge the gradients, or those that a closure computes in the step: the hook."""
        if not self.passes.is_ours():
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            self._checks.step_begins(optimizer)
            return None

        @functools.wraps(closure)
        def judged() -> Any:
            loss = closure()
            self._checks.step_begins(optimizer)
            return loss

        return with_closure(args, kwargs, judged)
