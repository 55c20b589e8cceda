"""Find the units that were 0 in all rows of the last steps, where a covariance is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hookline.curves.step_reports import StepReport
from hookline.curves.table import RECENT
from hookline.statistics.covariance import Covariance, CovarianceStatistic


def dead_units(reports: Sequence[StepReport]) -> Iterator[tuple[str, list[int]]]:
    """Iterate over the sites with dead units in all of the last steps, with their indices.

    Args:
        reports: the reports of measured steps; fewer than `RECENT` name nothing.
    """
    recent = reports[-RECENT:]
    if len(recent) < RECENT:
        return
    for site in recent[-1].layout.by_site:
        masks = [mask for report in recent if (mask := _is_dead(report, site)) is not None]
        if len(masks) == RECENT and len({mask.shape for mask in masks}) == 1:
            units = np.flatnonzero(np.all(masks, axis=0)).tolist()
            if units:
                yield site, units


def _is_dead(report: StepReport, site: str) -> NDArray[np.bool_] | None:
    """Tell which units of a site were 0 in all rows of a step; None where that is not measured."""
    layout = report.layout
    if not any(
        isinstance(layout.statistics[entry.statistic], CovarianceStatistic)
        for entry, _ in layout.by_site.get(site, ())
    ):
        return None
    for result in layout.results(site, report.slots, None, is_lenient=True):
        if isinstance(result, Covariance) and result.count > result.non_finite:
            is_zero = (result.mean == 0) & (result.matrix.diagonal() == 0)
            return np.asarray(is_zero.numpy())
    return None
