"""Statistics of values that add up: over chunks, batches, shards and processes."""

from hookline.statistics.moments import Moments as Moments
from hookline.statistics.moments import merged as merged

__all__ = ["Moments", "merged"]
