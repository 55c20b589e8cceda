"""Statistics of values that add up: over chunks, batches, shards and processes."""

from hookline.statistics.moments import Moments as Moments
from hookline.statistics.moments import merged as merged
from hookline.statistics.statistic import Statistic as Statistic

__all__ = ["Moments", "Statistic", "merged"]
