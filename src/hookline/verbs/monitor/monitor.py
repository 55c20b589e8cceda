"""Monitor a training: statistics of what flows and of the parameters, step by step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Never, final

import torch.distributed as dist
from torch import Tensor, nn

from hookline.curves import Curves
from hookline.engine import (
    Consequence,
    HookSpec,
    Order,
    Report,
    Selector,
    Site,
    do_nothing,
    has_process_group,
    hide_from_dir,
    ranks_by_fsdp1_parameter,
    require_model,
)
from hookline.errors import InputError, check_option_names, warn
from hookline.verbs.attach.everywhere import EverywhereHooks
from hookline.verbs.attach.raw_taps import EventTap
from hookline.verbs.monitor.loss_scale import LossScale
from hookline.verbs.monitor.options import (
    ChosenSites,
    checked_every,
    checked_statistics,
    checked_step_number,
    choose_sites,
)
from hookline.verbs.monitor.parameters import Parameters
from hookline.verbs.monitor.reporting import Reporting
from hookline.verbs.monitor.slots import Slots
from hookline.verbs.monitor.training_steps import TrainingSteps
from hookline.verbs.monitor.values import ValueSites
from hookline.verbs.shared.finalizing_line import FinalizingLine


@final
@hide_from_dir("begin_step", "end_step", "set_in_training")
class MonitorLine(FinalizingLine[EverywhereHooks]):
    """A line that monitors: `with` gives the curves, and `remove()` ends the line.

    Attributes:
        curves: the numbers so far.
    """

    def __init__(self, line: EverywhereHooks, steps: TrainingSteps, to: Reporting) -> None:
        super().__init__(line)
        self.curves: Curves = Curves(to.reports, log=_log_function(steps))
        self._steps = steps
        self._to = to

    def __enter__(self) -> Curves:
        self._line.__enter__()
        return self.curves

    @property
    def every(self) -> int:
        """Every so many steps are reported. Setting it recompiles nothing."""
        return self._steps.every

    @every.setter
    def every(self, every: int) -> None:
        self._steps.set_interval(checked_every(every), self.first)

    @property
    def first(self) -> int:
        """A step that is reported, and from which every so many are counted; 0 at first."""
        return self._steps.first

    @first.setter
    def first(self, number: int) -> None:
        first = checked_step_number("line.first", number, "line.first = 99")
        self._steps.set_interval(self.every, first)

    @property
    def step(self) -> int:
        """The number of the step that runs. Set it after a resume: `line.step = 1000`.

        Without an optimizer, each pass is a step. That none will step is known at the end of the
        block, so the number may stay the first one until then.
        """
        return self._steps.number

    @step.setter
    def step(self, number: int) -> None:
        self._steps.set_number(checked_step_number("line.step", number, "line.step = 1000"))

    def begin_step(self, number: int) -> None:
        """Begin a step that a trainer numbers, and at whose end an optimizer steps."""
        self._steps.begin_step(number)

    def end_step(self) -> None:
        """End the step if an optimizer has stepped: a trainer knows that no other follows."""
        self._steps.end_step()

    def set_in_training(self, is_in_training: bool) -> None:
        """Note whether what runs from now on trains the model, also under `no_grad`."""
        self._steps.set_in_training(is_in_training)

    def report(self) -> Report:
        """Report the sites that were attached, how often each fired, and why some never did."""
        return self._line.report()

    def _after_removal(self, error: BaseException | None) -> None:
        steps = self._steps
        if not steps.is_over:
            try:
                steps.finish(error)
            finally:
                self._to.close()
            if error is None:
                self._warn_at_end()

    def _warn_at_end(self) -> None:
        report, steps = self._line.report(), self._steps
        if not steps.n_reported:
            elsewhere = report.warning() if report.other_contexts and not report.passes else None
            warn(elsewhere or f"hl.monitor reported no step: {_why_no_report(report, steps)}")
        elif steps.told_by == "pass" and report.outside_root == report.passes:
            n_calls = max(report.counts, default=0)
            if n_calls > 1:
                warn(_MERGED.format(model=report.model_type, n=n_calls))


_MERGED = (
    "hl.monitor: {n} calls of modules were merged into one step, because {model} itself never ran"
    " and no optimizer of its parameters stepped.\nMonitor the module that you call, or step its"
    " optimizer inside the block."
)


def _why_no_report(report: Report, steps: TrainingSteps) -> str:
    if steps.n_due and any(report.counts):
        return (
            "no selected value could be measured.\nThe warnings before this one say why each was"
            " left out; a model on the meta device has no numbers."
        )
    why = "no value came at the selected sites"
    if steps.n_due:
        why = "parameters are measured when an optimizer of the model steps, and none did"
    elif steps.n_ended:
        why = f"of {steps.n_ended} steps none was one of every {steps.every}"
    elif not report.passes:
        why = f"{report.model_type} never ran, and no optimizer of its parameters stepped"
    return f"{why}.\nRun the model and step its optimizer inside the block."


def _log_function(steps: TrainingSteps) -> Callable[[dict[str, float | Tensor], int | None], None]:
    """Return the function that logs numbers; curves that are kept do not keep the steps."""
    reference = weakref.ref(steps)

    def log(numbers: dict[str, float | Tensor], step: int | None) -> None:
        live = reference()
        if live is None or live.is_over:
            raise InputError(
                "seen.log must be called while hl.monitor runs, got a monitor that has ended."
                "\nCall it inside the block: with hl.monitor(model) as seen."
            )
        example = "seen.log(loss=loss, step=12)"
        number = None if step is None else checked_step_number("step=", step, example)
        live.log(numbers, number)

    return log


@final
class _StepTap(EventTap):
    """Call a function at the steps of the optimizers that train the model."""

    __slots__ = ()

    def why_silent(self) -> str:
        """Say that steps were told otherwise."""
        return "no optimizer of the model made a step while the line lasted"

    @property
    def may_stay_silent(self) -> bool:
        """Tell that a model may run without an optimizer."""
        return True


def monitor(
    model: nn.Module,
    selector: Selector = None,
    *,
    ports: str | Sequence[str] | None = None,
    every: int = 1,
    stats: Any = None,
    to: Any = None,
    scaler: Any = None,
    every_thread: bool = False,
    **others: Never,
) -> MonitorLine:
    """Monitor statistics of activations, gradients, weights and updates, step by step.

        >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with hl.monitor(model, every=2) as seen:
        ...     for _ in range(4):
        ...         model(torch.ones(4, 2)).sum().backward()
        ...         optimizer.step()
        >>> seen.steps.tolist()
        [0, 2]
        >>> seen["1"].std.shape, seen["0.weight:update"].ratio.shape
        ((2,), (2,))

    A step ends with the step of the model's optimizer. All passes before it, as in gradient
    accumulation, add up to one step. Passes without gradients, as in validation, are left out. If
    no optimizer ever steps, each pass of the model is a step.

    With the default ports, a reported step of a large model takes about a tenth longer, of a small
    one a third. Steps between reports take next to no time. A training computes the same numbers
    with a monitor as without, bit for bit. The recomputation of checkpointed regions is not
    counted. In compiled code, statistics of outputs and inputs are computed in the graph.

    On several ranks, each report is one collective. `seen` shows the numbers of all ranks together,
    and `seen.rank(1)` those of one rank. Logs are written by rank 0. A rank with other arguments or
    steps is named in a warning; from then on, each rank shows its own numbers alone.

    If a statistic or a logger raises, a warning says so once, and the training goes on. At Ctrl-C
    while a step is written, files have this step once; a logger or a function is not called again.

    `seen.log(loss=loss)` keeps numbers of your own beside the measured ones; see `Curves.log`.

    Args:
        model: the model.
        selector: which modules and parameters, as in `hl.select`. None is all.
        ports: what is measured. Of modules "output", "grad_output", "input", "grad_input"; of
            parameters "value" (before the step; also of frozen ones), "grad" (as the optimizer gets
            it: accumulated, reduced, unscaled, clipped) and "update" (the change by the step, with
            its `ratio` to the weight). None is outputs, their gradients, and all three of
            parameters. Integers are not measured; a warning names those that you chose.
        every: the number of steps from one report to the next; the first report is of step 0.
        stats: one statistic or several, of `hl.stats` or of your own (an object with the methods
            `start`, `update`, `merge` and `result`). None is `hl.stats.moments()`.
        to: where the numbers go beside memory. A folder, which `hl.open` reads; a file that ends in
            `.jsonl` or `.parquet`; a `SummaryWriter`, a W&B run, `mlflow` or a run of it, a
            Lightning logger; a function of `(step, numbers)`; an object with the methods `start`,
            `write` and `close`; or a list of these.
        scaler: the `GradScaler` of the training. Gradients at modules are divided by its scale.
            None finds the scaler at the first `scaler.step(...)`; gradients before it stay scaled.
        every_thread: True sees every thread and async task. False sees the calling thread or task,
            and code that runs in a copy of its context.
        **others: none are allowed. For a name of another package (`log_freq`), the error says
            what to write here.

    Returns:
        A line. `with ... as seen` gives its `Curves`. Three attributes of the line may be set
        during the training: `every`; `first`, the step from which `every` counts; and `step`, the
        number of the present step.

    Raises:
        SelectionError: the selector matches nothing, or a port is unknown.
        AttachError: `every`, `stats`, `to` or `scaler` is invalid, or the model cannot be hooked.
        FolderError: the folder is not empty, or cannot be written.
        TypeError: another argument is given.
    """
    check_option_names(monitor, others)
    require_model(model, "hl.monitor(model)")
    every, statistics = checked_every(every), checked_statistics(stats)
    line = EverywhereHooks(model, name="monitor", every_thread=every_thread, lenient=True)
    line.options.quiet = True
    line.originals.consequence = _CONSEQUENCE
    try:
        sites = choose_sites(line, selector, ports)
        is_of_all = selector is None and ports is None
        slots = Slots(statistics, len(sites.modules), is_of_all=is_of_all)
        return _attach_hooks(line, sites, slots, every, to, LossScale(scaler))
    except BaseException:
        line.remove()
        raise


_CONSEQUENCE = Consequence("the curves of {sites} end", "the curves of {sites} are of {now}")


def _attach_hooks(
    line: EverywhereHooks, sites: ChosenSites, slots: Slots, every: int, to: Any, scaling: LossScale
) -> MonitorLine:
    root = line.root
    assert root is not None
    parameters = Parameters(sites.parameters, slots, ranks_by_fsdp1_parameter(root))
    reporting = Reporting(to, writes=not has_process_group() or dist.get_rank() == 0, model=root)
    steps = TrainingSteps(root, parameters, scaling, every, reporting.add, line.passes.lock)
    line.passes.sink, line.passes.at_root = steps, steps.mark_root_pass
    values = ValueSites(slots, line.passes, scaling)
    line.attach_taps(sites.modules, values.bind, Order.RECORD)
    line.originals.add_sites(sites.parameters)
    name = type(root).__name__
    for kind, hook in (("step_pre", steps.before_step), ("step_post", steps.after_step)):
        site = Site("optimizers", kind, module_type=name)
        tap = _StepTap(site, line.passes, hook, do_nothing, HookSpec(kind))
        line.hook_everywhere(kind, steps.trains, tap)
    return MonitorLine(line, steps, reporting)
