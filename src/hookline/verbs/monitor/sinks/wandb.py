"""Write reports to Weights & Biases: one row for a step."""

from __future__ import annotations

from typing import Any, final

from hookline.curves import StepReport
from hookline.errors import AttachError

_PREFIX = "hookline/"
_STEP = "hookline/step"


@final
class WandbWriter:
    """Write the numbers of a step to the row of W&B that is open.

    W&B drops what is logged to an earlier row. So a report goes to the row that the user's next
    `log` completes. A row that already holds a report is completed first. Curves are drawn over
    `hookline/step`.

    Args:
        run: the user's run, which stays open.
    """

    name = "W&B"

    def __init__(self, run: Any) -> None:
        self._run = run
        self._row = -1

    @staticmethod
    def of_module(wandb: Any) -> WandbWriter:
        """Return the writer for the running run.

        Raises:
            AttachError: no run is running.
        """
        if wandb.run is None:
            raise AttachError(
                "to=wandb must have a running run, got none.\nCall run = wandb.init() first, and"
                " give to=run."
            )
        return WandbWriter(wandb.run)

    def start(self, first: StepReport) -> None:
        """Have W&B draw the numbers over the monitor's own steps."""
        self._run.define_metric(_STEP)
        self._run.define_metric(f"{_PREFIX}*", step_metric=_STEP)

    def write(self, report: StepReport) -> None:
        """Write a row."""
        if self._run.step == self._row:
            self._run.log({}, commit=True)
        numbers = {f"{_PREFIX}{name}": number for name, number in report.numbers().items()}
        self._run.log({_STEP: report.step, **numbers}, commit=False)
        self._row = self._run.step

    def close(self) -> None:
        """Complete the last row."""
        if self._run.step == self._row:
            self._run.log({}, commit=True)
