"""Read the values of image models: class scores, and maps over the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MAX_PREFIX_TOKENS = 9  # a class token or two, and up to eight registers
# The classes of torch whose outputs with four dimensions have their channels second, or last.
_FIRST = frozenset(name for name in vars(nn) if name.endswith("2d")) | {"GroupNorm"}
_LAST = frozenset(("Linear", "LayerNorm"))

Size = tuple[int, int]


class ChannelCounts(NamedTuple):
    """The numbers of channels that a model's modules return second, and last."""

    second: frozenset[int] = frozenset()
    last: frozenset[int] = frozenset()

    def are_second(self, shape: tuple[int, ...]) -> bool:
        """Tell whether only the second dimension of a shape has the size of channels."""
        return shape[1] in self.second and shape[-1] not in self.last


_UNKNOWN = ChannelCounts()


class Grid(NamedTuple):
    """A way to read a value as maps of a height and a width."""

    form: str  # "channels first", "channels last" or "tokens"
    height: int
    width: int
    n_prefix: int = 0  # the number of tokens before the tokens of the picture

    def to_maps(self, value: Tensor) -> Tensor:
        """Return the value as maps, shape `(batch, channels, height, width)`."""
        if self.form == "channels first":
            return value
        if self.form == "tokens":
            shape = len(value), self.height, self.width, -1
            value = value[:, self.n_prefix :].reshape(shape)
        return value.permute(0, 3, 1, 2)


def find_grid(
    value: Tensor,
    n_images: int,
    size: Size,
    *,
    is_named: bool,
    module_type: str = "",
    channels: ChannelCounts = _UNKNOWN,
) -> Grid | None:
    """Find the way to read a value as maps of images of this size; None if it holds no maps.

    Args:
        value: the value.
        n_images: the number of images.
        size: their height and width.
        is_named: whether a user has named the layer: its maps may have another aspect ratio.
        module_type: the class of the module, which may tell where the channels are.
        channels: how many channels modules of the model return, which may tell it otherwise.
    """
    shape = tuple(value.shape) if value.layout is torch.strided and not value.is_nested else ()
    if not shape or shape[0] != n_images or not value.is_floating_point():
        return None
    if len(shape) == 4:
        is_first = module_type not in _LAST and channels.are_second(shape)
        return _find_channel_grid(shape, size, module_type, is_first=is_first, is_named=is_named)
    # A last dimension of 1 is pooled channels, and not tokens.
    return _find_token_grid(shape[1], size) if len(shape) == 3 and shape[2] > 1 else None


def _find_channel_grid(
    shape: tuple[int, ...], size: Size, module_type: str, *, is_first: bool, is_named: bool
) -> Grid | None:
    first, last = Grid("channels first", *shape[2:]), Grid("channels last", *shape[1:3])
    is_first = is_first or module_type in _FIRST
    is_last = module_type in _LAST or _aspect_error(last, size) < _aspect_error(first, size)
    best = last if is_last and not is_first and _fits_aspect_ratio(last, size) else first
    is_read = is_named or _fits_aspect_ratio(best, size) or (is_first and min(shape[2:]) > 1)
    return best if best.height * best.width > 1 and is_read else None


def channel_counts(model: nn.Module) -> ChannelCounts:
    """Return how many channels the modules of a model return, as far as their classes tell."""
    second, last = set(), set()
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            second.add(module.out_channels)
        elif isinstance(module, nn.BatchNorm2d):
            second.add(module.num_features)
        elif isinstance(module, nn.Linear):
            last.add(module.out_features)
        elif isinstance(module, nn.LayerNorm):
            last.add(module.normalized_shape[-1])
    return ChannelCounts(frozenset(second), frozenset(last))


def _fits_aspect_ratio(grid: Grid, size: Size) -> bool:
    """Tell whether maps have the images' aspect ratio, up to a row or column on either side."""
    return _aspect_error(grid, size) <= 2 * sum(size)


def _aspect_error(grid: Grid, size: Size) -> int:
    return abs(grid.height * size[1] - grid.width * size[0])


def _find_token_grid(n_tokens: int, size: Size) -> Grid | None:
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
    return sum_weighted_channels(activations, gradients.mean((2, 3)))


def sum_weighted_channels(maps: Tensor, weights: Tensor) -> Tensor:
    """Sum maps over channels by weights of shape `(batch, channels)`."""
    return (maps * weights[:, :, None, None]).sum(1)


def class_scores_in(output: Any) -> Tensor | None:
    """Return the class scores in a model's output, shape `(batch, classes)`; None without any.

    They are the output itself, its `logits`, or the first element of a tuple or list.

    >>> class_scores_in({"logits": torch.zeros(2, 10)}).shape
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
