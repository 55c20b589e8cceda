from __future__ import annotations

from importlib import resources

import pytest
import torch
from PIL import Image

from hookline.data import load_input
from hookline.data.images import open_picture
from hookline.errors import InputError
from hookline.models import LoadedModel


def test_a_picture_is_prepared_as_its_model_wants_it(resnet18, picture):
    batch = load_input(str(picture), resnet18)
    assert batch.description == "ramp.png, 1x3x224x224 float32"
    assert [image.size for image in batch.images] == [(300, 200)]
    assert torch.equal(batch.args[0][0], resnet18.preprocess(Image.open(picture)))


@pytest.mark.slow
def test_a_photograph_is_prepared_as_its_model_wants_it(resnet18):
    with resources.as_file(resources.files("sklearn.datasets.images") / "china.jpg") as photograph:
        batch = load_input(str(photograph), resnet18)
    assert batch.description == "china.jpg, 1x3x224x224 float32"
    assert batch.images[0].size == (640, 427)


def test_a_folder_of_pictures_is_one_batch_in_the_order_of_names(digits, tmp_path):
    for name, value in (("b.png", 255), ("a.JPG", 0), ("c.bmp", 128)):
        Image.new("L", (8, 8), value).save(tmp_path / name)
    (tmp_path / "notes.md").write_text("")
    (tmp_path / ".hidden").write_text("")
    batch = load_input(str(tmp_path), digits)
    assert batch.args[0].mean(dim=(1, 2, 3)).tolist() == pytest.approx([0, 1, 128 / 255])
    assert len(batch.images) == 3
    assert batch.description == (
        f"{tmp_path.name}/ (3 pictures, 1 other file left out), 3x1x8x8 float32"
    )


@pytest.mark.parametrize("n_pictures", [64, 65])
def test_a_folder_holds_at_most_64_pictures(digits, tmp_path, said, n_pictures):
    for index in range(n_pictures):
        Image.new("L", (8, 8)).save(tmp_path / f"{index:03d}.png")
    if n_pictures == 64:
        assert load_input(str(tmp_path), digits).args[0].shape == (64, 1, 8, 8)
        return
    with pytest.raises(InputError, match="at most 64 pictures for a batch, got 65") as raised:
        load_input(str(tmp_path), digits)
    assert "folder of their own" in said(raised)


def test_an_empty_folder_is_an_error(digits, tmp_path, said):
    with pytest.raises(InputError, match="must hold pictures, got 0 other files") as raised:
        load_input(str(tmp_path), digits)
    assert "Give a folder of .png" in said(raised)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # pillow's, before its own error
@pytest.mark.parametrize("kind", ["text", "empty", "cut"])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".gif", ".bmp", ".tiff", ".webp", ".ppm"])
def test_a_broken_picture_is_an_error(digits, picture, tmp_path, said, kind, suffix):
    whole = tmp_path / f"whole{suffix}"
    Image.open(picture).save(whole)
    content = whole.read_bytes()
    broken = tmp_path / f"broken{suffix}"
    broken.write_bytes({"text": b"no picture", "empty": b"", "cut": content[:30]}[kind])
    with pytest.raises(InputError, match="cannot be read as a picture") as raised:
        load_input(str(broken), digits)
    assert f"broken{suffix}" in said(raised)


def test_a_picture_that_was_held_sideways_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by a quarter
    Image.new("RGB", (40, 20)).save(tmp_path / "phone.jpg", exif=exif)
    assert open_picture(tmp_path / "phone.jpg").size == (20, 40)


def test_a_picture_for_a_model_of_text_is_an_error(minilm, linear, picture, said):
    for loaded in (minilm, linear):
        with pytest.raises(InputError, match=r"convert the pictures of .*ramp\.png") as raised:
            load_input(str(picture), loaded)
        assert "A model without one takes tensors." in said(raised)


def test_pictures_that_come_out_in_different_shapes_are_an_error(linear, tmp_path, said):
    loaded = LoadedModel("any size", linear.model, lambda image: torch.zeros(1, *image.size))
    for index in (1, 2):
        Image.new("L", (8, 8 * index)).save(tmp_path / f"{index}.png")
    with pytest.raises(InputError, match=r"2\.png and 1\.png differ in shape") as raised:
        load_input(str(tmp_path), loaded)
    assert "(1x8x16 float32 and 1x8x8 float32)" in said(raised)


def test_a_preparation_that_fails_is_an_error(linear, picture, said):
    def fail(image):
        raise KeyError("pixels")

    with pytest.raises(InputError, match=r"item 0 \(ramp\.png\) must load, got KeyError") as raised:
        load_input(str(picture), LoadedModel("odd", linear.model, fail))
    said(raised)
