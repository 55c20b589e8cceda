"""Figures of a recording. matplotlib is imported when the first one is made, and never pyplot.

hl.plots.channels(run, "layer1.0.conv1").savefig("channels.png")
"""

from hookline.views.plots.channels import channels as channels
from hookline.views.plots.compare import compare as compare
from hookline.views.plots.gradients import gradients as gradients
from hookline.views.plots.histograms import histograms as histograms
from hookline.views.plots.images import images as images
from hookline.views.plots.statistics import statistics as statistics
from hookline.views.plots.tokens import tokens as tokens

__all__ = ["channels", "compare", "gradients", "histograms", "images", "statistics", "tokens"]


def __dir__() -> list[str]:
    """What an editor completes: the figures, and none of the files that draw them."""
    return [*__all__]
