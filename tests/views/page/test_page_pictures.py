"""What is drawn of a value, against what it should show."""

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
from hookline.errors import InputError
from hookline.views.page.pictures import (
    Choice,
    class_maps,
    difference_picture,
    feature_strip,
    histogram_path,
    input_thumbnail,
    picture_of,
)


def pixels(tile) -> np.ndarray:
    data = base64.b64decode(tile.source.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))


def test_class_maps_are_those_of_hl_cam():
    torch.manual_seed(1)
    model = Net().eval()
    x = torch.rand(2, 3, 16, 16)
    with hl.record(model, "conv", ports=("output", "grad_output")) as run:
        model(x)[:, 2].sum().backward()
    expected = hl.cam(model, x, "conv", target=2).maps
    for sample in range(2):
        raises, lowers = class_maps(run["conv"], run["conv:grad_output"], x, sample)
        assert (raises.caption, lowers.caption) == ("what raises it", "what lowers it")
        grey = x[sample].mean(0)
        grey = (grey - grey.min()) / (grey.max() - grey.min())
        heat = pixels(raises) - 127.5 * grey[:, :, None].numpy()
        # Magma's red rises all the way: where there is more of it, the map is greater.
        one = expected[sample].flatten().numpy()
        order = np.corrcoef(one, heat[:, :, 0].flatten())[0, 1]
        assert order > 0.9
        at = np.unravel_index(int(expected[sample].argmax()), (16, 16))
        assert heat[at][0] > 120
        assert np.abs(heat[expected[sample].numpy() == 0]).max() < 4


def test_there_is_no_class_map_of_what_does_not_fit_together():
    maps, image = torch.rand(2, 4, 5, 5), torch.rand(2, 3, 8, 8)
    assert class_maps(maps, maps, image, 1)
    assert class_maps(maps, maps[:, :, :4], image, 0) == []
    assert class_maps(maps, maps, image[:1], 0) == []
    assert class_maps(maps, maps, torch.rand(2, 7, 8, 8), 0) == []
    assert class_maps(maps, maps * float("nan"), image, 0) == []
    assert class_maps(maps, maps, image, 2) == []


def test_channels_are_pages_of_32_and_can_be_ordered():
    value = torch.arange(80.0)[None, :, None, None] * torch.rand(1, 80, 4, 4)
    found = picture_of(value, "Conv2d", Choice(first=64))
    assert (found.kind, found.total, found.first) == ("channels", 80, 64)
    assert found.channels == tuple(range(64, 80))
    largest = picture_of(value, "Conv2d", Choice(order="max")).channels[0]
    assert largest == int(value.amax((2, 3)).argmax())


def test_tokens_are_one_table_and_say_what_is_left_out():
    found = picture_of(torch.randn(2, 5, 7), "Linear", Choice(sample=1))
    assert (found.kind, found.n_samples) == ("table", 2)
    assert pixels(found.tiles[0]).shape == (5, 7, 3)
    assert "5 x 7, rows downwards" in found.about
    large = picture_of(torch.randn(1, 2000, 4000), "Linear", Choice())
    assert "of one element in 2" in large.about
    assert pixels(large.tiles[0]).shape == (160, 480, 3)


def test_a_value_of_two_dimensions_is_samples_by_channels():
    value = torch.randn(5, 7)
    with hl.record(model := nn.Sequential(nn.Identity()), "0") as run:
        model(value)
    header = " ".join(text.get_text() for text in hl.plots.channels(run, "0").texts)
    found = picture_of(value, "Linear", Choice())
    assert "read as NC" in header
    assert found.about.startswith("read as NC; 5 x 7, samples downwards, channels to the right;")
    assert pixels(found.tiles[0]).shape == (5, 7, 3)
    assert found.n_samples == 1  # all are there


def test_a_difference_is_blue_where_the_second_is_greater():
    a, b = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    a[0, 0, 0], b[0, 0, 3] = 1.0, 1.0
    (tile,) = difference_picture(a, b, "Conv2d", Choice()).tiles
    shown = pixels(tile)
    assert shown[0, 0, 0] > shown[0, 0, 2]
    assert shown[3, 0, 2] > shown[3, 0, 0]


def test_channels_of_both_signs_are_blue_and_red_at_their_scale():
    value = torch.full((1, 3, 4, 4), 0.014)
    value[0, 1], value[0, 2, 0] = -0.016, 0
    found = picture_of(value, "Conv2d", Choice())
    assert "blue below zero, white at zero, red above" in found.about
    red, blue, white = (tuple(pixels(tile)[0, 0]) for tile in found.tiles)
    assert (red, blue, white) == ((103, 0, 31), (5, 48, 97), (247, 247, 247))
    found = picture_of(value.abs(), "Conv2d", Choice())
    assert "from its least value (dark) to its greatest (light)" in found.about
    assert tuple(pixels(found.tiles[2])[0, 0]) == (68, 1, 84)


def test_a_table_is_coloured_by_numbers_not_by_means_of_areas():
    value = torch.tensor([3.0, -1.0]).repeat(1, 400, 1000)
    assert "blue below zero, red above" in picture_of(value, "Linear", Choice()).about


def test_what_has_no_picture_says_why():
    with pytest.raises(InputError, match="a picture must have at most 5 dimensions, got 6"):
        picture_of(torch.ones(1, 1, 1, 1, 1, 1), "", Choice())
    with pytest.raises(InputError, match="it is empty"):
        picture_of(torch.ones(0, 3), "", Choice())


def test_a_histogram_without_elements_is_no_path():
    assert histogram_path([0, 0]) == ""
    assert histogram_path([]) == ""


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
