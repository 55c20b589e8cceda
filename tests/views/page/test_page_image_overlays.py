"""What is laid over the input images, against hl.cam and the tensors themselves."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hookline as hl
from hookline.views.page.image_overlays import Images, find_images, gradcam_maps, norm_maps
from hookline.views.page.quantised_maps import ASKED_FOR
from hookline.views.page.value_entries import list_values


class Convs(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.conv(x).relu().mean((2, 3)))


class Patches(nn.Module):
    """A vision transformer: a class token before 4 x 2 patches of 4 x 4 pixels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.blocks(tokens)[:, 0])


@pytest.fixture
def patches(tmp_path):
    """A recording of a vision transformer with gradients, in a folder, and the images."""
    torch.manual_seed(0)
    model, x = Patches().eval(), torch.rand(2, 3, 16, 8)
    with hl.record(model, ports=("input", "output", "grad_output"), copy=True) as run:
        model(x)[:, 3].sum().backward()
    return run.save(tmp_path / "patches"), x


def numbers(maps, k=0):
    """The numbers of a map, as the page's script decodes them."""
    tile = maps["tiles"][k]
    codes = np.frombuffer(base64.b64decode(tile["q"]), "<u2").astype(float)
    decoded = tile["lo"] + codes / (2**16 - 2) * (tile["hi"] - tile["lo"])
    return torch.from_numpy(decoded.reshape(maps["h"], maps["w"]))


def images_for(x):
    return Images(len(x), tuple(x.shape[2:]), x)


def test_class_maps_are_those_of_hl_cam():
    torch.manual_seed(1)
    model, x = Convs().eval(), torch.rand(2, 3, 16, 16)
    with hl.record(model, "conv", ports=("output", "grad_output")) as run:
        model(x)[:, 2].sum().backward()
    raw = hl.cam(model, x, "conv", target=2).raw["conv"]
    for sample in range(2):
        activation, gradient = run["conv"], run["conv:grad_output"]
        maps = gradcam_maps(activation, gradient, images_for(x), sample, ASKED_FOR)
        for k, sign in enumerate((1, -1)):
            expected = (sign * raw[sample]).relu().double()
            assert torch.allclose(numbers(maps, k), expected, rtol=1e-3, atol=1e-6)


def test_class_maps_of_tokens_are_those_of_hl_cam(patches):
    folder, x = patches
    run = hl.open(folder)
    torch.manual_seed(0)
    raw = hl.cam(Patches().eval(), x, "blocks.layers.0", target=3).raw["blocks.layers.0"]
    pair = run["blocks.layers.0"], run["blocks.layers.0:grad_output"]
    maps = gradcam_maps(*pair, images_for(x), 1, ASKED_FOR)
    assert (maps["h"], maps["w"]) == (4, 2)
    assert torch.allclose(numbers(maps), raw[1].relu().double(), rtol=1e-3, atol=1e-6)


def test_there_is_no_class_map_of_what_does_not_fit_together():
    maps, images = torch.rand(2, 4, 5, 5), images_for(torch.rand(2, 3, 8, 8))

    def drawn(activation, gradient, images=images, sample=0):
        return gradcam_maps(activation, gradient, images, sample, ASKED_FOR)

    assert drawn(maps, maps, sample=1)
    assert drawn(maps, maps[:, :, :4]) is None
    assert drawn(maps, maps, images_for(torch.rand(1, 3, 8, 8))) is None
    assert drawn(maps * float("nan"), maps) is None
    assert drawn(maps, maps * 0) is None
    assert drawn(maps, maps, sample=2) is None


def test_norms_of_tokens_lie_at_their_patches():
    tokens, x = torch.rand(2, 9, 7), torch.rand(2, 3, 16, 8)
    maps = norm_maps([("norm", tokens)], images_for(x), 1, ASKED_FOR)
    expected = tokens[1, 1:].double().norm(dim=-1).reshape(4, 2)
    assert torch.allclose(numbers(maps), expected, rtol=1e-4)
    assert maps["prefix"] == [pytest.approx(float(tokens[1, 0].norm()), rel=1e-3)]


def test_a_token_of_nan_before_the_patches_has_no_norm(served, tmp_path):
    model = Patches().eval()
    nn.init.constant_(model.first, float("nan"))
    with hl.record(model, ports=("input", "output")) as run:
        model(torch.rand(2, 3, 16, 8))
    assert hl.write_page(run, tmp_path / "run.html").exists()
    answer = served(run.save(tmp_path / "run")).get("maps?at=blocks.layers.0.norm1")
    (norms,) = json.loads(answer.text, parse_constant=pytest.fail)["over"]["sets"]
    assert norms["prefix"] == [None]


def test_a_sequence_that_does_not_cover_the_images_is_no_grid():
    # 100 queries are 10 x 10, but no square patches of 224 x 224 make that.
    x = torch.rand(1, 3, 224, 224)
    assert images_for(x).grid_of(torch.rand(1, 100, 4)) is None
    assert images_for(x).grid_of(torch.rand(1, 197, 4)).n_prefix == 1


def test_a_convolution_has_its_channels_first():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=(2, 1))), torch.rand(2, 3, 16, 16)
    with hl.record(model, "0", ports=("output", "grad_output")) as run:
        model(x).square().sum().backward()
    images, entries = images_for(x), list_values(run)
    grids = [images.for_module(entry).grid_of(run[entry.key.at]).form for entry in entries]
    assert grids == ["channels first", "channels first"]
    maps = gradcam_maps(run["0"], run["0:grad_output"], images.for_module(entries[0]), 0, ASKED_FOR)
    assert (maps["rows"], maps["columns"]) == (8, 16)


def test_without_the_input_a_layer_of_maps_gives_the_grid():
    torch.manual_seed(0)
    with hl.record(model := Patches().eval()) as run:
        model(torch.rand(2, 3, 32, 16))
    images = find_images(list_values(run), 0)
    assert (images.n_images, images.size, images.pixels) == (2, (8, 4), None)
    assert images.grid_of(run["blocks.layers.1"]).n_prefix == 1
    assert images.grid_of(torch.rand(2, 17, 4)) is None
    assert images.data_url(0) == ""


def test_attention_of_a_text_is_no_grid_for_its_tokens():
    model = nn.ModuleDict({"pattern": nn.Identity(), "block": nn.Identity()})
    model.forward = lambda x: model["block"](x[0]) + model["pattern"](x[1]).sum()
    with hl.record(model, ["pattern", "block"]) as run:
        model((torch.rand(2, 16, 8), torch.rand(2, 4, 16, 16)))
    values = list_values(run)
    assert find_images(values[::-1], 0).grid_of(run["block"]) is None


def test_the_image_is_that_of_the_sample_in_its_colours():
    x = torch.zeros(2, 3, 4, 4)
    x[1, 0] = 1
    source = images_for(x).data_url(1)
    assert source.startswith("data:image/png;base64,")
    picture = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
    assert picture.getpixel((0, 0)) == (255, 0, 0)
    assert images_for(x).data_url(2) == ""


def test_the_server_lays_the_last_class_map_beside_the_scores(served, patches):
    folder, x = patches
    run = hl.open(folder)
    server = served(folder)
    answer = json.loads(server.get("maps?at=(root)&sample=1&form=places").text)
    top = run["(root)"][1].topk(5)
    assert [index for index, _, _ in answer["scores"]["top"]] == top.indices.tolist()
    (maps,) = answer["over"]["sets"]
    # Behind the last attention, the score is the class token's alone.
    assert maps["at"] == "blocks.layers.0"
    pair = run["blocks.layers.0"], run["blocks.layers.0:grad_output"]
    expected = gradcam_maps(*pair, images_for(x), 1, ASKED_FOR)
    assert maps["tiles"] == expected["tiles"]
    assert answer["over"]["image"] == images_for(x).data_url(1)


def test_tokens_are_drawn_at_their_patches_or_as_a_table(served, patches):
    folder, _ = patches
    server, value = served(folder), hl.open(folder)["blocks.layers.0"][0].double()
    places = json.loads(server.get("maps?at=blocks.layers.0&form=places&order=index").text)
    maps = places["own"]["maps"]
    assert (maps["kind"], maps["h"], maps["w"], maps["of"]) == ("channels", 4, 2, 8)
    assert torch.allclose(numbers(maps, 5), value[1:, 5].reshape(4, 2), rtol=1e-3, atol=1e-4)
    assert [maps["kind"] for maps in places["over"]["sets"]] == ["cam", "norm"]
    table = json.loads(server.get("maps?at=blocks.layers.0").text)["own"]["maps"]
    assert (table["kind"], table["rows"], table["form"]) == ("table", 9, "table")
    assert server.get("maps?at=blocks.layers.0&form=else").status == 404


def answer_of(served, place, x, shape=lambda x: x):
    """Serve a recording of images with gradients, and get what is drawn of its convolution."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"conv": nn.Conv2d(shape(x).shape[1], 6, 3), "head": nn.Linear(6, 4)})
    model.forward = lambda x: model["head"](model["conv"](shape(x).float()).mean((2, 3)))
    with hl.record(model, ["(root)", "conv"], ports=("input", "output", "grad_output")) as run:
        model(x)[:, 2].sum().backward()
    folder = run.save(place / "run")
    return json.loads(served(folder).get("maps?at=conv").text)["over"], hl.open(folder)


@pytest.mark.slow
def test_maps_lie_over_images_of_bytes(served, tmp_path):
    x = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    over, run = answer_of(served, tmp_path, x)
    expected = gradcam_maps(run["conv"], run["conv:grad_output"], images_for(x), 0, ASKED_FOR)
    assert over["sets"][0]["tiles"] == expected["tiles"]
    picture = Image.open(io.BytesIO(base64.b64decode(over["image"].partition(",")[2])))
    low, high = int(x[0].min()), int(x[0].max())
    shades = ((x[0, :, 2, 5].double() - low) / (high - low) * 255).round().int().tolist()
    assert picture.getpixel((5, 2)) == tuple(shades)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "order"), [((2, 4, 16, 16), (0, 1, 2, 3)), ((2, 16, 16, 3), (0, 3, 1, 2))]
)
def test_a_recorded_input_of_another_shape_says_why(served, tmp_path, shape, order):
    over, _ = answer_of(served, tmp_path, torch.rand(shape), lambda x: x.permute(order))
    assert over == {
        "why": "Grad-CAM needs an input of shape [images, 1 or 3, height, width], got"
        f" {list(shape)}."
    }
