"""Compute the pattern of an attention that torch computes as one function."""

from __future__ import annotations

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)


def scores_of(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Return the scores of `scaled_dot_product_attention`, with scale and mask.

    Scores of half precision are computed, and returned, in single precision.

    Args:
        query: the queries, of shape [..., head, query, width].
        key: the keys, of shape [..., key head, key, width].
        mask: a mask as torch takes it, or None.
        is_causal: whether a query attends to no later key.
        scale: the factor of the products; None is 1 / sqrt(width).
    """
    if query.dtype in _NARROW:
        query, key = query.float(), key.float()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * scale) @ by_query_head(key, query.shape[-3]).transpose(-2, -1)
    if is_causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    return scores + mask


def pattern_of(scores: Tensor, dtype: torch.dtype, *, may_lack_keys: bool) -> Tensor:
    """Return the pattern of scores.

    A query without any key has a row of zeros, as the output of torch's function has.

    Args:
        scores: the scores.
        dtype: the dtype of the pattern.
        may_lack_keys: whether a mask may have left a query without any key.
    """
    pattern = scores.softmax(-1)
    if may_lack_keys:
        without_key = scores.amax(-1, keepdim=True) == -torch.inf
        pattern = pattern.masked_fill(without_key, 0.0)
    return pattern.to(dtype)


def by_query_head(value: Tensor, n_heads: int) -> Tensor:
    """Repeat the heads of keys or values, so that each head of the queries has its own."""
    groups = n_heads // value.shape[-3]
    return value if groups == 1 else value.repeat_interleave(groups, -3)
