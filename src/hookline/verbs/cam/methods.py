"""The formulas of class maps, one function a method.

Each takes the activations of a layer, shape `(batch, channels, height, width)`, and what it weighs
them by, and gives raw maps, shape `(batch, height, width)`; what is below zero counts as nothing
later. All are float32 or wider.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hookline.errors import InputError

Needs = Literal["gradients", "scores", "nothing"]


class Method(NamedTuple):
    """One way to make a class map.

    Args:
        name: what it is asked for by.
        formula: from activations, and what it needs, to raw maps.
        needs: the score's gradients with respect to the activations; the scores of the image
            masked by each channel, shape `(batch, channels)`; or nothing.
    """

    name: str
    formula: Callable[[Tensor, Tensor], Tensor]
    needs: Needs


def gradcam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Each channel, times the mean of its gradient (Selvaraju et al., 2017, "Grad-CAM")."""
    return _weighted(activations, gradients.mean((2, 3)))


def gradcam_plus_plus(activations: Tensor, gradients: Tensor) -> Tensor:
    """Each channel, times a mean of its positive gradients in which places weigh unlike.

    Chattopadhay et al., 2018, "Grad-CAM++", equations 11 and 19: for the exponential of the score
    the higher derivatives are powers of the gradient.
    """
    squares = gradients.square()
    below = 2 * squares + activations.sum((2, 3), keepdim=True) * squares * gradients
    alpha = squares / torch.where(below == 0, 1.0, below)
    return _weighted(activations, (alpha * gradients.relu()).sum((2, 3)))


def layercam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Each element, times its own gradient where that is positive (Jiang et al., 2021)."""
    return (activations * gradients.relu()).sum(1)


def hirescam(activations: Tensor, gradients: Tensor) -> Tensor:
    """Each element, times its own gradient (Draelos and Carin, 2020, "Use HiResCAM")."""
    return (activations * gradients).sum(1)


def eigencam(activations: Tensor, _: Tensor) -> Tensor:
    """The channels' first principal component (Muhammad and Yeasin, 2020, "Eigen-CAM").

    As in the paper the activations are not centred. A component has no sign of its own: it is
    given the one with which the map's sum is not negative.
    """
    places = activations.flatten(2).transpose(1, 2)  # (batch, places, channels)
    left, singular, _right = torch.linalg.svd(places, full_matrices=False)
    first = left[:, :, 0] * singular[:, :1]
    first = torch.where(first.sum(1, keepdim=True) < 0, -first, first)
    return first.reshape(len(first), *activations.shape[2:])


def scorecam(activations: Tensor, scores: Tensor) -> Tensor:
    """Each channel, times the softmax of the score of the image that it masks (Wang et al., 2020).

    The score of the baseline, which the paper subtracts, is the same for all channels: the softmax
    is the same without it.
    """
    return _weighted(activations, scores.softmax(1))


def _weighted(activations: Tensor, weights: Tensor) -> Tensor:
    return (activations * weights[:, :, None, None]).sum(1)


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
    """The method that is called so.

    Raises:
        InputError: there is none; the message shows close ones.
    """
    if isinstance(name, str) and name in METHODS:
        return METHODS[name]
    asked = str(name).lower().replace("-", "").replace("_", "").replace("plusplus", "++")
    close = difflib.get_close_matches(asked, METHODS, n=2, cutoff=0.6)
    hint = " or ".join(map(repr, close))
    advice = f"Did you mean {hint}?" if hint else "Give method='gradcam', or leave it out."
    raise InputError(f"method must be one of {', '.join(METHODS)}, got {name!r}.\n{advice}")


def scaled(maps: Tensor) -> Tensor:
    """Each map from 0, its least value, to 1, its largest; one that is the same all over is 0."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    span = high - low
    return (maps - low) / torch.where(span > 0, span, 1.0)
