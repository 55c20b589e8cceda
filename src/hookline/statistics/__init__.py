"""Statistics of values that add up: over chunks, batches, shards and processes."""

from hookline.statistics.moments import Moments as Moments

__all__ = ["Moments"]
