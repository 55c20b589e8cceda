"""The formulas of class maps, one function a method.

Each function takes the activations of a layer, shape `(batch, channels, height, width)`, and the
weights that its method needs. It returns raw maps, shape `(batch, height, width)`. Values below
zero are cut later. All tensors are float32 or wider.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hookline.errors import InputError
from hookline.recordings.feature_maps import gradcam, sum_weighted_channels


class Method(NamedTuple):
    """A method that makes class maps."""

    name: str  # the name that `hl.cam` takes
    # A function from activations and weights to raw maps.
    formula: Callable[[Tensor, Tensor], Tensor]
    # The weights: "gradients" of the score with respect to the activations; "scores" of the image
    # masked by each channel, shape `(batch, channels)`; or "nothing".
    needs: Literal["gradients", "scores", "nothing"]


def gradcam_plus_plus(activations: Tensor, gradients: Tensor) -> Tensor:
    """Weigh each channel by a weighted mean of its positive gradients.

    Chattopadhay et al., 2018, "Grad-CAM++", equations 11 and 19. For the exponential of the score,
    the higher derivatives are powers of the gradient.
    """
    squares = gradients.square()
    below = 2 * squares + activations.sum((2, 3), keepdim=True) * squares * gradients
    alpha = squares / torch.where(below == 0, 1.0, below)
    return sum_weighted_channels(activations, (alpha * gradients.relu()).sum((2, 3)))


def layercam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Weigh each element by its own gradient where that is positive (Jiang et al., 2021)."""
    return (activations * gradients.relu()).sum(1)


def hirescam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Weigh each element by its own gradient (Draelos and Carin, 2020, "Use HiResCAM")."""
    return (activations * gradients).sum(1)


def eigencam(activations: Tensor, _: Tensor) -> Tensor:
    """Compute the channels' first principal component (Muhammad and Yeasin, 2020, "Eigen-CAM").

    As in the paper, the activations are not centred. A principal component has no sign, so the sign
    is chosen that makes the sum of the map not negative.
    """
    places = activations.flatten(2).transpose(1, 2)  # (batch, places, channels)
    left, singular, _right = torch.linalg.svd(places, full_matrices=False)
    first = left[:, :, 0] * singular[:, :1]
    first = torch.where(first.sum(1, keepdim=True) < 0, -first, first)
    return first.reshape(len(first), *activations.shape[2:])


def scorecam(activations: Tensor, scores: Tensor) -> Tensor:
    """Weigh each channel by the softmax of the score of the image masked by it (Wang et al., 2020).

    The paper subtracts the score of a baseline. That score is the same for all channels, so the
    softmax does not change without it.
    """
    return sum_weighted_channels(activations, scores.softmax(1))


METHODS = {
    method.name: method
    for method in (
        Method("gradcam", gradcam, "gradients"),
        Method("gradcam++", gradcam_plus_plus, "gradients"),
        Method("layercam", layercam, "gradients"),
        Method("hirescam", hirescam, "gradients"),
        Method("eigencam", eigencam, "nothing"),
        Method("scorecam", scorecam, "scores"),
    )
}


def method_named(name: str) -> Method:
    """Return the method with this name.

    Raises:
        InputError: the name is unknown; the message shows close names.
    """
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    key = str(name).lower().replace("-", "").replace("_", "").replace("plusplus", "++")
    close = difflib.get_close_matches(key, METHODS, n=2, cutoff=0.6)
    hint = " or ".join(map(repr, close))
    advice = f"Did you mean {hint}?" if hint else "Give method='gradcam', or leave it out."
    raise InputError(f"method must be one of {', '.join(METHODS)}, got {name!r}.\n{advice}")


def min_max_scaled(maps: Tensor) -> Tensor:
    """Scale each map from 0, its least value, to 1, its largest. A constant map becomes 0."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    span = high - low
    return (maps - low) / torch.where(span > 0, span, 1.0)
