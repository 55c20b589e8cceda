"""The steps of a training: told by the optimizers of the model, else by passes of the root."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.curves import StepReport
from hookline.engine import Pass, Passes
from hookline.errors import HooklineWarning, warn
from hookline.verbs.monitor.loss_scale import Scaling
from hookline.verbs.monitor.parameters import Parameters
from hookline.verbs.monitor.ranks import Ranks
from hookline.verbs.monitor.slots import Slots

# Passes before any optimizer has stepped: after so many, each pass is a step.
_MOST_WAITING = 256


class Reporter(Protocol):
    """The destination of a step's report."""

    def add(self, report: StepReport) -> None:
        """Take the report of a step."""
        ...


def _guarded(method: Callable[..., None]) -> Callable[..., None]:
    """Have a method of `Steps` stop the monitor, and not the training, if it raises."""

    @functools.wraps(method)
    def guarded(self: Steps, *args: Any, **options: Any) -> None:
        try:
            if not self.has_failed:
                method(self, *args, **options)
        except HooklineWarning:
            raise  # the user has made warnings errors
        except Exception as error:
            self.stop()
            first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
            warn(
                f"hl.monitor stopped at step {self.number}: {type(error).__name__}: {first}. The"
                " training goes on."
                "\nMake HooklineWarning an error to see where: python -W error::UserWarning."
            )

    return guarded


@final
class Steps:
    """Collect the slots of each step, and report the steps whose turn it is.

    A step ends when each optimizer of the model has stepped, or one of them steps again. Passes
    between belong to one step, as in gradient accumulation. The first step shows which optimizers
    there are, so it ends when the next pass begins. Until an optimizer steps, the passes are kept
    apart. If none ever does, each pass is a step.

    Args:
        model: the model.
        passes: the passes of the line.
        slots: the slots of all sites.
        parameters: measures parameters.
        scaling: divides gradients by the scale of the loss.
        every: every so many steps are reported.
        to: takes the reports.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        slots: Slots,
        parameters: Parameters,
        scaling: Scaling,
        every: int,
        to: Reporter,
    ) -> None:
        self.ranks = Ranks(slots.statistics)
        self.number = 0
        self.first = 0
        self.n_reported = 0
        self.told_by = ""  # "optimizer" or "pass", once it is known
        self._model = weakref.ref(model)
        self._passes = passes
        self._knows_optimizers = False
        self._slots = slots
        self._measured = parameters
        self._scaling = scaling
        self._every = every
        self._to = to
        # Whether an optimizer trains the model.
        self._trains: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._has_stepped = False
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # The slots of passes before any optimizer has stepped, and whether they had gradients.
        self._waiting: list[tuple[dict[str, list[Tensor]], bool]] = []
        self._n_passes = 0
        self._has_grad = False
        self.is_over = False
        self.has_failed = False
        self._has_told = False

    @property
    def every(self) -> int:
        """Every so many steps are reported."""
        return self._every

    @every.setter
    def every(self, every: int) -> None:
        self._every = every
        self._turn()

    def stop(self) -> None:
        """Measure nothing more, after a failure."""
        self.has_failed = True
        self._slots.is_on = False

    def _turn(self) -> None:
        """Look whether the present step is reported, and tell the hooks."""
        self._slots.is_on = (self.number - self.first) % self._every == 0
        self._measured.keeps_copies = self._every == 1

    # -- called by hooks ---------------------------------------------------------------------------

    @_guarded
    def begin_pass(self, current: Pass) -> None:
        """Begin a pass of the root, or a pass of modules that run outside the root."""
        if self.told_by == "optimizer":
            if self._has_stepped and not self._knows_optimizers:
                self._end_step()
            return
        if self._n_passes:
            self._end_pass()
        self._n_passes += 1
        self._has_grad = torch.is_grad_enabled()

    def _end_pass(self) -> None:
        if self.told_by == "pass":
            self._end_step()
            return
        self._waiting.append((self._slots.take(), self._has_grad))
        if len(self._waiting) >= _MOST_WAITING:
            self._tell_by_passes()

    def trains(self, optimizer: Any) -> bool:
        """Tell whether an optimizer trains the model."""
        known = self._trains.get(optimizer)
        if known is None:
            model = self._model()
            mine = set() if model is None else {id(one) for one in model.parameters()}
            held = [one for group in optimizer.param_groups for one in group["params"]]
            known = self._trains[optimizer] = any(id(one) in mine for one in held)
        return known

    @_guarded
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure weights and gradients: the hook before an optimizer's step."""
        if self.told_by != "optimizer":
            self._tell_by_optimizer()
        elif optimizer in self._stepped:
            self._end_step()
        if self._slots.is_on:
            self._scaling.look(self.number)
            self._measured.before(optimizer, has_grads=not _has_closure(args, kwargs))

    @_guarded
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure updates, and end the step: the hook after an optimizer's step."""
        if self._slots.is_on:
            self._measured.after(optimizer, has_grads=_has_closure(args, kwargs))
        self._stepped.add(optimizer)
        self._has_stepped = True
        # Modules that run outside the root begin one pass for all steps.
        if not (self._knows_optimizers or self._passes.outside_root):
            return
        ours = [one for one, is_ours in self._trains.items() if is_ours]
        if all(one in self._stepped for one in ours):
            self._end_step()

    # -- who tells ---------------------------------------------------------------------------------

    def _tell_by_optimizer(self) -> None:
        """Count steps of optimizers from now on. Passes without gradients were no training."""
        self.told_by = "optimizer"
        self._slots.needs_grad = True
        for slots, has_grad in self._waiting:
            if has_grad:
                self._slots.put(slots)
        self._waiting.clear()

    def _tell_by_passes(self, *, is_last: bool = False) -> None:
        """Report each pass that waits as a step, and count passes from now on."""
        self.told_by = "pass"
        last = self._slots.take()
        for slots, _ in self._waiting:
            if self._slots.is_on:
                self._slots.put(slots)
            self._end_step(is_last=is_last)
        self._waiting.clear()
        if self._slots.is_on:
            self._slots.put(last)

    # -- the end of a step -------------------------------------------------------------------------

    def _end_step(self, *, is_last: bool = False) -> None:
        if self._slots.is_on:
            if self.told_by != "optimizer":
                self._measured.values()
            taken = self._slots.take()
            self._slots.tell()
            self._look_for_values(taken)
            sites, version = self._slots.sites(), self._slots.version
            layout, slots = self.ranks.report(sites, taken, version, is_last=is_last)
            if layout.entries:
                self.n_reported += 1
                self._to.add(StepReport(self.number, time.time(), layout, slots))
        self.number += 1
        self._knows_optimizers = self._has_stepped
        self._has_stepped = False
        self._stepped.clear()
        self._turn()

    def _look_for_values(self, taken: dict[str, list[Tensor]]) -> None:
        """Warn, once, if an optimizer trains the model and no selected module has a value."""
        if self._has_told or self.told_by != "optimizer" or self._slots.has_modules(taken):
            return
        self._has_told = True
        warn(
            "hl.monitor: no value came from a module with gradients enabled at step"
            f" {self.number}, though an optimizer of the model stepped. Another model may run in"
            " its place.\nMonitor the model that runs."
        )

    @_guarded
    def finish(self, *, has_failed: bool) -> None:
        """Report what is left, when the line has ended. Idempotent.

        Args:
            has_failed: whether the block raised, so that other ranks may not come.
        """
        if self.is_over:
            return
        self.is_over = True
        if self.told_by == "optimizer":
            if self._has_stepped and not has_failed:
                self._end_step(is_last=True)
        elif self._n_passes and not (has_failed and self.ranks.is_grouped):
            if not self.told_by:
                self._tell_by_passes(is_last=True)
            self._end_step(is_last=True)
        self._slots.is_on = False
        self._slots.tell()


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Tell whether an optimizer's step computes the gradients itself, by a closure.

    torch's hooks get the optimizer as the first of the arguments.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure is not None
