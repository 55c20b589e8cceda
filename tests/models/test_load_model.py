from __future__ import annotations

import pytest
import torch

from hookline.errors import ModelError
from hookline.models import load_demo_digits, load_model

FORMS = (
    "The forms are torchvision:NAME, timm:NAME, hf:NAME, hf:FOLDER, path/to/file.py:FACTORY, "
    "package.module:FACTORY, demo:digits."
)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet18", ": did you mean torchvision:resnet18, timm:resnet18 or hf:resnet18?"),
        ("google/vit-base", ": did you mean hf:google/vit-base?"),
        ("./nets/vit", "."),
        (
            "resnet18.pth",
            ": a file of weights goes into a model: give that model's name, and weights=FILE.",
        ),
        ("torchvison:resnet18", ": did you mean torchvision:resnet18?"),
        ("torchvision:", ": torchvision:NAME was expected."),
        ("timm", ": timm:NAME was expected."),
        ("demo:letters", ": demo:digits was expected."),
        ("nets.py", ": which function makes the model? nets.py:FACTORY"),
        ("nets.py:", ": which function makes the model? nets.py:FACTORY"),
        ("nets.py:a-b", ": which function makes the model? nets.py:FACTORY"),
        ("https://example.org/x", "."),
        ("", "."),
    ],
)
def test_a_malformed_name_is_an_error_that_lists_the_forms(said, name, hint):
    with pytest.raises(ModelError) as raised:
        load_model(name)
    assert said(raised) == f"{name!r} does not name a model{hint}\n{FORMS}"


def test_a_bare_folder_of_transformers_is_an_error_with_the_form(minilm_folder, said):
    with pytest.raises(ModelError) as raised:
        load_model(str(minilm_folder))
    assert f"did you mean hf:{minilm_folder}?" in said(raised)


def test_the_demo_comes_with_preparation_and_labels():
    loaded = load_model("demo:digits")
    images, labels = load_demo_digits()
    assert loaded.name == "demo:digits"
    assert not loaded.model.training
    assert loaded.labels == tuple("0123456789")
    assert torch.equal(loaded.model(images).argmax(dim=1), labels)


@pytest.mark.usefixtures("rng_unchanged")
def test_random_weights_are_the_same_each_time():
    first, second = (load_model("demo:digits", weights="none").model for _ in range(2))
    assert torch.equal(first.head.weight, second.head.weight)
    shipped = load_model("demo:digits").model
    assert not torch.equal(first.head.weight, shipped.head.weight)


def test_weights_from_a_file(tmp_path):
    random = load_model("demo:digits", weights="none").model
    torch.save(random.state_dict(), tmp_path / "mine.pt")
    loaded = load_model("demo:digits", weights=tmp_path / "mine.pt").model
    assert torch.equal(loaded.head.weight, random.head.weight)


def test_weights_that_do_not_fit_name_the_file_and_the_model(tmp_path, said):
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ModelError, match=r"other\.pt does not fit demo:digits") as raised:
        load_model("demo:digits", weights=tmp_path / "other.pt")
    assert "38 missing (stem.conv.weight, stem.norm.weight, stem.norm.bias, ...)" in said(raised)


def test_a_missing_weights_file_is_found_before_the_model(said):
    with pytest.raises(ModelError, match=r"the checkpoint never\.pt is not there") as raised:
        load_model("package_that_is_not_there:make", weights="never.pt")
    said(raised)


@pytest.mark.parametrize(
    ("name", "weights"), [("~nobody-here/x.py:make", "default"), ("demo:digits", "~nobody-here/w")]
)
def test_a_home_that_is_not_known_is_part_of_the_path(name, weights):
    with pytest.raises(ModelError, match="~nobody-here/"):
        load_model(name, weights=weights)
