"""Figures of a recording. matplotlib is imported for the first figure; pyplot is never imported.

hl.plots.channels(run, "layer1.0.conv1").savefig("channels.png")
"""

from hookline.views.plots.attention import attention
from hookline.views.plots.channels import channels
from hookline.views.plots.compare import compare
from hookline.views.plots.gradients import gradients
from hookline.views.plots.histograms import histograms
from hookline.views.plots.images import images
from hookline.views.plots.statistics import statistics
from hookline.views.plots.sweep import sweep
from hookline.views.plots.tokens import tokens

__all__ = [
    "attention",
    "channels",
    "compare",
    "gradients",
    "histograms",
    "images",
    "statistics",
    "sweep",
    "tokens",
]


def __dir__() -> list[str]:
    """List the public figures for completion, without the modules that draw them."""
    return [*__all__]
