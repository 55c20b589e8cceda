from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import hookline as hl
from hookline.display.colours import BLUE_ORANGE, VIRIDIS, interpolate_colour
from hookline.views import terminal_plots
from hookline.views.terminal_plots import sparkline


def printed(run, width=120, **options) -> str:
    console = Console(file=io.StringIO(), width=width, **options)
    console.print(terminal_plots(run))
    return console.file.getvalue()


@pytest.fixture
def ramp():
    """A model that lets through maps that rise from 0 to 1 along each row."""
    model = nn.Identity()
    with hl.record(model) as run:
        model(torch.linspace(0, 1, 4).expand(1, 2, 4, 4).clone())
    return run


def test_the_bars_are_the_histogram_of_all_elements():
    model = nn.Identity()
    value = torch.cat([torch.zeros(1000), torch.ones(10), torch.full((1,), 2.0)])
    with hl.record(model) as run:
        model(value)
    counts, _ = np.histogram(value.numpy(), 32)
    row = next(line for line in printed(run).splitlines() if line.startswith("(root)"))
    assert sparkline(counts) in row
    assert row.split()[-3:] == ["0.01187", "98.9", "%"]
    assert (sparkline(counts)[0], sparkline(counts)[1], len(sparkline(counts))) == ("█", " ", 32)


def test_without_colours_maps_are_shades(ramp):
    text = printed(ramp, color_system=None)
    assert "(root): 2 channels of 4x4, the first 2" in text
    assert text.splitlines()[-2:] == [" ░▓█  ░▓█"] * 2


def test_with_colours_each_character_is_two_cells(ramp):
    text = printed(ramp, color_system="truecolor", force_terminal=True)
    assert text.count("▀") == 2 * 2 * 4
    for share in (0, 1 / 3, 2 / 3, 1):
        red, green, blue = interpolate_colour(share, VIRIDIS)
        cell = f"38;2;{red};{green};{blue};48;2;{red};{green};{blue}m▀"
        assert text.count(cell) == 4


def test_in_a_narrow_terminal_bars_are_fewer_and_numbers_whole():
    model = nn.Identity()
    with hl.record(model) as run:
        model(torch.linspace(-1.234, 5.678, 640))
    row = next(line for line in printed(run, width=60).splitlines() if line.startswith("(root)"))
    assert row.split()[2:] == ["-1.234", "5.678", "2.222", "0", "%"]
    assert set(row.split()[1]) == {"█"}


def test_with_long_names_no_number_is_cut():
    model = nn.Sequential()
    model.add_module("a_layer_with_a_name_of_40_characters_or_so", nn.Identity())
    with hl.record(model) as run:
        model(torch.tensor([-1.234e-05, 5.678e-06, math.nan]))
    ends = {40: "-1.234e-05 1", 60: "-1.234e-05 5.678e-06 1", 120: "-3.331e-06 0 % 1"}
    for width, end in ends.items():
        lines = printed(run, width=width).splitlines()
        row = next(line for line in lines if "-1.234e-05" in line)
        assert " ".join(row.split()).endswith(end)
        assert ("Left out at" in " ".join(lines)) == (width < 120)


def test_under_no_color_maps_are_shades_too(ramp):
    with_colours = {"force_terminal": True, "color_system": "truecolor"}
    assert printed(ramp, **with_colours, no_color=True).count("▀") == 0
    plain = [line for line in printed(ramp).splitlines() if "█" in line and "░" in line]
    for line in plain:
        assert line in printed(ramp, **with_colours, no_color=True)


@pytest.mark.parametrize("options", [{}, {"force_terminal": True, "color_system": "truecolor"}])
def test_in_an_old_code_page_it_is_drawn_with_its_characters(ramp, options):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, "ascii")
    Console(file=out, width=120, **options).print(terminal_plots(ramp))
    out.flush()
    lines = raw.getvalue().decode().splitlines()
    row = next(line for line in lines if line.startswith("(root) "))
    assert row.count("#") == 4
    assert lines[-2:] == [" .*#  .*#"] * 2


def test_signed_maps_are_white_at_zero():
    model = nn.Identity()
    with hl.record(model) as run:
        model(torch.tensor([-1.0, 0.0, 2.0, 0.0]).expand(1, 1, 4, 4).clone())
    text = printed(run, color_system="truecolor", force_terminal=True)
    assert "38;2;247;247;247" in text
    assert "38;2;{};{};{}".format(*BLUE_ORANGE[-1]) in text


def test_nan_is_counted_and_has_its_own_colour(ramp):
    model = nn.Identity()
    value = torch.rand(1, 1, 4, 4)
    value[0, 0, 0, 0] = math.nan
    with hl.record(model) as run:
        model(value)
    header, _, row = printed(run).splitlines()[:3]
    assert (header[-10:], row[-2:]) == ("not finite", " 1")
    assert "38;2;213;94;0" in printed(run, color_system="truecolor", force_terminal=True)
    assert "?" in printed(run, color_system=None)


def test_as_many_maps_as_fit_are_drawn():
    model = nn.Identity()
    with hl.record(model) as run:
        model(torch.rand(1, 9, 20, 20))
    text = printed(run, width=80)
    assert "9 channels of 20x20, the first 3" in text
    assert max(map(len, text.splitlines()[-10:])) <= 80


def test_names_are_no_markup_and_overwritten_values_are_said(net, image):
    model = nn.Sequential()
    model.add_module("[bold]x", nn.Linear(2, 2))
    with hl.record(model) as run:
        model(torch.ones(1, 2))
    assert "[bold]x" in printed(run)
    with torch.no_grad(), hl.record(net) as run:
        net(image)
    assert "not drawn: 4 values overwritten in place" in printed(run)


def test_matplotlib_is_not_needed(ramp, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "(root)" in printed(ramp)
