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
    histogram_path,
    input_thumbnail,
    is_image_like,
    picture_of,
)
from hookline.views.page.tiles import IN_FILE, tiles_of


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


def colours(value, *columns):
    """The colours of some columns in the first row of the first channel's map."""
    tile = picture_of(value, "Conv2d", Choice()).tiles[0]
    return [tuple(pixels(tile)[0, column].astype(int)) for column in columns]


DARK, LIGHT, WHITE = (68, 1, 84), (253, 231, 37), (247, 247, 247)
DARK_BLUE, DARK_RED = (5, 48, 97), (103, 0, 31)


def test_each_channel_runs_from_dark_to_light_over_its_own_range():
    maps = torch.zeros(1, 2, 4, 4)
    maps[0, 0, 0, 1] = 1e-3
    maps[0, 1, 0, 1] = 500
    assert colours(maps, 0, 1) == colours(maps[:, 1:], 0, 1) == [DARK, LIGHT]


def test_the_colours_grow_lighter_all_the_way():
    ramp = torch.linspace(0, 1, 48).expand(1, 1, 4, 48)
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in colours(ramp, *range(48))]
    assert light == sorted(light)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_have_a_colour_of_their_own(bad):
    maps = torch.zeros(1, 1, 4, 4)
    maps[0, 0, 0, 0], maps[0, 0, 0, 1] = bad, 2
    assert colours(maps, 0, 1) == [(213, 94, 0), LIGHT]


def test_the_widest_range_of_numbers_does_not_overflow():
    largest = torch.finfo(torch.float64).max
    maps = torch.full((1, 1, 4, 4), largest, dtype=torch.float64)
    maps[0, 0, 0, 0] = -largest
    assert colours(maps, 0, 1) == [DARK_BLUE, DARK_RED]
    (tile,) = tiles_of(maps, "Conv2d", Choice(), IN_FILE)["tiles"]
    assert base64.b64decode(tile["q"])[:2] == bytes([0, 254])


def test_numbers_of_both_signs_are_blue_and_red_zero_is_white():
    maps = torch.zeros(1, 3, 4, 4)
    maps[0, 0, 0, :2] = torch.tensor([-1.0, 3.0])
    maps[0, 1], maps[0, 2] = 0.014, -0.016
    (red, _, blue), *others = colours(maps, 0, 1, 2)
    assert others == [DARK_RED, WHITE]
    assert 67 < red < blue < 240  # -1 of 3: a lighter blue


def test_a_sign_beyond_the_channels_shown_colours_them_alike():
    maps = torch.rand(2, 40, 4, 4)
    maps[1] = -1  # another sample
    assert colours(maps, 0) != [WHITE]
    white_at_zero = maps.clone()
    white_at_zero[0, 0, 0, 0], white_at_zero[0, 39, 0, 0] = 0, -1
    assert colours(white_at_zero, 0) == [WHITE]


def test_a_constant_below_zero_is_not_one_above():
    below, above = (torch.full((1, 1, 4, 4), number) for number in (-0.016, 0.014))
    assert colours(below, 0) == [DARK_BLUE]
    assert colours(above, 0) == [(33, 145, 140)]  # the middle of viridis


def test_nan_is_yellow_beside_blue_and_red():
    maps = torch.ones(1, 1, 4, 4)
    maps[0, 0, 0, :3] = torch.tensor([math.nan, -math.inf, -1])
    assert colours(maps, 0, 1) == [(255, 213, 0)] * 2
    maps[0, 0, 0, 2] = 0  # no finite number is negative
    assert colours(maps, 1) == [(213, 94, 0)]


@pytest.mark.parametrize("shift", [-2.0, 0.0, 2.0])
def test_the_colours_are_those_of_the_figures(shift):
    numbers = torch.randn(1, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    value = numbers.clamp(-1.5, 1.5) + shift
    tiles = picture_of(value, "Conv2d", Choice()).tiles
    with hl.record(model := nn.Sequential(nn.Identity()), "0") as run:
        model(value)
    images = hl.plots.channels(run, "0").axes[0].images
    for channel, image in enumerate(images):
        expected = image.cmap(image.norm(value[0, channel].numpy()), bytes=True)[:, :, :3]
        gaps = abs(pixels(tiles[channel]) - expected.astype(int))
        # Of viridis eleven colours are kept; those between are interpolated.
        assert (gaps.max() <= 20, gaps.mean() <= 2) == (True, True)


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(2, 3), torch.rand(1, 8, 16), torch.rand(1, 8, 3, 16), torch.rand(0, 8, 9, 9),
        torch.rand(1, 0, 9, 9), torch.rand(1, 8, 9, 9, dtype=torch.complex64),
    ],
)  # fmt: skip
def test_what_is_no_image_has_no_class_maps(value):
    assert not is_image_like(value)
    assert is_image_like(torch.rand(1, 8, 9, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.bool])
def test_maps_of_other_dtypes_have_their_numbers(dtype):
    (tile,) = tiles_of(torch.ones(1, 1, 4, 4).to(dtype), "", Choice(), IN_FILE)["tiles"]
    assert (tile["lo"], tile["hi"]) == (1, 1)


def test_a_very_long_map_keeps_at_least_a_line():
    maps = tiles_of(torch.rand(1, 1, 4, 4000), "Conv2d", Choice(), IN_FILE)
    assert (maps["h"], maps["w"]) == (1, 28)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_an_input_is_made_small_and_left_as_it_was(mode):
    image = Image.new(mode, (1000, 500))
    assert decode(input_thumbnail(image)).size == (192, 96)
    assert image.size == (1000, 500)
