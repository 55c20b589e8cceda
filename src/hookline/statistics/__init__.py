"""Statistics of values that add up: over chunks, batches, shards and processes."""

from hookline.statistics.moments import Moments as Moments
from hookline.statistics.moments import measure_moments as measure_moments
from hookline.statistics.moments import merge_moments_by_key as merge_moments_by_key
from hookline.statistics.statistic import Statistic as Statistic
