"""Class maps laid over images: colours, sizes, kinds of pictures, files."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
from matplotlib import colormaps
from PIL import Image
from skimage import data

import hookline as hl


def maps_of(maps, images=None):
    """Class maps as `cam` gives them, with these numbers."""
    maps = torch.as_tensor(maps, dtype=torch.float32)
    n, height, width = maps.shape
    if images is None:
        images = torch.zeros(n, 3, height, width)
    return hl.ClassMaps(maps, ("conv",), "gradcam", (None,) * n, None, {"conv": maps}, images)


def test_the_colours_are_infernos_and_their_lightness_rises():
    values = np.linspace(0, 1, 101)
    (row,) = maps_of(values[None, None]).overlay(alpha=1)
    expected = colormaps["inferno"](values)[:, :3] * 255
    assert np.abs(row[0] - expected)[::10].max() < 1
    assert np.abs(row[0] - expected).max() < 10  # between the eleven colours it is interpolated
    lightness = row[0] @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > 0).all()


def test_alpha_is_the_share_of_the_map():
    picture = np.full((2, 2, 3), 100, np.uint8)
    found = maps_of([[[0.0, 1.0], [0.0, 1.0]]])
    for alpha, left in ((0, 100), (0.5, 50), (0.25, 75)):
        (overlay,) = found.overlay(picture, alpha)
        assert overlay.dtype == np.uint8
        assert overlay[0, 0].tolist() == pytest.approx([left, left, left], abs=1 + 4 * alpha)
    assert found.overlay(picture, 1.0)[0][0, 1].tolist() == [252, 255, 164]


@pytest.mark.parametrize("alpha", [-0.1, 2, "a", None, float("nan")])
def test_an_alpha_out_of_range_is_refused(alpha):
    with pytest.raises(hl.InputError, match=r"alpha must be a number from 0 to 1, got .*\."):
        maps_of(torch.zeros(1, 2, 2)).overlay(alpha=alpha)


@pytest.mark.slow
def test_every_kind_of_picture_gives_the_same_overlay():
    cat = data.chelsea()[:, 75:375]
    found = maps_of(torch.rand(1, 30, 30))
    (expected,) = found.overlay(Image.fromarray(cat))
    tensor = torch.tensor(cat).permute(2, 0, 1)
    for picture in (cat, cat / 255, tensor, tensor.float() / 255, tensor[None], [cat]):
        assert np.array_equal(found.overlay(picture)[0], expected)
    assert expected.shape == (300, 300, 3)
    coarse = torch.rand(1, 3, 30, 30).bfloat16()
    assert np.array_equal(found.overlay(coarse)[0], found.overlay(coarse.float())[0])
    grey = np.asarray(Image.fromarray(cat).convert("L"))
    seen = found.overlay(cat, alpha=0)[0]
    assert np.abs(seen.astype(int) - grey[:, :, None]).max() <= 1
    for picture in (grey, Image.fromarray(grey), torch.tensor(grey)[None]):
        assert found.overlay(picture)[0].shape == (300, 300, 3)


def test_the_map_is_enlarged_to_the_picture():
    found = maps_of([[[0.0, 1.0]]])
    (row,) = found.overlay(np.zeros((3, 6, 3)), alpha=1)
    red = row[1, :, 0].astype(int)
    assert red[0] == 0
    assert (np.diff(red)[1:4] > 0).all()


def test_without_a_picture_the_input_is_scaled_to_its_own_range():
    image = torch.tensor([[[[-3.0, 5.0]]]])
    (overlay,) = maps_of(torch.zeros(1, 1, 2), image).overlay(alpha=0)
    assert overlay[0].tolist() == [[0] * 3, [255] * 3]
    (overlay,) = maps_of(torch.zeros(1, 1, 2), torch.full((1, 4, 1, 2), 2.0)).overlay(alpha=0)
    assert overlay[0].tolist() == [[0] * 3, [0] * 3]


def test_a_picture_of_another_shape_is_warned_of():
    found = maps_of(torch.zeros(1, 10, 10))
    with pytest.warns(hl.HooklineWarning, match="is 20 x 10, and the model saw 10 x 10: if it was"):
        (overlay,) = found.overlay(np.zeros((10, 20, 3)))
    assert overlay.shape == (10, 20, 3)
    found.overlay(np.zeros((300, 301, 3)))  # a side was rounded


@pytest.mark.parametrize(
    "picture",
    ["cat.png", torch.full((3, 2, 2), -0.5), torch.zeros(5, 2, 2), np.zeros((2, 2), bool),
     np.full((2, 2, 3), np.nan), np.full((2, 2), 256), np.full((2, 2), 1.01), 3],
)  # fmt: skip
def test_what_is_no_picture_is_refused(picture):
    with pytest.raises(hl.InputError, match=r"image= must hold pictures, got .*\nGive pillow's"):
        maps_of(torch.zeros(1, 2, 2)).overlay([picture])


@pytest.mark.parametrize("mode", ["I;16", "I", "F"])
def test_a_picture_of_more_than_8_bits_is_not_cut_off(mode):
    with pytest.raises(hl.InputError, match=f"mode '{mode}'.\nScale it to floats"):
        maps_of(torch.zeros(1, 2, 2)).overlay(Image.new(mode, (2, 2)))


def test_there_is_a_picture_for_each_map():
    with pytest.raises(hl.InputError, match=r"each of 2 maps, got 1 picture.\nGive one for each"):
        maps_of(torch.zeros(2, 2, 2)).overlay(np.zeros((2, 2, 3)))


def test_the_overlays_are_written_side_by_side(tmp_path):
    found = maps_of(torch.rand(3, 96, 7), torch.rand(3, 1, 96, 7))
    found.save(tmp_path / "maps.png", alpha=0.3)
    written = np.asarray(Image.open(tmp_path / "maps.png"))
    assert written.shape == (96, 3 * 7 + 2 * 4, 3)
    for k, overlay in enumerate(found.overlay(alpha=0.3)):
        assert np.array_equal(written[:, 11 * k : 11 * k + 7], overlay)
    with pytest.raises(hl.InputError, match=r"must end in a picture format.*\nEnd it in .png"):
        found.save(tmp_path / "maps")


def test_small_overlays_are_enlarged_by_a_whole_factor(tmp_path):
    found = maps_of(torch.rand(3, 5, 7), torch.rand(3, 1, 5, 7))
    found.save(tmp_path / "maps.png")
    for shown in (Image.open(tmp_path / "maps.png"), Image.open(io.BytesIO(found._repr_png_()))):
        assert shown.size == (3 * 7 * 20 + 2 * 4, 100)  # 5 x 20 is the first that is 96 high
        for k, overlay in enumerate(found.overlay()):
            enlarged = np.asarray(shown)[:, 144 * k : 144 * k + 140]
            assert np.array_equal(enlarged, overlay.repeat(20, 0).repeat(20, 1))


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    found = maps_of(torch.rand(1, 5, 7))
    with pytest.raises(hl.InputError, match=r"can be written, got: its folder '.*/"
                       r"nodir' does not exist.\nGive a path in a folder that exists"):  # fmt: skip
        found.save(tmp_path / "nodir" / "maps.png")
    (tmp_path / "maps.png").mkdir()
    with pytest.raises(hl.InputError, match=r"can be written, got: Is a directory"):
        found.save(tmp_path / "maps.png")


def test_many_overlays_take_several_rows(tmp_path):
    found = maps_of(torch.rand(10, 96, 7))
    found.save(tmp_path / "maps.png")
    written = np.asarray(Image.open(tmp_path / "maps.png"))
    assert written.shape == (2 * 96 + 4, 8 * 7 + 7 * 4, 3)
    assert np.array_equal(written[100:, 11:18], found.overlay()[9])
    assert (written[100:, 18:] == 255).all()


def test_without_pillow_it_says_what_to_install(tmp_path, monkeypatch):
    found = maps_of(torch.rand(1, 5, 7))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert found.overlay()[0].shape == (5, 7, 3)
    with pytest.raises(hl.HooklineError, match=r'pip install "\.\[plots\]"'):
        found.save(tmp_path / "maps.png")
    assert found._repr_png_() is None


def test_it_says_what_it_is():
    assert repr(maps_of(torch.rand(2, 5, 7))) == "ClassMaps of 2 images 5 x 7, by gradcam at conv"
