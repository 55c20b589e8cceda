from __future__ import annotations

import json
from importlib import resources

import pytest
import torch
from PIL import Image
from torch import nn

from hookline.models.demo import load_demo_digits, load_digits_net, preprocess_digit
from hookline.models.demo.net import DigitsNet
from hookline.models.demo.train import accuracy, load_splits, main

SHIPPED = resources.files("hookline.models.demo")


@pytest.mark.slow
def test_the_shipped_weights_reach_the_accuracy_that_is_claimed():
    about = json.loads((SHIPPED / "about.json").read_text())
    _, y_train, x_test, y_test = load_splits()
    assert (len(y_train), len(y_test)) == (about["n_train"], about["n_test"])
    measured = accuracy(load_digits_net(), x_test, y_test)
    assert measured == pytest.approx(about["accuracy"], abs=0.005)
    assert measured >= 0.98


@pytest.mark.slow
def test_the_shipped_digits_are_of_the_test_split():
    images, labels = load_demo_digits()
    assert images.shape == (8, 1, 8, 8)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert 0 <= images.min() < images.max() <= 1
    x_train, _, x_test, y_test = load_splits()
    for image, label in zip(images, labels, strict=True):
        same = (x_test == image).flatten(1).all(dim=1)
        assert y_test[same].tolist() == [label]
        assert not (x_train == image).flatten(1).all(dim=1).any()


def test_the_shipped_files_are_small():
    names = ("digits.safetensors", "samples.safetensors", "about.json")
    assert sum(len((SHIPPED / name).read_bytes()) for name in names) < 300_000


def test_the_network_has_an_in_place_relu_and_a_shortcut():
    net = DigitsNet()
    assert any(isinstance(m, nn.ReLU) and m.inplace for m in net.modules())
    block = net.block1
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    x = torch.rand(2, 20, 8, 8)
    assert torch.equal(block.eval()(x), x)  # with the convolutions silent, the shortcut is left


def test_a_picture_of_a_digit_is_recognised():
    images, labels = load_demo_digits()
    net = load_digits_net()
    for image, label in zip(images, labels, strict=True):
        pixels = (image[0] * 255).round().byte().numpy()
        large = Image.fromarray(pixels).resize((64, 64), Image.Resampling.NEAREST).convert("RGBA")
        assert net(preprocess_digit(large)[None]).argmax().item() == label
        deep = Image.fromarray(pixels.astype("uint16") * 257)  # 16 bits, as a scanner writes
        assert torch.equal(preprocess_digit(deep), preprocess_digit(Image.fromarray(pixels)))


@pytest.mark.slow
@pytest.mark.usefixtures("rng_unchanged")
def test_training_writes_the_files_and_is_the_same_each_time(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        main([str(tmp_path / name)], n_epochs=1)
    assert "% on 450 test pictures; files written to" in capsys.readouterr().out
    files = ("about.json", "digits.safetensors", "samples.safetensors")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == list(files)
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    shipped = (SHIPPED / "samples.safetensors").read_bytes()
    assert (tmp_path / "a" / "samples.safetensors").read_bytes() == shipped
