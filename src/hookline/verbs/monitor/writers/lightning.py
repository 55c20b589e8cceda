"""Write reports to any logger of Lightning."""

from __future__ import annotations

from typing import Any, final

from hookline.curves import StepReport
from hookline.verbs.monitor.writers.protocol import ReportWriter
from hookline.verbs.monitor.writers.tensorboard import TensorBoardWriter


def make_lightning_writer(to: Any) -> ReportWriter:
    """Return the writer for a logger. TensorBoard's gets one summary a step."""
    if "TensorBoardLogger" in {kind.__name__ for kind in type(to).__mro__}:
        # Lightning closes it at the end of each fit, and opens it again when it logs.
        return TensorBoardWriter(to.experiment, reopens=True)
    return LightningWriter(to)


@final
class LightningWriter:
    """Write the numbers of a step by one `log_metrics`.

    Args:
        logger: the user's logger, which stays open.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.name: str = type(logger).__name__

    def start(self, first: StepReport) -> None:
        """Do nothing."""

    def write(self, report: StepReport) -> None:
        """Log the numbers."""
        self._logger.log_metrics(report.numbers(), step=report.step)

    def close(self) -> None:
        """Have the logger write what it holds."""
        self._logger.save()
