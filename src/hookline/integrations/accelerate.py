"""Monitor a training loop of Accelerate: `with monitor(accelerator, model) as seen:`."""

from __future__ import annotations

import weakref
from typing import Any, final

from accelerate import Accelerator
from torch import nn

from hookline.curves import Curves, StepReport, is_single_number
from hookline.verbs.monitor.monitor import MonitorLine
from hookline.verbs.monitor.monitor import monitor as monitor_model


def monitor(
    accelerator: Accelerator,
    model: nn.Module,
    selector: Any = None,
    *,
    to: Any = None,
    **options: Any,
) -> MonitorLine:
    """Monitor a model that Accelerate has prepared, as `hl.monitor` does.

        from hookline.integrations.accelerate import monitor
        with monitor(accelerator, model, every=10) as seen:
            train()

    The numbers that `accelerator.log` is given inside the block are kept, too: `seen.logged`.

    Args:
        accelerator: the accelerator. Gradients are divided by the scale of its loss scaler.
        model: the model, prepared or not.
        selector: which modules and parameters, as in `hl.monitor`.
        to: where the numbers go; None is the trackers of the accelerator.
        **options: the other arguments of `hl.monitor`.

    Returns:
        The line, as from `hl.monitor`.
    """
    if to is None:
        to = [_logger_or_log_function(tracker) for tracker in accelerator.trackers]
    options = {"scaler": accelerator.scaler, **options}
    tracker_of_curves = _CurvesTracker(accelerator)
    line = monitor_model(model, selector, to=[to, tracker_of_curves], **options)
    tracker_of_curves.join_trackers(line.curves)
    return line


@final
class _CurvesTracker:
    """Give logged numbers to the curves, as a tracker that the monitor ends as a writer.

    Args:
        accelerator: the accelerator.
    """

    name = "hookline"
    tracker = None

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = weakref.ref(accelerator)
        self._curves: Curves | None = None

    def join_trackers(self, curves: Curves) -> None:
        """Begin to take what the accelerator's main process logs."""
        self._curves, accelerator = curves, self._accelerator()
        if accelerator is not None and accelerator.is_main_process:
            accelerator.trackers.append(self)

    # -- as a tracker

    def log(self, values: dict[str, Any], step: int | None = None, **unused: Any) -> None:
        """Keep numbers. The step of a tracker may count otherwise than the monitor."""
        single = {name: value for name, value in values.items() if is_single_number(value)}
        if self._curves is not None and single:
            self._curves.log(single)

    def finish(self) -> None:
        """Do nothing: the tracker ends with the monitor."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Do nothing."""

    # -- as a writer; a tracker is started without an argument

    def start(self, first: StepReport | None = None) -> None:
        """Do nothing."""

    def write(self, report: StepReport) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Take nothing more."""
        self._curves, accelerator = None, self._accelerator()
        if accelerator is not None and self in accelerator.trackers:
            accelerator.trackers.remove(self)


def _logger_or_log_function(tracker: Any) -> Any:
    """Return the logger of a tracker where hookline writes to it itself, else the tracker's `log`.

    hookline writes faster, and in names that MLflow takes.
    """
    if tracker.name in ("tensorboard", "wandb", "mlflow"):
        return tracker.tracker

    def log(step: int, numbers: dict[str, float]) -> None:
        tracker.log(numbers, step=step)

    return log
