"""Statistics of values that add up: over chunks, batches, shards and processes."""

from hookline.statistics.moments import Moments as Moments
from hookline.statistics.moments import merged as merged
from hookline.statistics.moments_statistic import measure as measure
from hookline.statistics.statistic import Statistic as Statistic
