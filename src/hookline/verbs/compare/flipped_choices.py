"""Tell whether rounding flipped a choice, such as a router's experts among nearly equal scores."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hookline.engine.pytree.tree import Leaf
from hookline.verbs.compare.measure import arrays_in

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def is_flipped_by_noise(ours: Any, theirs: Any, leaf: Leaf, equal_leaves: Collection[Leaf]) -> bool:
    """Tell whether scores in the same values explain why indices differ.

    Scores that moved by at most `d` can only swap their order if they lie within `2 d`. So both
    choices must pick scores that lie so close, of each vector.

    Args:
        ours: the first value, with the indices and the scores from which they were chosen: the
            last dimension of the indices is shorter, as of `topk`, or missing, as of `argmax`.
        theirs: the second value.
        leaf: the leaf of the indices.
        equal_leaves: the leaves of tensors that are equal up to noise.
    """
    a, b = dict(arrays_in(ours)), dict(arrays_in(theirs))
    chosen = a.get(leaf), b.get(leaf)
    if not all(isinstance(indices, Tensor) and indices.dtype in _INTEGERS for indices in chosen):
        return False
    return any(_scores_explain((a.get(scores), b.get(scores)), chosen) for scores in equal_leaves)


def _scores_explain(scores: tuple[Any, Any], chosen: tuple[Any, Any]) -> bool:
    if not all(isinstance(part, Tensor) and part.is_floating_point() for part in scores):
        return False
    first, second = (part.to("cpu", torch.float64) for part in scores)
    if first.shape != second.shape or not first.dim():
        return False
    picked = [_picked_scores(first, indices.cpu().long()) for indices in chosen]
    if picked[0] is None or picked[1] is None or picked[0].shape != picked[1].shape:
        return False
    reach = 2 * (first - second).abs().amax(-1, keepdim=True)
    return bool(((picked[0] - picked[1]).abs() <= reach).all())


def _picked_scores(scores: Tensor, indices: Tensor) -> Tensor | None:
    """Return the scores at indices of the last dimension, sorted; None if they are no indices."""
    if indices.shape == scores.shape[:-1]:
        indices = indices[..., None]
    n = scores.shape[-1]
    is_shorter = indices.dim() == scores.dim() and indices.shape[-1] < n
    if not is_shorter or indices.shape[:-1] != scores.shape[:-1]:
        return None
    if not bool(((indices >= 0) & (indices < n)).all()):
        return None
    return scores.gather(-1, indices).sort(-1).values
