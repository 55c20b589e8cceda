from __future__ import annotations

import base64
import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookline as hl
from hookline.views.page.thumbnails import feature_strip, input_thumbnail


def decode(source: str) -> Image.Image:
    head, _, data = source.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def colour(strip, x, y=0):
    return decode(strip.source).convert("RGB").getpixel((x, y))


def test_the_first_eight_channels_stand_side_by_side():
    strip = feature_strip(torch.rand(3, 20, 10, 12))
    assert decode(strip.source).size == (8 * 12, 10)
    assert (len(strip.ranges), strip.channels) == (8, 20)


def test_large_maps_are_reduced_and_keep_their_proportions():
    strip = feature_strip(torch.rand(1, 2, 200, 400))
    assert (strip.width, strip.height) == (48, 24)


def test_a_very_long_map_keeps_at_least_a_line():
    assert feature_strip(torch.rand(1, 1, 4, 4000)).height == 1


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(2, 3), torch.rand(1, 8, 16), torch.rand(1, 8, 3, 16), torch.rand(0, 8, 9, 9),
        torch.rand(1, 0, 9, 9), torch.rand(1, 8, 9, 9, device="meta"),
        torch.rand(1, 8, 9, 9, dtype=torch.complex64),
    ],
)  # fmt: skip
def test_what_is_no_image_is_not_drawn(value):
    assert feature_strip(value) is None


def test_each_channel_runs_from_dark_to_light_over_its_own_range():
    maps = torch.zeros(1, 2, 4, 4)
    maps[0, 0, 0, 1] = 1e-3
    maps[0, 1, 0, 1] = 500
    strip = feature_strip(maps)
    dark, light = (68, 1, 84), (253, 231, 37)
    assert [colour(strip, x) for x in (0, 1, 4, 5)] == [dark, light, dark, light]
    assert strip.ranges[1] == (0, 500)


def test_the_colours_grow_lighter_all_the_way():
    ramp = torch.linspace(0, 1, 48).expand(1, 1, 4, 48)
    strip = feature_strip(ramp)
    light = [
        0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (colour(strip, x) for x in range(48))
    ]
    assert light == sorted(light)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_have_a_colour_of_their_own(bad):
    maps = torch.zeros(1, 1, 4, 4)
    maps[0, 0, 0, 0], maps[0, 0, 0, 1] = bad, 2
    strip = feature_strip(maps)
    assert colour(strip, 0) == (213, 94, 0)
    assert colour(strip, 1) == (253, 231, 37)
    assert strip.ranges == ((0, 2),)


def test_a_map_of_nan_alone_has_no_range():
    assert feature_strip(torch.full((1, 1, 4, 4), math.nan)).ranges == (None,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.bool])
def test_other_dtypes_are_drawn(dtype):
    assert feature_strip(torch.ones(1, 1, 4, 4).to(dtype)).ranges == ((1, 1),)


def test_the_widest_range_of_numbers_does_not_overflow():
    largest = torch.finfo(torch.float64).max
    maps = torch.full((1, 1, 4, 4), largest, dtype=torch.float64)
    maps[0, 0, 0, 0] = -largest
    strip = feature_strip(maps)
    assert [colour(strip, x) for x in (0, 1)] == [(5, 48, 97), (103, 0, 31)]


def test_numbers_of_both_signs_are_blue_and_red_zero_is_white():
    maps = torch.zeros(1, 3, 4, 4)
    maps[0, 0, 0, :2] = torch.tensor([-1.0, 3.0])
    maps[0, 1], maps[0, 2] = 0.014, -0.016
    strip = feature_strip(maps)
    white, dark_blue, dark_red = (247, 247, 247), (5, 48, 97), (103, 0, 31)
    assert [colour(strip, x) for x in (1, 2, 4, 8)] == [dark_red, white, dark_red, dark_blue]
    red, _, blue = colour(strip, 0)
    assert 67 < red < blue < 240  # -1 of 3: a lighter blue
    assert strip.ranges[0] == (-1, 3)


def test_a_sign_beyond_the_channels_shown_colours_them_alike():
    maps = torch.rand(2, 9, 4, 4)
    maps[1] = -1  # another sample
    assert colour(feature_strip(maps), 0)[1] < 240
    white_at_zero = maps.clone()
    white_at_zero[0, 0, 0, 0], white_at_zero[0, 8, 0, 0] = 0, -1
    assert colour(feature_strip(white_at_zero), 0) == (247, 247, 247)


def test_a_constant_below_zero_is_not_one_above():
    below, above = (torch.full((1, 1, 4, 4), number) for number in (-0.016, 0.014))
    assert colour(feature_strip(below), 0) == (5, 48, 97)
    assert colour(feature_strip(above), 0) == (33, 145, 140)  # the middle of viridis


def test_nan_is_yellow_beside_blue_and_red():
    maps = torch.ones(1, 1, 4, 4)
    maps[0, 0, 0, :3] = torch.tensor([math.nan, -math.inf, -1])
    assert [colour(feature_strip(maps), x) for x in (0, 1)] == [(255, 213, 0)] * 2
    maps[0, 0, 0, 2] = 0  # no finite number is negative
    assert colour(feature_strip(maps), 1) == (213, 94, 0)


@pytest.mark.parametrize("shift", [-2.0, 0.0, 2.0])
def test_the_colours_are_those_of_the_figures(shift):
    numbers = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    value = numbers.clamp(-1.5, 1.5) + shift
    strip = feature_strip(value)
    with hl.record(model := nn.Sequential(nn.Identity()), "0") as run:
        model(value)
    images = hl.plots.channels(run, "0").axes[0].images
    for channel, image in enumerate(images):
        expected = image.cmap(image.norm(value[0, channel].numpy()), bytes=True)[:, :, :3]
        shown = decode(strip.source).convert("RGB").crop((6 * channel, 0, 6 * channel + 6, 6))
        gaps = abs(np.asarray(shown, int) - expected.astype(int))
        # Of viridis eleven colours are kept; those between are interpolated.
        assert (gaps.max() <= 20, gaps.mean() <= 2) == (True, True)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_an_input_is_made_small_and_left_as_it_was(mode):
    image = Image.new(mode, (1000, 500))
    assert decode(input_thumbnail(image)).size == (192, 96)
    assert image.size == (1000, 500)
