"""The steps of a training: told by the optimizers of the model, else by passes of the root."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hookline.curves import LOGGED, StepReport
from hookline.display.text import type_and_line
from hookline.engine import Pass, at_end_of_backward, closure_of, outer_backward_number
from hookline.errors import HooklineWarning, InputError, warn
from hookline.verbs.monitor.firing_order import FiringOrder
from hookline.verbs.monitor.logged_numbers import LoggedNumbers
from hookline.verbs.monitor.loss_scale import LossScale, is_skipped_by_scaler
from hookline.verbs.monitor.optimizers import Optimizers
from hookline.verbs.monitor.parameters import Parameters
from hookline.verbs.monitor.rank_gatherer import RankGatherer, ReportedStep
from hookline.verbs.monitor.running_optimizer_steps import RunningSteps, frame_outside_hookline
from hookline.verbs.monitor.slots import StepSlots

# Passes before any optimizer has stepped: after so many, each pass is a step.
_MOST_WAITING = 256


def _stop_on_error(method: Callable[..., None]) -> Callable[..., None]:
    """Have a method of `TrainingSteps` stop the monitor, and not the training, if it raises."""

    @functools.wraps(method)
    def guarded(self: TrainingSteps, *args: Any, **options: Any) -> None:
        try:
            with self._lock:
                if not self.has_failed:
                    method(self, *args, **options)
        except HooklineWarning:
            raise  # the user has made warnings errors
        except Exception as error:
            self.stop()
            self.ranks.announce_leave(f"has stopped hl.monitor ({type_and_line(error)})")
            warn(
                f"hl.monitor stopped at step {self.number}: {type_and_line(error)}. The"
                " training goes on."
                "\nMake HooklineWarning an error to see where: python -W error::UserWarning."
            )

    return guarded


class _WaitingPass(NamedTuple):
    """A pass before it is known who tells the steps."""

    number: int  # the number of its step, if each pass is one
    is_due: bool  # whether this step is reported
    parts: tuple[StepSlots, StepSlots]  # its slots, and those that it keeps apart


@final
class TrainingSteps:
    """Collect the slots of each step, and report the steps whose turn it is.

    A step ends when every parameter was stepped that an optimizer holds, and the others have no
    gradient. The first step shows which optimizers there are, so it ends when every parameter of
    the model was stepped. A step that is still open ends when a parameter is stepped again, or when
    the model has run between the steps of two optimizers that have stepped after one run before.
    The passes since its last optimizer's step belong to the next step. Until an optimizer steps,
    the passes are kept apart, and in each the values that count only where passes are steps: the
    weights at its beginning, and what flows outside training. If none ever does, each pass is a
    step.

    Args:
        model: the model.
        parameters: measures parameters, and has the slots of all sites.
        scaling: divides gradients by the scale of the loss.
        every: every so many steps are reported.
        add: takes the report of a step.
        lock: the lock that is held while a pass of the line begins. A lock of its own would be
            taken in another order by a user's function that gets the reports and runs the model.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Parameters,
        scaling: LossScale,
        every: int,
        add: Callable[[StepReport], None],
        lock: threading.RLock,
    ) -> None:
        self.ranks: RankGatherer = RankGatherer(parameters.slots, model)
        self.number: int = 0
        self.every = every
        self.first = 0
        self.n_due: int = 0
        self.n_reported: int = 0
        self.n_ended: int = 0
        self.told_by: str = ""  # "optimizer" or "pass", once it is known
        self._knows_optimizers = False
        self._slots = parameters.slots
        self._measured = parameters
        self._scaling = scaling
        self._add = add
        self._has_stepped = False
        self._stepped: set[int] = set()  # the ids of the parameters stepped in this step
        self._backward = -1  # the number of the backward that runs, if optimizers step in it
        self._running = RunningSteps()
        self._optimizers = Optimizers(model)
        self._goes_on = False  # whether values of this step may be in the last one
        # The slots of this step up to its last optimizer's step.
        self._aside = StepSlots()
        self._waiting: list[_WaitingPass] = []  # those before any optimizer has stepped
        self._n_numbered = 0  # how many of them had begun when the user gave a number
        self._open: Pass | None = None  # the present pass, where passes may be steps
        self.is_over: bool = False
        self.has_failed: bool = False
        self._has_told = self._has_told_shared = False
        self._order = FiringOrder()
        self._logged = LoggedNumbers(add)
        self._last: int | None = None  # the number of the step that has ended before this one
        self._lock = lock

    @_stop_on_error
    def set_interval(self, every: int, first: int) -> None:
        """Report every so many steps from now on, counted from a first one."""
        self._end_finished_pass()
        self.every, self.first = every, first
        self.ranks.publish_settings(self._settings_text())
        self._update_is_on()

    @_stop_on_error
    def begin_step(self, number: int) -> None:
        """Begin a step that a trainer numbers. An optimizer will step at its end."""
        if self.told_by != "optimizer":
            self._count_steps_by_optimizer()
        is_skipped = number != self.number and not self._has_stepped
        self._renumber(number)
        if is_skipped:
            self._slots.pop_slots()  # of a step without an optimizer's, as a `GradScaler` wants it

    @_stop_on_error
    def end_step(self) -> None:
        """End the step if an optimizer has stepped: a trainer knows that no other follows."""
        if self._has_stepped:
            self._end_open_step()

    @_stop_on_error
    def set_number(self, number: int) -> None:
        """Number the step that runs now. A step whose optimizer has stepped ends before.

        So does a pass that is over, where passes may be steps.
        """
        self._end_finished_pass()
        self._renumber(number)

    def set_in_training(self, is_in_training: bool) -> None:
        """Note whether what runs from now on trains the model, also under `no_grad`."""
        self._slots.in_training = is_in_training

    def _renumber(self, number: int) -> None:
        if number == self._current_number():
            return
        if self._has_stepped:
            self._end_open_step()
        self.number, self._last = number, None
        self._n_numbered = len(self._waiting)
        self._update_is_on()
        if self.told_by == "optimizer" and not self._slots.is_on:
            self._slots.pop_slots()  # of the step that had another number

    def log(self, numbers: dict[str, float | Tensor], step: int | None) -> None:
        """Keep numbers that the user logs.

        Args:
            numbers: the numbers by name.
            step: the step; None is the present step, or the last one until the model runs again.

        Raises:
            InputError: a module has the name that logged numbers go under.
        """
        if self._slots.has_module_at(LOGGED):
            raise InputError(
                f"seen.log must write under the name {LOGGED!r}, got a model with a module of this"
                " name.\nRename the module, or select others: hl.monitor(model, selector)."
            )
        self._log_to_step(numbers, step)

    @_stop_on_error
    def _log_to_step(self, numbers: dict[str, float | Tensor], step: int | None) -> None:
        if step is not None:
            self._logged.log(numbers, step, is_given=True)
        elif self.told_by == "optimizer" and self._last is not None and not self._has_step_begun():
            self._logged.log(numbers, self._last, is_given=False)
        else:
            self._logged.log(numbers, self._current_number(), is_given=False)

    def _has_step_begun(self) -> bool:
        return self._slots.has_run or self._has_stepped

    def stop(self) -> None:
        """Measure nothing more, after a failure."""
        self.has_failed = True
        self._slots.is_on = False

    def _update_is_on(self) -> None:
        """Look whether the present values may be reported, and tell the hooks.

        They belong to the present step. Until it is known who tells the steps, the present pass may
        be a step of its own. After an optimizer's step, the next step may have begun.
        """
        number = self._current_number() + int(self._has_stepped)
        self._slots.is_on = self._is_due(self.number) or self._is_due(number)
        self._measured.keeps_copies = self.every == 1

    def _current_number(self) -> int:
        """Return the number of the present step; where passes may be steps, of the present pass."""
        return self.number + len(self._waiting) - self._n_numbered

    def _settings_text(self) -> str:
        """Say which steps are reported."""
        return f"every={self.every} from step {self.first % self.every}"

    def _is_due(self, number: int) -> bool:
        """Tell whether a step is reported."""
        return (number - self.first) % self.every == 0

    # -- called by hooks ---------------------------------------------------------------------------

    @_stop_on_error
    def begin_pass(self, current: Pass) -> None:
        """Begin a pass of the root, or a pass of modules that run outside the root."""
        if self.told_by == "optimizer":
            return
        if self._open is not None:
            self._end_pass()
        self._open = current
        if self._slots.is_on:
            self._measured.measure_weights_into_pass_slots()

    def mark_root_pass(self, current: Pass, frame: FrameType) -> None:
        """Note whether the root runs with gradients: then all values of the pass are training's."""
        if self._backward >= 0 and outer_backward_number() < 0:  # it has raised
            self.end_backward(self.n_ended)
        if torch.is_grad_enabled():
            self._slots.has_run = True
            self._slots.of_training.add(current)

    def _end_finished_pass(self) -> None:
        """End the present pass if the model has returned, where passes may be steps."""
        if self._open is not None and self._open.failed is not None:
            self._end_pass()

    def _end_pass(self) -> None:
        self._open = None
        if self.told_by == "pass":
            self._end_step()
            return
        number = self._current_number()
        parts = self._slots.pop_slots(), self._slots.pop_pass_slots()
        self._waiting.append(_WaitingPass(number, self._is_due(number), parts))
        if len(self._waiting) >= _MOST_WAITING:
            self._count_steps_by_passes()
        else:
            self._update_is_on()

    def trains(self, optimizer: Any) -> bool:
        """Tell whether an optimizer trains the model."""
        with self._lock:
            return bool(self._optimizers.ids_held_by(optimizer))

    @_stop_on_error
    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure weights and gradients: the hook before an optimizer's step."""
        held, is_skipped = self._optimizers.ids_held_by(optimizer), is_skipped_by_scaler(optimizer)
        if not self._running.begins_counted_step(
            frame_outside_hookline(), held, is_skipped=is_skipped
        ):
            return
        if self._slots.has_run:
            self._optimizers.mark_run()
        if self.told_by != "optimizer":
            self._count_steps_by_optimizer()
        elif not self._stepped.isdisjoint(held) or self._begins_step(optimizer):
            self._end_open_step()
        last = self._optimizers.pair_with_last(optimizer)
        if last is not None:
            self._goes_on = self._goes_on or not self._has_stepped
            self._warn_of_shared_parameter(last, optimizer)
        if self._slots.is_on:
            self._scaling.find_running_scaler(self.number)
            self._measured.measure_before_step(
                optimizer, has_grads=closure_of(args, kwargs) is None
            )

    @_stop_on_error
    def after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Measure updates, and end the step: the hook after an optimizer's step."""
        if not self._running.ends_counted_step(frame_outside_hookline()):
            return
        if self._slots.is_on:
            self._measured.measure_after_step(
                optimizer, has_grads=closure_of(args, kwargs) is not None
            )
            self._slots.merge_step(self._aside)
            self._aside = StepSlots()
        self._stepped |= self._optimizers.ids_held_by(optimizer)
        self._has_stepped = True
        self._optimizers.mark_step(optimizer)
        self._slots.has_run = False
        backward = outer_backward_number()
        if backward < 0:
            self._end_or_postpone_step()
        elif backward != self._backward:  # a hook on a gradient steps the optimizer
            self._backward = backward
            at_end_of_backward(functools.partial(self.end_backward, self.n_ended))

    @_stop_on_error
    def end_backward(self, n_steps_ended: int) -> None:
        """Note the end of a backward in which optimizers have stepped: all of it is their step's.

        Args:
            n_steps_ended: the number of the steps that had ended then.
        """
        self._backward = -1
        if self._has_stepped and self.n_ended == n_steps_ended:
            self._end_or_postpone_step()

    def _end_or_postpone_step(self) -> None:
        """End the step, or put its values aside until another optimizer steps."""
        if self._is_step_complete():
            self._end_step()
            return
        if self._slots.is_on:
            self._aside = self._slots.pop_slots()
        self._update_is_on()

    def _begins_step(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer steps after a later run than those of the open step did."""
        partners = self._optimizers.partners_stepped_before_run(optimizer)
        held = map(self._optimizers.ids_held_by, partners)
        return any(not self._stepped.isdisjoint(ids) for ids in held)

    def _is_step_complete(self) -> bool:
        """Tell whether every parameter was stepped that will be stepped in this step."""
        if not self._knows_optimizers:
            return self._optimizers.weight_ids() <= self._stepped
        if not self._optimizers.all_held_ids() <= self._stepped:
            return False
        # An optimizer that has not stepped yet may hold the parameters that have gradients.
        return all(weight.grad is None for weight in self._optimizers.unheld_weights())

    # -- who tells ---------------------------------------------------------------------------------

    def _count_steps_by_optimizer(self) -> None:
        """Count steps of optimizers from now on. What is kept apart was no training."""
        self._goes_on = self.told_by == "pass"  # the passes before were steps of their own
        self.told_by, self._open = "optimizer", None
        self._slots.leaves_out = True
        self._slots.pop_pass_slots()
        self._logged.renumber(self.number)
        waiting = self._pop_waiting_passes()
        if self._is_due(self.number):
            self._merge_parts(parts[0] for _, _, parts in waiting)
        else:
            self._slots.pop_slots()
        self._update_is_on()

    def _pop_waiting_passes(self) -> list[_WaitingPass]:
        """Return the passes that wait, which wait no more."""
        waiting, self._waiting, self._n_numbered = self._waiting, [], 0
        return waiting

    def _count_steps_by_passes(self, *, is_last: bool = False) -> None:
        """Report each pass that waits as a step, and count passes from now on."""
        self.told_by = "pass"
        present = self._current_number()
        last = self._slots.pop_slots(), self._slots.pop_pass_slots()
        for waiting in self._pop_waiting_passes():
            self.number = waiting.number
            if waiting.is_due:
                self._merge_parts(waiting.parts)
            self._end_step(is_due=waiting.is_due, is_last=is_last)
        self.number = present
        self._update_is_on()
        if self._slots.is_on:
            self._merge_parts(last)

    def _merge_parts(self, parts: Iterable[StepSlots]) -> None:
        for slots in parts:
            self._slots.merge_step(slots)

    # -- the end of a step -------------------------------------------------------------------------

    def _end_open_step(self, *, is_last: bool = False) -> None:
        """End the step at its last optimizer's step. The passes since then are of the next step."""
        since = self._slots.pop_slots() if self._slots.is_on else StepSlots()
        self._slots.merge_step(self._aside)
        self._aside = StepSlots()
        self._end_step(since, is_last=is_last)

    def _end_step(
        self, since: StepSlots | None = None, *, is_due: bool | None = None, is_last: bool = False
    ) -> None:
        """End the step, then report it: a step whose end is interrupted does not end again.

        Args:
            since: the values since then, which belong to the next step.
            is_due: whether the step is reported; None goes by its number.
            is_last: True at the end of the line.
        """
        number, goes_on = self.number, self._goes_on
        is_due = self._is_due(number) if is_due is None else is_due
        self._knows_optimizers = self._has_stepped
        self._has_stepped = self._goes_on = False
        self._stepped.clear()
        if is_due and self.told_by == "optimizer":
            self._measured.measure_weights(self._optimizers.unheld_weights())
        elif is_due:
            self._slots.include_pass_slots()
        step_slots = self._slots.pop_slots() if is_due or self._slots.is_on else StepSlots()
        self.number, self._last = number + 1, number
        self.n_ended += 1
        self._update_is_on()
        if since is not None and self._slots.is_on:
            self._slots.merge_step(since)
        if not is_due:
            self._logged.report_without_waiting()
            return
        self._report(number, step_slots, is_last=is_last)
        self._slots.warn_of_complaints()
        if not goes_on:
            self._warn_of_no_values(number, step_slots.slots)

    def _report(self, number: int, step_slots: StepSlots, *, is_last: bool) -> None:
        self.n_due += 1
        sites, version = self._slots.sites_and_version()
        at = ReportedStep(number, self._settings_text(), is_last)
        layout, slots = self.ranks.gather(sites, step_slots.slots, version, at)
        if not layout.entries:
            self._logged.report_other_steps(None)
            return
        self.n_reported += 1
        order = self._order.firing_positions(layout, step_slots.turns)
        logged = self._logged.report_others_and_pop(number)
        self._add(StepReport(number, time.time(), layout, slots, order, logged))

    def _warn_of_shared_parameter(self, last: Optimizer, optimizer: Optimizer) -> None:
        """Warn, once, if an optimizer steps what another has just stepped: who ends the step?"""
        held, others = map(self._optimizers.ids_held_by, (last, optimizer))
        if self._has_told_shared or held.isdisjoint(others):
            return
        self._has_told_shared = True
        names = " and ".join(type(member).__name__ for member in (last, optimizer))
        warn(
            f"hl.monitor: a parameter must have one optimizer, got {names}, which step the same"
            f" parameter directly after each other at step {self.number}. Each of the two makes a"
            " step of its own."
            "\nGive each parameter to one optimizer."
        )

    def _warn_of_no_values(self, number: int, slots: dict[str, list[Tensor]]) -> None:
        """Warn, once, if an optimizer trains the model and no selected module has a value."""
        if self._has_told or self.told_by != "optimizer" or self._slots.has_module_values_in(slots):
            return
        self._has_told = True
        warn(
            "hl.monitor: no value came from a module with gradients enabled at step"
            f" {number}, though an optimizer of the model stepped. Another model may run in"
            " its place, or this one in another thread."
            "\nMonitor the model that runs; for another thread, give every_thread=True."
        )

    @_stop_on_error
    def finish(self, error: BaseException | None) -> None:
        """Report what is left, when the line has ended. Idempotent.

        Args:
            error: what the block has raised, so that other ranks may not come; None if nothing.
        """
        if self.is_over:
            return
        self.is_over = True
        try:
            self._report_rest(error is not None)
        finally:
            how, why = ("ended", "") if error is None else ("left", f" ({type_and_line(error)})")
            self.ranks.announce_leave(f"has {how} hl.monitor at step {self.number}{why}")
            self._slots.is_on = False
            self._logged.report_other_steps(None)
        self._slots.warn_of_complaints()

    def _report_rest(self, has_failed: bool) -> None:
        may_be_alone = has_failed and self.ranks.is_grouped
        if self.told_by == "optimizer":
            if self._has_stepped and not may_be_alone:
                self._end_open_step(is_last=True)
        elif not may_be_alone:
            if not self.told_by:
                self._count_steps_by_passes(is_last=True)
            self._slots.include_pass_slots()
            if (self._open is not None and not has_failed) or self._slots.has_module_values():
                self._end_step(is_last=True)
