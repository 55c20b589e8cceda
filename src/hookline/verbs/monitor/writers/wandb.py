"""Write reports to Weights & Biases: one row for a step."""

from __future__ import annotations

from typing import Any, final

from hookline.curves import StepReport
from hookline.errors import AttachError
from hookline.statistics.histogram import Histogram

_PREFIX = "hookline/"
_STEP = "hookline/step"


@final
class WandbWriter:
    """Write the numbers and histograms of a step to the row of W&B that is open.

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
        self._step = -1  # of the report in the row

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
        if self._run.step == self._row and report.step != self._step:
            self._run.log({}, commit=True)
        row = {f"{_PREFIX}{name}": number for name, number in report.numbers().items()}
        for site, histogram in report.histograms():
            row[f"{_PREFIX}{site}/histogram"] = _as_histogram(histogram)
        self._run.log({_STEP: report.step, **row}, commit=False)
        self._row, self._step = self._run.step, report.step

    def close(self) -> None:
        """Complete the last row."""
        if self._run.step == self._row:
            self._run.log({}, commit=True)


def _as_histogram(histogram: Histogram) -> Any:
    import wandb

    counts, edges = histogram.finite_bins()
    per_bin = -(-len(counts) // wandb.Histogram.MAX_LENGTH)  # bins to a bin of W&B
    sums = [sum(counts[start : start + per_bin]) for start in range(0, len(counts), per_bin)]
    return wandb.Histogram(np_histogram=(sums, [*edges[:-1:per_bin], edges[-1]]))
