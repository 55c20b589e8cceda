"""Find the units that were 0 in all rows of the last steps, where a covariance is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hookline.curves.downsampled_table import RECENT
from hookline.curves.step_reports import StepReport
from hookline.statistics.covariance import Covariance, CovarianceStatistic


def dead_units(reports: Sequence[StepReport]) -> Iterator[tuple[str, list[int]]]:
    """Iterate over the sites with dead units in all of the last steps, with their indices.

    Args:
        reports: the reports of measured steps; fewer than `RECENT` name nothing.
    """
    recent = reports[-RECENT:]
    if len(recent) < RECENT:
        return
    masks: dict[str, list[NDArray[np.bool_]]] = {site: [] for site in recent[-1].layout.by_site}
    for report in recent:
        for site, covariance in dict(
            report.finite_results_of(CovarianceStatistic, Covariance)
        ).items():
            is_zero = (covariance.mean == 0) & (covariance.matrix.diagonal() == 0)
            masks.setdefault(site, []).append(np.asarray(is_zero.numpy()))
    for site, of_site in masks.items():
        if len(of_site) == RECENT and len({mask.shape for mask in of_site}) == 1:
            units = np.flatnonzero(np.all(of_site, axis=0)).tolist()
            if units:
                yield site, units
