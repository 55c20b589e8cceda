"""The demo's files: weights and eight digits, written by `train.py`."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load
from torch import Tensor

from hookline.models.demo.net import DigitsNet
from hookline.models.preprocessing import to_8_bits

if TYPE_CHECKING:
    from PIL.Image import Image

_FOLDER = resources.files("hookline.models.demo")  # which may lie in a zip file


def load_demo_digits() -> tuple[Tensor, Tensor]:
    """Read eight handwritten digits, 0 to 7, that the demo's model was not trained on.

        >>> images, labels = load_demo_digits()
        >>> images.shape
        torch.Size([8, 1, 8, 8])

    Returns:
        The pictures, shape `(8, 1, 8, 8)`, float32 from 0 (dark) to 1 (light), and their labels,
        shape `(8,)`, int64.
    """
    samples = load((_FOLDER / "samples.safetensors").read_bytes())
    return samples["images"], samples["labels"]


def load_training_facts() -> dict[str, Any]:
    """Read the facts about the training of the demo's model.

        >>> load_training_facts()["n_test"]
        450

    Returns:
        A dict of `accuracy` (from 0 to 1, on the held-out digits), `n_train`, `n_test`, `n_epochs`,
        `seed`, `data`, and the versions of sklearn and torch.
    """
    facts: dict[str, Any] = json.loads((_FOLDER / "about.json").read_text("utf-8"))
    return facts


def load_digits_net(*, default_weights: bool = True) -> DigitsNet:
    """Build the demo's model.

        >>> images, labels = load_demo_digits()
        >>> load_digits_net()(images).argmax(dim=1)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])

    Args:
        default_weights: False leaves the weights random.

    Returns:
        The model, in eval mode.
    """
    net = DigitsNet()
    if default_weights:
        net.load_state_dict(load((_FOLDER / "digits.safetensors").read_bytes()))
    return net.eval()


def preprocess_digit(picture: Image) -> Tensor:
    """Prepare a picture of one light digit on a dark ground for the demo's model.

        >>> from PIL import Image
        >>> preprocess_digit(Image.new("RGB", (28, 28))).shape
        torch.Size([1, 8, 8])

    Args:
        picture: a picture of any mode and size; it is resized to 8x8.

    Returns:
        Shape `(1, 8, 8)`, float32 from 0 (dark) to 1 (light).

    Raises:
        InputError: the picture has 32 bits a channel.
    """
    # 4 is PIL.Image.Resampling.BOX: the mean over each cell, as in the data set itself.
    small = to_8_bits(picture).convert("L").resize((8, 8), 4)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / 255).unsqueeze(0)
