"""Figures of a recording. matplotlib is imported for the first figure; pyplot is never imported.

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
    """List the public figures for completion, without the modules that draw them."""
    return [*__all__]
