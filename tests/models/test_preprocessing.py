from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import hookline as hl
from hookline.models.preprocessing import accept_any_mode, guess_preprocess


def as_tensor(picture):
    return torch.from_numpy(np.array(picture))


def test_the_guess_is_that_of_imagenet_models(resnet18, picture):
    image = Image.open(picture)
    guessed, published = guess_preprocess(image), resnet18.preprocess(image)
    assert guessed.dtype == torch.float32
    assert (guessed - published).abs().max() < 0.02  # one level of 255 is 0.017 of these


@pytest.mark.parametrize("size", [(1, 1), (10, 1000), (1000, 10), (256, 256), (257, 300)])
def test_the_guess_takes_pictures_of_any_size(size):
    assert guess_preprocess(Image.new("RGB", size)).shape == (3, 224, 224)


@pytest.mark.parametrize("order", ["<u2", ">u2"])
@pytest.mark.parametrize(
    "prepare", [guess_preprocess, accept_any_mode(as_tensor), accept_any_mode(as_tensor, "L")]
)
def test_a_picture_of_16_bits_is_that_of_8(prepare, order, tmp_path):
    levels = np.tile(np.arange(256), (256, 1))
    Image.fromarray(levels.astype("u1")).save(tmp_path / "8.tif")
    Image.fromarray((levels * 257).astype(order)).save(tmp_path / "16.tif")
    with Image.open(tmp_path / "8.tif") as expected, Image.open(tmp_path / "16.tif") as picture:
        assert picture.mode.startswith("I;16")
        assert torch.equal(prepare(picture), prepare(expected))


@pytest.mark.parametrize(("mode", "kind"), [("I", "whole numbers"), ("F", "floats")])
def test_a_picture_of_32_bits_is_refused(mode, kind):
    message = rf"8 or 16 bits a channel, got 32-bit {kind}\.\n.* tensor: a file \.npy"
    with pytest.raises(hl.InputError, match=message):
        guess_preprocess(Image.new(mode, (4, 4)))
