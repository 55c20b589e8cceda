"""Monitor a training loop of Accelerate: `with monitor(accelerator, model) as seen:`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn

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
        to = [_destination(tracker) for tracker in accelerator.trackers]
    options = {"scaler": accelerator.scaler, **options}
    return monitor_model(model, selector, to=to, **options)


def _destination(tracker: Any) -> Any:
    """Return the logger of a tracker where hookline writes to it itself, else the tracker's `log`.

    hookline writes faster, and in names that MLflow takes.
    """
    if tracker.name in ("tensorboard", "wandb", "mlflow"):
        return tracker.tracker

    def log(step: int, numbers: dict[str, float]) -> None:
        tracker.log(numbers, step=step)

    return log
