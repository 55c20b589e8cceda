from __future__ import annotations

import pytest
import torch
from PIL import Image

from hookline.errors import ModelError
from hookline.models import load_model

# timm's smallest models that have labels and a preparation of their own.
NAME = "timm:test_resnet.r160_in1k"


@pytest.fixture(scope="module")
def test_resnet():
    return load_model(NAME, weights="none")


@pytest.mark.slow
def test_a_model_comes_with_the_published_preparation_and_labels(test_resnet):
    import timm

    assert test_resnet.name == NAME
    assert not test_resnet.model.training
    assert test_resnet.labels[0].startswith("tench")
    config = timm.data.resolve_model_data_config(test_resnet.model)
    picture = Image.linear_gradient("L").convert("RGB")
    published = timm.data.create_transform(**config)(picture)
    assert torch.equal(test_resnet.preprocess(picture.convert("L")), published)
    with torch.inference_mode():
        assert test_resnet.model(published[None]).shape == (1, 1000)


@pytest.mark.slow
@pytest.mark.usefixtures("rng_unchanged")
def test_random_weights_are_the_same_each_time(test_resnet):
    again = load_model(NAME, weights="none").model
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.parameters(), test_resnet.model.parameters(), strict=True)
    )


def test_an_unknown_name_is_an_error_with_close_matches(said):
    with pytest.raises(ModelError, match="timm has no model 'resnet18x'") as raised:
        load_model("timm:resnet18x")
    assert "Did you mean timm:resnet18" in said(raised)


def test_an_unknown_tag_is_an_error_with_the_tags_that_there_are(said):
    with pytest.raises(ModelError, match=r"timm has no model 'resnet18\.tv_in1'") as raised:
        load_model("timm:resnet18.tv_in1")
    assert "timm:resnet18.tv_in1k" in said(raised)


def test_weights_that_cannot_be_fetched_are_an_error_with_help(said):
    with pytest.raises(ModelError, match="its weights cannot be fetched") as raised:
        load_model(NAME)
    assert "--weights none for random weights" in said(raised)
    assert "weights='none'" in said(raised)
    assert "or --weights FILE" in said(raised)


def test_a_model_without_published_weights_is_an_error(said):
    with pytest.raises(ModelError, match="timm publishes no weights for botnet50ts_256") as raised:
        load_model("timm:botnet50ts_256")
    assert "--weights none" in said(raised)


def test_a_checkpoint_file_is_loaded(tmp_path, test_resnet):
    state = {key: value + 1 for key, value in test_resnet.model.state_dict().items()}
    torch.save(state, tmp_path / "mine.pt")
    loaded = load_model(NAME, weights=str(tmp_path / "mine.pt"))
    assert all(torch.equal(loaded.model.state_dict()[key], state[key]) for key in state)
