from __future__ import annotations

import pytest
import torch
from PIL import Image

from hookline.models.preprocessing import guess_preprocess


def test_the_guess_is_that_of_imagenet_models(resnet18, picture):
    image = Image.open(picture)
    guessed, published = guess_preprocess(image), resnet18.preprocess(image)
    assert guessed.dtype == torch.float32
    assert (guessed - published).abs().max() < 0.02  # one level of 255 is 0.017 of these


@pytest.mark.parametrize("size", [(1, 1), (10, 1000), (1000, 10), (256, 256), (257, 300)])
def test_the_guess_takes_pictures_of_any_size(size):
    assert guess_preprocess(Image.new("RGB", size)).shape == (3, 224, 224)
