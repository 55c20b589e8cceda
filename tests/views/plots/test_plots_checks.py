"""What every figure refuses before it looks at a value."""

from __future__ import annotations

import re

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
        assert text.startswith(
            f"hl.plots must be given a recording or a pass, got {type(source).__name__}.\n"
        )
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
    with pytest.raises(
        hl.InputError, match=r"bins must be at most 1000 .*, got 1000001\.\nGive bins=1000"
    ):
        hl.plots.histograms(run, bins=1_000_001)
    hl.plots.histograms(run, "2", bins=1000)


@pytest.mark.parametrize("sample", [0.5, "0", True, None])
def test_what_is_no_row_of_a_batch_is_refused(run, sample):
    for draw in (hl.plots.channels, hl.plots.tokens):
        with pytest.raises(hl.InputError, match=rf"sample must be .*, got {sample!r}"):
            draw(run, "0", sample=sample)


def test_gradients_are_drawn_of_a_whole_recording(run):
    with pytest.raises(hl.InputError, match="Give the recording: the figure shows means"):
        hl.plots.gradients(run.passes[0])


def same(model, x):
    """A recording of two passes, with two backward passes each."""
    with hl.record(model, ports=("output", "grad_output"), copy=True) as run:
        for _ in range(2):
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    return run


SITE_FIGURES = [hl.plots.channels, hl.plots.histograms, hl.plots.tokens]


def follow(draw, given: dict[str, hl.Recording], site: str) -> None:
    """Draw a figure, and give it what its errors say, until it draws."""
    for _ in range(4):
        try:
            draw(*given.values(), site)
        except hl.AmbiguousError as error:
            said = str(error).partition("\nGive ")[2]
            found = re.findall(r"(\S+) as (the recording|a|b)\b", said)
            given |= {
                name.replace("the recording", "run"): eval(code, dict(given))
                for code, name in found
            }
            site = (re.findall(r"'(\S+)' as the site", said) or [site])[0]
        else:
            return
    pytest.fail(f"{given} at {site} is refused again and again")


@pytest.mark.parametrize("draw", SITE_FIGURES)
@pytest.mark.parametrize("site", ["head", "block", "block#1", "head:grad_output", "block#pass1"])
def test_a_figure_accepts_what_it_proposes_for_several_values(looped, draw, site):
    run = same(looped, torch.ones(1, 2))
    follow(draw, {"run": run}, site)
    follow(draw, {"run": run.passes[1]}, site)


@pytest.mark.slow
@pytest.mark.parametrize("site", ["head", "block", "block#1", "head:grad_output", "block#pass1"])
def test_compare_accepts_what_it_proposes_for_several_values(looped, site):
    run = same(looped, torch.ones(1, 2))
    follow(hl.plots.compare, {"a": run, "b": run}, site)
    follow(hl.plots.compare, {"a": run.passes[1], "b": run}, site.partition("#pass")[0])


def test_compare_says_which_recording_has_several_values(looped):
    run = same(looped, torch.ones(1, 2))
    with pytest.raises(hl.AmbiguousError) as caught:
        hl.plots.compare(run.passes[0], run, "block")
    assert str(caught.value) == ("a: 'block' ran 3 times in pass 0.\nGive 'block#0' as the site.")
    with pytest.raises(hl.AmbiguousError) as caught:
        hl.plots.compare(run.passes[0], run, "block#0")
    assert str(caught.value) == (
        "b: 'block#0' has a value in each of 2 passes.\nGive b.passes[0] as b."
    )
    with pytest.raises(hl.InputError) as caught:
        hl.plots.compare(run.passes[0], run)
    assert str(caught.value) == (
        "b must have one pass for this figure, got 2.\nGive one of them: b.passes[0]."
    )


def test_recordings_of_several_ranks_are_refused(run):
    both = hl.Recording(run.sites, run.report())
    both.ranks = (run, run)
    for draw in FIGURES.values():
        with pytest.raises(hl.InputError, match=r"got 2 ranks.\nGive .* run.ranks\[0\]"):
            draw(both)
