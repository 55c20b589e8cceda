"""Monitor a training of Lightning: `Trainer(callbacks=[Monitor()])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from hookline.integrations.callback import MonitorCallback


class Monitor(MonitorCallback, Callback):  # type: ignore[misc]
    """Monitor the fit of a Lightning module, as `hl.monitor` does.

        from hookline.integrations.lightning import Monitor
        trainer = Trainer(callbacks=[seen := Monitor("layers.*", ports="output")])
        trainer.fit(module)
        seen.curves["layers.0"].std

    Steps are reported when Lightning logs: every `log_every_n_steps`, under the number that
    Lightning logs. Without `to=`, they go to the trainer's loggers.

    A step that a `GradScaler` skips is not reported. With manual optimization, a step ends with the
    batch in which an optimizer has stepped.

    The loss that `training_step` returns is kept for each reported step: `seen.curves.logged`.

    Args:
        selector: which modules and parameters, as in `hl.monitor`.
        every: every so many steps are reported; None is the trainer's `log_every_n_steps`.
        to: where the numbers go; None is the trainer's loggers.
        **options: the other arguments of `hl.monitor`.

    Attributes:
        line: the line of the running fit, or of the last one; None before.
    """

    begins_with = "trainer.fit"
    _is_numbered = False  # whether the first step has the number of a fit that is resumed
    _number = 0  # of the step that runs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the monitor."""
        every = getattr(trainer, "log_every_n_steps", 1) or 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        to = list(trainer.loggers)
        line = self._attach(pl_module, to, trainer, every=every, scaler=scaler)
        if line is not None:
            line.first = line.every - 1
            self._is_numbered = False
            line.__enter__()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the monitor the number of the step."""
        line = self.line
        if line is None:
            return
        number = trainer.fit_loop.epoch_loop._batches_that_stepped  # the number that is logged
        if pl_module.automatic_optimization and trainer.optimizers:
            line.begin_step(number)
        elif self._is_numbered:
            line.end_step()
        else:
            line.step = number
        self._is_numbered = True
        self._number = number
        line.set_in_training(True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss, and tell the monitor that validation may follow."""
        line = self.line
        if line is None:
            return
        line.set_in_training(False)
        if (self._number - line.first) % line.every == 0:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if pl_module.automatic_optimization and isinstance(loss, Tensor):
                loss = loss * trainer.accumulate_grad_batches  # Lightning has divided it
            self._log({"loss": loss}, self._number)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the monitor."""
        self._detach()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the monitor after a fit that raised."""
        self._detach(exception)
