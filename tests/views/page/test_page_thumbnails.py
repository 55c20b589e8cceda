from __future__ import annotations

import base64
import io
import math

import pytest
import torch
from PIL import Image

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
    assert [colour(strip, x) for x in (0, 1)] == [(68, 1, 84), (253, 231, 37)]


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_an_input_is_made_small_and_left_as_it_was(mode):
    image = Image.new(mode, (1000, 500))
    assert decode(input_thumbnail(image)).size == (192, 96)
    assert image.size == (1000, 500)
