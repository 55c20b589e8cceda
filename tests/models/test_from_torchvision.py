from __future__ import annotations

import pickle

import pytest
import torch
from PIL import Image

from hookline.errors import ModelError
from hookline.models import load_model
from hookline.models.torchvision_import import import_torchvision


def test_random_weights_have_published_preparation_and_labels(resnet18):
    vision = import_torchvision()
    assert type(resnet18.model) is vision.models.ResNet
    assert not resnet18.model.training
    assert resnet18.name == "torchvision:resnet18"
    assert resnet18.labels[:2] == ("tench", "goldfish")
    assert len(resnet18.labels) == 1000
    picture = Image.new("RGB", (400, 300), (10, 200, 30))
    published = vision.models.ResNet18_Weights.DEFAULT.transforms()(picture)
    assert torch.equal(resnet18.preprocess(picture), published)
    shared = pickle.loads(pickle.dumps(resnet18.preprocess))  # for processes that load pictures
    assert torch.equal(shared(picture), published)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_pictures_of_any_mode_can_be_prepared(resnet18, mode):
    assert resnet18.preprocess(Image.new(mode, (300, 260))).shape == (3, 224, 224)


@pytest.mark.usefixtures("rng_unchanged")
def test_random_weights_are_the_same_each_time(resnet18):
    again = load_model("torchvision:resnet18", weights="none")
    assert torch.equal(again.model.fc.weight, resnet18.model.fc.weight)


def test_a_segmenter_without_weights_downloads_no_backbone():
    loaded = load_model("torchvision:lraspp_mobilenet_v3_large", weights="none")
    assert loaded.labels[1] == "aeroplane"


def test_an_unknown_name_is_an_error_with_close_matches(said):
    with pytest.raises(ModelError, match="torchvision has no model 'resnet43'") as raised:
        load_model("torchvision:resnet43")
    assert "Did you mean torchvision:resnet" in said(raised)
    with pytest.raises(ModelError, match="Did you mean torchvision:resnet18,"):
        load_model("torchvision:ResNet18")
    with pytest.raises(ModelError) as raised:
        load_model("torchvision:zzz")
    assert "torchvision.models.list_models() lists the" in said(raised)


@pytest.fixture
def hub_dir(tmp_path):
    before = torch.hub.get_dir()
    torch.hub.set_dir(str(tmp_path))
    yield tmp_path
    torch.hub.set_dir(before)


def test_weights_that_cannot_be_fetched_are_an_error_with_help(hub_dir, said):
    with pytest.raises(ModelError) as raised:
        load_model("torchvision:resnet18")
    assert "its weights cannot be fetched (no connection to https://" in said(raised)
    assert "--weights none" in said(raised)
    assert "--weights FILE" in said(raised)
    assert not list(hub_dir.rglob("*.*"))


def cache(hub_dir, content) -> None:
    weights = import_torchvision().models.ResNet18_Weights.DEFAULT
    folder = hub_dir / "checkpoints"
    folder.mkdir()
    torch.save(content, folder / weights.url.rpartition("/")[2])


@pytest.mark.slow
def test_default_weights_are_read_from_torchs_cache(hub_dir, resnet18):
    state = {key: value + 1 for key, value in resnet18.model.state_dict().items()}
    cache(hub_dir, state)
    loaded = load_model("torchvision:resnet18")
    assert torch.equal(loaded.model.fc.weight, state["fc.weight"])


def test_a_cached_checkpoint_that_needs_unpickling_is_refused(hub_dir, resnet18):
    cache(hub_dir, {"fc": resnet18.model.fc})
    with pytest.raises(ModelError, match="needs unpickling"):
        load_model("torchvision:resnet18")


@pytest.mark.slow
def test_a_checkpoint_file_is_loaded(tmp_path, resnet18):
    state = {f"module.{key}": value + 1 for key, value in resnet18.model.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "mine.pth")
    loaded = load_model("torchvision:resnet18", weights=tmp_path / "mine.pth")
    assert torch.equal(loaded.model.fc.bias, state["module.fc.bias"])


def test_the_model_takes_what_its_preparation_gives(resnet18):
    x = resnet18.preprocess(Image.new("RGB", (300, 300)))
    with torch.inference_mode():
        assert resnet18.model(x[None]).shape == (1, 1000)
