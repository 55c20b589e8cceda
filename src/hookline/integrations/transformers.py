"""Monitor a training of transformers: `Trainer(..., callbacks=[Monitor()])`."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hookline.errors import warn
from hookline.integrations.callback import MonitorCallback

_KEPT = ("loss", "learning_rate", "grad_norm")


class Monitor(MonitorCallback, TrainerCallback):  # type: ignore[misc]
    """Monitor the training of a `Trainer`, as `hl.monitor` does.

        from hookline.integrations.transformers import Monitor
        trainer = Trainer(model, arguments, callbacks=[seen := Monitor("model.layers.*")])
        trainer.train()
        seen.curves["model.layers.0"].std

    Steps are reported every `logging_steps`, counted from 1, whatever else the `Trainer` logs. With
    another `logging_strategy` than "steps", a warning says so. A step that a `GradScaler` skips is
    not reported. Without `to=`, steps go to the runs of W&B and MLflow that `report_to` names.

    The losses, the learning rate and the norm of the gradient that the `Trainer` logs are kept,
    too: `seen.curves.logged`.

    Args:
        selector: which modules and parameters, as in `hl.monitor`.
        every: every so many steps are reported; None is `logging_steps`.
        to: where the numbers go.
        **options: the other arguments of `hl.monitor`.

    Attributes:
        line: the line of the running training, or of the last one; None before. A training that
            raises leaves it on: end it with `line.remove()`.
    """

    begins_with = "trainer.train()"

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **unused: Any,
    ) -> None:
        """Attach the monitor."""
        every = max(int(state.logging_steps or 1), 1)
        strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        if self._every is None and strategy != "steps":
            warn(
                "the Trainer must log by steps for Monitor to report at the same ones, which is now"
                f" every {every} steps (logging_steps), got logging_strategy={strategy!r}."
                "\nGive every=, as in Monitor(..., every=100)."
            )
        to, scaler = _running_loggers(args.report_to), getattr(optimizer, "scaler", None)
        line = self._attach(model, to, state, every=every, scaler=scaler)
        if line is not None:
            line.begin_step(state.global_step + 1)
            line.__enter__()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        """Tell the monitor the number of the step."""
        if self.line is not None:
            self.line.begin_step(state.global_step + 1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **unused: Any,
    ) -> None:
        """Keep the numbers that the `Trainer` logs."""
        numbers = {k: n for k, n in (logs or {}).items() if k in _KEPT or k.endswith("_loss")}
        self._log(numbers, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        """Remove the monitor."""
        self._detach()


def _running_loggers(report_to: list[str]) -> list[Any]:
    """Return the modules of W&B and MLflow if they are reported to and have a running run."""
    running = []
    wandb, mlflow = sys.modules.get("wandb"), sys.modules.get("mlflow")
    if "wandb" in report_to and wandb is not None and wandb.run is not None:
        running.append(wandb)
    if "mlflow" in report_to and mlflow is not None and mlflow.active_run() is not None:
        running.append(mlflow)
    return running
