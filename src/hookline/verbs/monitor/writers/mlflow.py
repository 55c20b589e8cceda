"""Write reports to MLflow: one batch for a step."""

from __future__ import annotations

import re
from typing import Any, final

from hookline.curves import StepReport

_MOST_METRICS = 1000  # MLflow's limit for a batch
_LEAF = re.compile(r"\[['\"]?([^\]'\"]*)['\"]?\]")
_REFUSED = re.compile(r"[^\w.\- :/]")


@final
class MlflowWriter:
    """Write the numbers of a step by `log_batch`.

    MLflow refuses brackets in names, so `h.0:output[0]/std` becomes `h.0:output.0/std`.

    Args:
        run_id: the run; None is the active run, which MLflow starts if there is none.
    """

    name = "MLflow"

    def __init__(self, run_id: str | None) -> None:
        self._run_id = run_id
        self._client: Any = None
        # The report whose writing raised, and the number of its metrics that MLflow has.
        self._partly: tuple[StepReport | None, int] = None, 0

    @staticmethod
    def of_run(run: Any) -> MlflowWriter:
        """Return the writer for a run."""
        return MlflowWriter(run.info.run_id)

    def start(self, first: StepReport) -> None:
        """Find the run."""
        import mlflow

        if self._run_id is None:
            run = mlflow.active_run() or mlflow.start_run()
            self._run_id = run.info.run_id
        self._client = mlflow.MlflowClient()

    def write(self, report: StepReport) -> None:
        """Write the metrics in batches. A report that raised goes on with the batch that failed."""
        from mlflow.entities import Metric

        stamp, numbers = int(report.seconds * 1000), report.numbers().items()
        metrics = [Metric(metric_name(name), n, stamp, report.step) for name, n in numbers]
        begun, n_sent = self._partly
        for start in range(n_sent if begun is report else 0, len(metrics), _MOST_METRICS):
            self._partly = report, start
            self._client.log_batch(self._run_id, metrics[start : start + _MOST_METRICS])
        self._partly = None, 0

    def close(self) -> None:
        """Do nothing: the run is the user's."""


def metric_name(name: str) -> str:
    """Write a name in the characters that MLflow takes.

    >>> metric_name("h.0:output[0]/std"), metric_name("(root)/mean")
    ('h.0:output.0/std', 'root/mean')
    """
    return _REFUSED.sub("", _LEAF.sub(r".\1", name))
