"""What is drawn of a value, against what it should show."""

from __future__ import annotations

import base64
import io

import pytest
import torch
from PIL import Image

from hookline.errors import InputError
from hookline.views.page.quantised_maps import ASKED_FOR, IN_FILE, quantised_maps
from hookline.views.page.what_to_draw import Choice, holds_feature_maps, input_thumbnail


def channels(value, **choice):
    return [
        tile["c"] for tile in quantised_maps(value, "Conv2d", Choice(**choice), ASKED_FOR)["tiles"]
    ]


def test_channels_are_pages_of_16_and_can_be_ordered():
    value = torch.arange(80.0)[None, :, None, None] * torch.rand(1, 80, 4, 4) - 1
    assert channels(value, order="index", first=64) == list(range(64, 80))
    assert channels(value, order="index", first=999) == list(range(64, 80))
    by_size = value[0].abs().amax((1, 2)).argsort(descending=True).tolist()
    assert channels(value) + channels(value, first=16) == by_size[:32]
    assert channels(value, order="std")[0] == int(value[0].std((1, 2)).argmax())


def test_what_has_no_picture_says_why():
    with pytest.raises(InputError, match="a picture must have at most 5 dimensions, got 6"):
        quantised_maps(torch.ones(1, 1, 1, 1, 1, 1), "", Choice(), IN_FILE)
    with pytest.raises(InputError, match="it is empty"):
        quantised_maps(torch.ones(0, 3), "", Choice(), IN_FILE)


def decode(source: str) -> Image.Image:
    head, _, data = source.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_widest_range_of_numbers_does_not_overflow():
    largest = torch.finfo(torch.float64).max
    maps = torch.full((1, 1, 4, 4), largest, dtype=torch.float64)
    maps[0, 0, 0, 0] = -largest
    (tile,) = quantised_maps(maps, "Conv2d", Choice(), IN_FILE)["tiles"]
    assert base64.b64decode(tile["q"])[:2] == bytes([0, 254])


@pytest.mark.parametrize(
    "value",
    [
        torch.rand(2, 3), torch.rand(1, 8, 16), torch.rand(1, 8, 3, 16), torch.rand(0, 8, 9, 9),
        torch.rand(1, 0, 9, 9), torch.rand(1, 8, 9, 9, dtype=torch.complex64),
    ],
)  # fmt: skip
def test_what_is_no_image_has_no_class_maps(value):
    assert not holds_feature_maps(value)
    assert holds_feature_maps(torch.rand(1, 8, 9, 9))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.uint8, torch.bool])
def test_maps_of_other_dtypes_have_their_numbers(dtype):
    (tile,) = quantised_maps(torch.ones(1, 1, 4, 4).to(dtype), "", Choice(), IN_FILE)["tiles"]
    assert (tile["lo"], tile["hi"]) == (1, 1)


def test_a_very_long_map_keeps_at_least_a_line():
    maps = quantised_maps(torch.rand(1, 1, 4, 4000), "Conv2d", Choice(), IN_FILE)
    assert (maps["h"], maps["w"]) == (1, 28)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "CMYK"])
def test_an_input_is_made_small_and_left_as_it_was(mode):
    image = Image.new(mode, (1000, 500))
    assert decode(input_thumbnail(image)).size == (192, 96)
    assert image.size == (1000, 500)
