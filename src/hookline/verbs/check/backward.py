"""Judge the gradients of each backward, and stop an optimizer before it steps with bad ones."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
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
)
from hookline.engine.line.registration import Registrations
from hookline.engine.selection.module_tree import ModuleNode
from hookline.engine.taps.base import Tap
from hookline.engine.torch_private.modules import is_scripted
from hookline.errors import NonFiniteError
from hookline.verbs.check.also import say_missing
from hookline.verbs.check.finding import Finding
from hookline.verbs.check.finiteness import are_finite, kinds_in, total
from hookline.verbs.check.forward import ForwardChecks
from hookline.verbs.check.origins import measured
from hookline.verbs.check.outcome import Checked, Outcome, of_tensor
from hookline.verbs.check.ranks import earliest, shared
from hookline.verbs.check.replay import Replay
from hookline.verbs.check.run import RUN, Run, version
from hookline.verbs.shared.closures import closure_of, with_closure


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

    def _bind(self, site: Site) -> GradientCallback:
        return _RootGradient(self)

    def gradient_arrives(self, current: Pass, slot: int, grad: Tensor) -> None:
        """Keep the gradient of an output of the root, and judge the backward at its end."""
        found = current.opened.get(RUN)
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
        outcome = self._outcome
        try:
            is_known, is_finite = outcome.in_backward is not None, self._gradients_are_finite()
            if is_known and is_finite:
                outcome.in_backward = None  # the step was skipped, and this is another one
            elif not is_finite and not (is_known and self._accumulates()):
                # Where gradients accumulate, the first who made them so counts.
                outcome.in_backward = outcome.take_until_step() or self._judge(run)
            self._judged = _Gradients(self._weights)
            self._found_with = self._found_with if is_known else self._judged
            if self._sharded_on is not None:
                outcome.in_backward = shared(outcome.in_backward, self._sharded_on)
        finally:
            run.gradients = {}

    def _accumulates(self) -> bool:
        """Tell whether the gradients are the tensors that the last backward wrote to."""
        return self._judged.are_same(self._weights, with_numbers=False)

    def _judge(self, run: Run) -> Finding:
        model = self._model()
        why = run.why_not_repeatable() if model is not None else "the model is gone"
        if any(map(kinds_in, run.gradients.values())):
            return self._of_loss(run)
        if model is not None and why is None:
            try:
                with torch.enable_grad():
                    replay = Replay(model, run, self._passes)
                    replay.forward()
                    origin = replay.backward()
                if origin is not None:
                    return self._outcome.keep(replay, origin, replay.finding(origin, "backward"))
                why = (
                    "the repeated backward is finite; look at what else writes gradients, such as"
                    " a loss on weights or on values inside the model"
                )
            except Exception as error:
                why = f"the run could not be repeated ({first_line(error)})"
        return self._of_gradients(self._weights, run.step, why or "")

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

    def _of_loss(self, run: Run) -> Finding:
        grad = next(one for one in run.gradients.values() if kinds_in(one))
        found = of_tensor("loss", "", grad, run.step)
        return found.with_(
            inputs=(measured("gradient of the output", grad),),
            notes=("the output was finite, and its gradient is not: look at the loss",),
        )

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
        finding = (known or self._of_step(stepped)) if is_bad else None
        # Each rank has shards of its own to step with, and all of them must stop.
        return finding if self._sharded_on is None else shared(finding, self._sharded_on)

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
        made = outcome.take_backward()
        # Gradients that an optimizer could have stepped with, or that were clipped or dropped, were
        # skipped on purpose.
        if self._has_stepped or not (made is None or self._found_with.are_same(self._weights)):
            return
        finding = made or self._written_meanwhile()
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
