"""How the values of image models are read: by shape alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hookline.recordings.feature_maps import Grid, channel_counts, class_scores_in, find_grid


@pytest.mark.parametrize(
    ("shape", "size", "grid"),
    [
        ((2, 8, 7, 7), (224, 224), Grid("channels first", 7, 7)),
        ((2, 7, 7, 96), (224, 224), Grid("channels last", 7, 7)),
        ((2, 196, 8), (224, 224), Grid("tokens", 14, 14)),
        ((2, 197, 8), (224, 224), Grid("tokens", 14, 14, 1)),
        ((2, 261, 8), (224, 224), Grid("tokens", 16, 16, 5)),
        ((2, 13, 8), (64, 48), Grid("tokens", 4, 3, 1)),
        ((2, 10, 8), (224, 224), Grid("tokens", 3, 3, 1)),
        ((2, 17, 1), (224, 224), None),
        ((3, 196, 8), (224, 224), None),
        ((2, 8), (224, 224), None),
    ],
)
def test_a_value_is_read_as_maps_of_its_images(shape, size, grid):
    assert find_grid(torch.zeros(shape), 2, size, is_named=False) == grid


@pytest.mark.parametrize(
    ("shape", "module_type", "grid"),
    [
        ((2, 8, 8, 16), "Conv2d", Grid("channels first", 8, 16)),
        ((2, 8, 8, 16), "MaxPool2d", Grid("channels first", 8, 16)),
        ((2, 8, 8, 16), "GroupNorm", Grid("channels first", 8, 16)),
        ((2, 8, 8, 16), "Block", Grid("channels last", 8, 8)),
        ((2, 8, 8, 8), "Linear", Grid("channels last", 8, 8)),
        ((2, 16, 1, 1), "Conv2d", None),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_a_module_of_a_known_class_has_known_channels(shape, module_type, grid, is_named):
    value = torch.zeros(shape)
    assert find_grid(value, 2, (16, 16), is_named=is_named, module_type=module_type) == grid


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ((), "channels last"),
        ((nn.Conv2d(1, 8, 3),), "channels first"),
        ((nn.BatchNorm2d(8),), "channels first"),
        ((nn.Conv2d(1, 8, 3), nn.Linear(8, 16)), "channels last"),
        ((nn.Conv2d(1, 8, 3), nn.LayerNorm(16)), "channels last"),
    ],
)
def test_the_models_channels_tell_what_no_class_does(more, form):
    channels = channel_counts(nn.Sequential(*more))
    grid = find_grid(torch.zeros(2, 8, 8, 16), 2, (16, 16), is_named=True, channels=channels)
    assert grid.form == form


def test_tokens_and_channels_last_become_channels_first():
    tokens = torch.rand(2, 7, 5)
    maps = Grid("tokens", 2, 3, 1).to_maps(tokens)
    assert maps.shape == (2, 5, 2, 3)
    assert torch.equal(maps[1, :, 1, 2], tokens[1, 6])
    last = torch.rand(2, 2, 3, 5)
    assert torch.equal(Grid("channels last", 2, 3).to_maps(last)[0, :, 1, 0], last[0, 1, 0])


def test_class_scores_are_found_in_what_models_return():
    scores = torch.rand(2, 10)
    holder = SimpleNamespace(loss=None, logits=scores)
    for output in (scores, {"loss": None, "logits": scores}, (scores, None), holder):
        assert class_scores_in(output) is scores
    for output in (None, {}, (), torch.rand(2), torch.ones(2, 3, dtype=torch.int64)):
        assert class_scores_in(output) is None
