"""Channels: the dimension that has them, by the module and the number of dimensions."""

from __future__ import annotations

import pytest

from hookline.statistics.channel_dim import channel_dim


@pytest.mark.parametrize(
    ("module_type", "n_dims", "dim"),
    [
        ("ConvBertLayer", 3, 2),
        ("Conv1d", 3, 1), ("Conv1d", 2, 0), ("Conv2d", 4, 1), ("Conv2d", 3, 0), ("Conv3d", 4, 0),
        ("ConvTranspose1d", 3, 1), ("BatchNorm1d", 2, 1), ("BatchNorm1d", 3, 1),
        ("GroupNorm", 3, 1), ("MaxPool1d", 3, 1), ("Conv1D", 3, 2), ("Linear", 4, 3),
        ("LayerNorm", 4, 3), ("ReLU", 2, 1), ("ReLU", 3, 2), ("ReLU", 4, 1), ("ReLU", 5, 1),
        ("ReLU", 1, None), ("Linear", 0, None),
    ],
)  # fmt: skip
def test_channels_are_in_the_dimension_of_the_module(module_type, n_dims, dim):
    assert channel_dim(n_dims, module_type) == dim
