"""Tell whether rounding flipped a choice, such as a router's experts among nearly equal scores."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeGuard

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
        ours: the first value, with the indices and the scores from which they were chosen.
        theirs: the second value.
        leaf: the leaf of the indices.
        equal_leaves: the leaves of tensors that are equal up to noise.
    """
    a, b = dict(arrays_in(ours)), dict(arrays_in(theirs))
    chosen, other = a.get(leaf), b.get(leaf)
    return any(
        _explains(a.get(scores), b.get(scores), chosen.long(), other.long())
        for scores in equal_leaves
        if _are_indices(chosen) and _are_indices(other)
    )


def _are_indices(array: Any) -> TypeGuard[Tensor]:
    return isinstance(array, Tensor) and array.dim() > 0 and array.dtype in _INTEGERS


def _explains(scores: Any, other_scores: Any, chosen: Tensor, other: Tensor) -> bool:
    if not (isinstance(scores, Tensor) and isinstance(other_scores, Tensor)):
        return False
    is_choice = (
        scores.is_floating_point()
        and scores.shape == other_scores.shape
        and scores.shape[:-1] == chosen.shape[:-1] == other.shape[:-1]
        and scores.shape[-1] > chosen.shape[-1] == other.shape[-1]
        and all(
            int(indices.min()) >= 0 and int(indices.max()) < scores.shape[-1]
            for indices in (chosen, other)
            if indices.numel()
        )
    )
    if not is_choice:
        return False
    exact, moved = scores.to(torch.float64), other_scores.to(scores.device, torch.float64)
    reach = 2 * (exact - moved).abs().amax(-1, keepdim=True)
    picked, picked_too = (
        exact.gather(-1, indices.to(exact.device)).sort(-1).values for indices in (chosen, other)
    )
    return bool(((picked - picked_too).abs() <= reach).all())
