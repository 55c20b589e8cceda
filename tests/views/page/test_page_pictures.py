"""What is drawn of a value, against what it should show."""

from __future__ import annotations

import base64
import io

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
    input_thumbnail,
    is_image_like,
)
from hookline.views.page.tiles import ASKED_FOR, IN_FILE, tiles_of


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


def channels(value, **choice):
    return [tile["c"] for tile in tiles_of(value, "Conv2d", Choice(**choice), ASKED_FOR)["tiles"]]


def test_channels_are_pages_of_16_and_can_be_ordered():
    value = torch.arange(80.0)[None, :, None, None] * torch.rand(1, 80, 4, 4) - 1
    assert channels(value, order="index", first=64) == list(range(64, 80))
    assert channels(value, order="index", first=999) == list(range(64, 80))
    by_size = value[0].abs().amax((1, 2)).argsort(descending=True).tolist()
    assert channels(value) + channels(value, first=16) == by_size[:32]
    assert channels(value, order="std")[0] == int(value[0].std((1, 2)).argmax())


def test_what_has_no_picture_says_why():
    with pytest.raises(InputError, match="a picture must have at most 5 dimensions, got 6"):
        tiles_of(torch.ones(1, 1, 1, 1, 1, 1), "", Choice(), IN_FILE)
    with pytest.raises(InputError, match="it is empty"):
        tiles_of(torch.ones(0, 3), "", Choice(), IN_FILE)


def decode(source: str) -> Image.Image:
    head, _, data = source.partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_widest_range_of_numbers_does_not_overflow():
    largest = torch.finfo(torch.float64).max
    maps = torch.full((1, 1, 4, 4), largest, dtype=torch.float64)
    maps[0, 0, 0, 0] = -largest
    (tile,) = tiles_of(maps, "Conv2d", Choice(), IN_FILE)["tiles"]
    assert base64.b64decode(tile["q"])[:2] == bytes([0, 254])


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
