"""Monitor a training of Lightning: `Trainer(callbacks=[Monitor()])`."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from hookline.integrations.callback import MonitorCallback
from hookline.verbs.monitor.monitor import monitor


class Monitor(MonitorCallback, Callback):  # type: ignore[misc]
    """Monitor the fit of a Lightning module, as `hl.monitor` does.

        from hookline.integrations.lightning import Monitor
        trainer = Trainer(callbacks=[seen := Monitor("layers.*", ports="output")])
        trainer.fit(module)
        seen.curves["layers.0"].std

    Steps are reported when Lightning logs: every `log_every_n_steps`, under the number that
    Lightning logs. Without `to=`, they go to the trainer's loggers.

    Args:
        selector: which modules and parameters, as in `hl.monitor`.
        every: every so many steps are reported; None is the trainer's `log_every_n_steps`.
        to: where the numbers go; None is the trainer's loggers.
        **options: the other arguments of `hl.monitor`.

    Attributes:
        line: the line of the running fit, or of the last one; None before.
    """

    begins_with = "trainer.fit"

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the monitor."""
        every = self._every or getattr(trainer, "log_every_n_steps", 1) or 1
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self._options}
        to = list(trainer.loggers) if self._to is None else self._to
        self.line = line = monitor(pl_module, self._selector, every=every, to=to, **options)
        line.first = every - 1
        line.step = trainer.global_step
        line.__enter__()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the monitor."""
        if self.line is not None:
            self.line.__exit__(None, None, None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Remove the monitor after a fit that raised."""
        if self.line is not None:
            self.line.__exit__(type(exception), exception, exception.__traceback__)
