"""Read the values of image models: class scores, and maps over the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_PREFIX_TOKENS = 9  # a class token or two, and up to eight registers

Size = tuple[int, int]


class Grid(NamedTuple):
    """A way to read a value as maps of a height and a width."""

    form: str  # "channels first", "channels last" or "tokens"
    height: int
    width: int
    n_prefix: int = 0  # the number of tokens before the tokens of the picture

    def read(self, value: Tensor) -> Tensor:
        """Return the value as maps, shape `(batch, channels, height, width)`."""
        if self.form == "channels first":
            return value
        if self.form == "tokens":
            shape = len(value), self.height, self.width, -1
            value = value[:, self.n_prefix :].reshape(shape)
        return value.permute(0, 3, 1, 2)


def grid_of(value: Tensor, n_images: int, size: Size, *, is_named: bool) -> Grid | None:
    """Find the way to read a value as maps of images of this size; None if it holds no maps.

    In a layer that a user has named, the maps may have another aspect ratio than the images.
    """
    shape = tuple(value.shape) if value.layout is torch.strided and not value.is_nested else ()
    if not shape or shape[0] != n_images or not value.is_floating_point():
        return None
    if len(shape) == 3:
        # A last dimension of 1 is pooled channels, and not tokens.
        return _tokens(shape[1], size) if shape[2] > 1 else None
    if len(shape) != 4:
        return None
    first, last = Grid("channels first", *shape[2:]), Grid("channels last", *shape[1:3])
    best = first if _misfit(first, size) <= _misfit(last, size) else last
    # Padding may add or remove a row or column on either side.
    fits = _misfit(best, size) <= 2 * sum(size)
    if not fits:
        best = first
    return best if best.height * best.width > 1 and (fits or is_named) else None


def _misfit(grid: Grid, size: Size) -> int:
    return abs(grid.height * size[1] - grid.width * size[0])


def _tokens(n_tokens: int, size: Size) -> Grid | None:
    """Find the grid of a picture's tokens: square patches that cover it, after prefix tokens."""
    height, width = size
    grids = {(height // side, width // side) for side in range(1, min(size) + 1)}
    grids |= {(-(-height // side), -(-width // side)) for side in range(1, min(size) + 1)}
    for n_prefix in range(min(MAX_PREFIX_TOKENS, n_tokens - 2) + 1):
        fitting = [grid for grid in grids if grid[0] * grid[1] == n_tokens - n_prefix]
        if fitting:
            best = min(fitting, key=lambda grid: abs(grid[0] * width - grid[1] * height))
            return Grid("tokens", *best, n_prefix)
    return None


def gradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Weigh each channel by the mean of its gradient (Selvaraju et al., 2017, "Grad-CAM").

    Args:
        activations: the maps of a layer, shape `(batch, channels, height, width)`.
        gradients: their gradients, of the same shape.

    Returns:
        The sum over channels, shape `(batch, height, width)`.
    """
    return weighted(activations, gradients.mean((2, 3)))


def weighted(maps: Tensor, weights: Tensor) -> Tensor:
    """Sum maps over channels by weights of shape `(batch, channels)`."""
    return (maps * weights[:, :, None, None]).sum(1)


def scores_in(output: Any) -> Tensor | None:
    """Return the class scores in a model's output, shape `(batch, classes)`; None without any.

    They are the output itself, its `logits`, or the first element of a tuple or list.

    >>> scores_in({"logits": torch.zeros(2, 10)}).shape
    torch.Size([2, 10])
    """
    scores = output
    if isinstance(output, Mapping):
        scores = output.get("logits")
    elif not isinstance(output, Tensor):
        scores = getattr(output, "logits", None)
        if scores is None and isinstance(output, tuple | list) and output:
            scores = output[0]
    is_scores = isinstance(scores, Tensor) and scores.dim() == 2 and scores.is_floating_point()
    return scores if is_scores else None
