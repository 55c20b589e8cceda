"""What every figure refuses before it looks at a value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hookline as hl


@pytest.fixture
def model():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))


@pytest.fixture
def run(model):
    with hl.record(model, ports=("output", "grad_output")) as run:
        model(torch.rand(2, 3, 8, 8)).sum().backward()
    return run


FIGURES = {
    "channels": lambda source: hl.plots.channels(source, "0"),
    "histograms": hl.plots.histograms,
    "histograms of a site": lambda source: hl.plots.histograms(source, "0"),
    "statistics": hl.plots.statistics,
    "gradients": hl.plots.gradients,
    "tokens": lambda source: hl.plots.tokens(source, "0"),
    "images": hl.plots.images,
    "compare": lambda source: hl.plots.compare(source, source),
    "compare at a site": lambda source: hl.plots.compare(source, source, "0"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_what_is_no_recording_is_refused_with_how_to_make_one(name, model):
    for source in (model, torch.ones(2), "runs/demo"):
        with pytest.raises(hl.InputError) as failed:
            FIGURES[name](source)
        text = str(failed.value)
        assert text.startswith(f"hl.plots draws recordings, and got {type(source).__name__}.\n")
        assert "with hl.record(model) as run" in text
        assert "hl.open(path)" in text


@pytest.mark.parametrize("count", [0, -1, 1.5, "8", True])
def test_what_is_no_count_is_refused(run, count):
    for draw in (
        lambda: hl.plots.channels(run, "0", n=count),
        lambda: hl.plots.histograms(run, bins=count),
        lambda: hl.plots.histograms(run, n=count),
        lambda: hl.plots.compare(run, run, n=count),
    ):
        with pytest.raises(
            hl.InputError, match=rf"must be a whole number from 1 up, got {count!r}.\nGive"
        ):
            draw()


def test_more_bins_than_a_figure_shows_are_refused(run):
    with pytest.raises(hl.InputError, match=r"bins=1000001 is more .*\n.*1000 at most"):
        hl.plots.histograms(run, bins=1_000_001)
    hl.plots.histograms(run, "2", bins=1000)


@pytest.mark.parametrize("sample", [0.5, "0", True, None])
def test_what_is_no_row_of_a_batch_is_refused(run, sample):
    for draw in (hl.plots.channels, hl.plots.tokens):
        with pytest.raises(hl.InputError, match=rf"sample must be .*, got {sample!r}"):
            draw(run, "0", sample=sample)


def test_gradients_are_drawn_of_a_whole_recording(run):
    with pytest.raises(hl.InputError, match="Give the recording, not one of its passes"):
        hl.plots.gradients(run.passes[0])
