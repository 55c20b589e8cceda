"""Write statistics down in a run's folder, and make them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never, final

from torch import Tensor

from hookline.errors import FolderError
from hookline.statistics import Statistic, stats
from hookline.statistics.covariance import CovarianceStatistic
from hookline.statistics.histogram import HistogramStatistic
from hookline.statistics.moments_statistic import MomentsStatistic
from hookline.statistics.quantiles import QuantilesStatistic

# The statistics of `hl.stats` by the name of their function; what is written must stay readable.
_KNOWN: dict[str, tuple[type, Callable[..., Any]]] = {
    "moments": (MomentsStatistic, stats.moments),
    "histogram": (HistogramStatistic, stats.histogram),
    "quantiles": (QuantilesStatistic, stats.quantiles),
    "covariance": (CovarianceStatistic, stats.covariance),
}


def spell_statistic(statistic: Any) -> dict[str, Any]:
    """Describe a statistic as JSON."""
    own = type(statistic)
    for name, (kind, _) in _KNOWN.items():
        if own is kind:
            return {"name": name, "options": statistic.options}
    return {"type": type(statistic).__name__}


def read_statistic(spelled: Any) -> Statistic[Any]:
    """Make a statistic from its description. One of a user's own class gives its slots alone."""
    known = _KNOWN.get(spelled.get("name"))
    if known is not None:
        made: Statistic[Any] = known[1](**spelled.get("options", {}))
        return made
    return Unknown(str(spelled.get("type", spelled.get("name"))))


@final
class Unknown:
    """Stand for a statistic whose class is not known here: the results are the bare slots."""

    def __init__(self, name: str) -> None:
        self._name = name

    def start(self, value: Tensor) -> Never:
        """Refuse: nothing can be measured by it."""
        raise self._refusal("measure")

    def update(self, slots: Tensor, value: Tensor) -> Never:
        """Refuse: nothing can be measured by it."""
        raise self._refusal("measure")

    def merge(self, slots: Tensor, other: Tensor) -> Never:
        """Refuse: only the class knows how slots add up."""
        raise self._refusal("merge the ranks")

    def result(self, slots: Tensor) -> Any:
        """Return the slots as they are."""
        return slots.numpy()

    def _refusal(self, what: str) -> FolderError:
        return FolderError(
            f"the statistic {self._name} must be known to {what}, and the run's folder holds its"
            " slots only.\nRead one rank's slots: curves.rank(0)[site].results."
        )
