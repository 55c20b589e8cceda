"""Compute the pattern of an attention that torch computes as one function."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)
_BLOCK = 1 << 22  # scores in a block of queries: 16 MB
_FEWEST_QUERIES = 16  # in a block


class KernelArguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention`.

    The queries have the shape [..., head, query, width], keys and values [..., key head, key,
    width]. A scale of None is 1 / sqrt(width).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@final
@dataclass(slots=True)
class QueryBlocks:
    """The scores or the pattern of a long text, in blocks of queries as it is iterated over."""

    arguments: KernelArguments  # the arguments of the call
    is_pattern: bool  # whether the blocks are of the pattern, and not of the scores

    @property
    def shape(self) -> torch.Size:
        """The shape of all blocks joined: [..., head, query, key]."""
        return torch.Size((*self.arguments.query.shape[:-1], self.arguments.key.shape[-2]))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the blocks."""
        dtype = self.arguments.query.dtype
        return torch.float32 if dtype in _NARROW and not self.is_pattern else dtype

    def detached(self) -> QueryBlocks:
        """Return the blocks without the graph of autograd."""
        parts: list[Any] = [
            part.detach() if isinstance(part, Tensor) else part for part in self.arguments
        ]
        return QueryBlocks(KernelArguments(*parts), self.is_pattern)

    @property
    def query_dim(self) -> int:
        """The dimension of the queries in each block."""
        return self.arguments.query.dim() - 2

    @property
    def queries_per_block(self) -> int:
        """The number of queries in a block."""
        n_scores = (
            self.arguments.query.shape[:-2].numel() * self.arguments.key.shape[-2]
        )  # of a query
        return max(_BLOCK // max(n_scores, 1), _FEWEST_QUERIES)

    @property
    def has_several_blocks(self) -> bool:
        """Tell whether there is more than one block."""
        return self.arguments.query.shape[-2] > self.queries_per_block

    def __iter__(self) -> Iterator[Tensor]:
        """Compute one block after the other: [..., head, query, key]."""
        arguments, n = self.arguments, self.queries_per_block
        key = repeat_key_heads(_half_to_float32(arguments.key), arguments.query.shape[-3])
        may_lack_keys = arguments.attn_mask is not None
        for start in range(0, arguments.query.shape[-2], n):
            query, mask = (
                arguments.query[..., start : start + n, :],
                self._block_mask(start, start + n),
            )
            # No name holds the scores: each block must be freed before the next is made.
            if self.is_pattern:
                yield compute_pattern(
                    _scores(query, key, mask, arguments.scale),
                    query.dtype,
                    may_lack_keys=may_lack_keys,
                )
            else:
                yield _scores(query, key, mask, arguments.scale)

    def _block_mask(self, start: int, stop: int) -> Tensor | None:
        arguments = self.arguments
        if arguments.is_causal:
            rows = min(stop, arguments.query.shape[-2]) - start
            return _causal_mask(rows, arguments.key.shape[-2], start, arguments.query.device)
        mask = arguments.attn_mask
        return mask if mask is None or mask.shape[-2] == 1 else mask[..., start:stop, :]


def compute_scores(arguments: KernelArguments) -> Tensor:
    """Return the scaled and masked scores of a call, float32 if the queries are narrower."""
    query, key = (
        arguments.query,
        repeat_key_heads(_half_to_float32(arguments.key), arguments.query.shape[-3]),
    )
    mask = arguments.attn_mask
    if arguments.is_causal:
        mask = _causal_mask(query.shape[-2], key.shape[-2], 0, query.device)
    return _scores(query, key, mask, arguments.scale)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    query = _half_to_float32(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _scaled_product(query, key, scale)
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        return torch.where(mask, scores, -torch.inf)
    return scores + mask


def _scaled_product(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return scale * query @ key.T, by one call that reads and writes each number once."""
    is_plain = type(query) is Tensor and query.dim() > 2
    if not is_plain or query.shape[:-2] != key.shape[:-2]:
        return (query * scale) @ key.transpose(-2, -1)
    # The rows of the keys are copied in their order, and then transposed: a matmul of more than
    # three dimensions would copy them column by column.
    first, second = query.flatten(0, -3), key.flatten(0, -3).transpose(-2, -1)
    none = first.new_empty(1, 1, 1)  # which beta=0 leaves out
    scores = torch.baddbmm(none, first, second, beta=0, alpha=scale)
    return scores.view(*query.shape[:-1], key.shape[-2])


def _causal_mask(n_queries: int, n_keys: int, start: int, device: torch.device) -> Tensor:
    """Return whether each query may attend to each key, for queries from a start on."""
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).tril(start)


def _half_to_float32(value: Tensor) -> Tensor:
    return value.float() if value.dtype in _NARROW else value


def compute_pattern(scores: Tensor, dtype: torch.dtype, *, may_lack_keys: bool) -> Tensor:
    """Return the pattern of scores.

    A query without any key has a row of zeros, as the output of torch's function has.

    Args:
        scores: the scores.
        dtype: the dtype of the pattern.
        may_lack_keys: whether a mask may have left a query without any key.
    """
    without_key = scores.amax(-1, keepdim=True) == -torch.inf if may_lack_keys else None
    pattern = scores.softmax(-1)
    del scores  # frees them
    if without_key is not None:
        pattern = pattern.masked_fill(without_key, 0.0)
    return pattern.to(dtype)


def repeat_key_heads(value: Tensor, n_heads: int) -> Tensor:
    """Repeat the heads of keys or values, so that each head of the queries has its own."""
    groups = n_heads // value.shape[-3]
    return value if groups == 1 else value.repeat_interleave(groups, -3)
