"""Functions for `keep=` that work query by query, so that no whole attention pattern is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine import QueryBlocks
from hookline.engine.pytree import describe, tree
from hookline.errors import AttachError, StructureError

_N_TRIED = 2  # queries that are given to the function alone
_TOLERANCE = 1e-3  # of the largest number
_ROUNDINGS = 8  # by which sums over a row may differ


@final
class ByQuery:
    """A function of each query's row; `hl.by_query` makes it.

    Args:
        function: the function, of rows of shape [..., query, key].
    """

    __slots__ = ("function",)

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function: Callable[[Any], Any] = function

    def __call__(self, value: Any) -> Any:
        """Return what the function makes of all rows.

        Args:
            value: the rows, or their blocks.

        Raises:
            StructureError: the value is no tensor of rows; or the function makes nothing for each
                row, or makes something else of a row if other rows are with it.
        """
        if not isinstance(value, QueryBlocks):
            if not isinstance(value, Tensor) or value.dim() < 2:
                raise StructureError(
                    f"hl.by_query must be given a tensor of rows, got {describe.in_words(value)}."
                    "\nSelect an attention pattern, such as 'h.3.attn@pattern'."
                )
            return self._call_and_check(value)
        blocks = iter(value)
        parts = [self._call_and_check(next(blocks)), *map(self.function, blocks)]
        columns = zip(*[_result_tensors(part) for part in parts], strict=True)
        joined = {id(column[0]): torch.cat(column, value.query_dim) for column in columns}
        return tree.map_tensors(lambda tensor: joined[id(tensor)], parts[0])

    def _call_and_check(self, rows: Tensor) -> Any:
        """Return the function's result, and check that it is made query by query."""
        result = self.function(rows)
        dim, n_rows = rows.dim() - 2, rows.shape[-2]
        for tensor in _result_tensors(result):
            if tensor.dim() <= dim or tensor.shape[dim] != n_rows:
                raise StructureError(
                    f"hl.by_query's function must make a result for each query, in dimension {dim},"
                    f" got {describe.shape(tensor)} of {describe.shape(rows)}."
                    "\nReduce the last dimension alone, as in lambda p: p.amax(-1); or give the"
                    " function to keep= itself, which computes the whole pattern."
                )
        if is_dynamo_compiling() or n_rows <= _N_TRIED:
            return result
        last = rows[..., -_N_TRIED:, :]
        rounding = _row_sum_rounding(last)
        for tensor, alone in zip(
            _result_tensors(result), _result_tensors(self.function(last)), strict=True
        ):
            if not _are_equal_up_to_rounding(
                tensor.narrow(dim, n_rows - _N_TRIED, _N_TRIED), alone, rounding
            ):
                raise StructureError(
                    "hl.by_query's function must make the same of a query whatever the other"
                    " queries are, got another result for the last queries alone.\nGive the"
                    " function to keep= itself, which computes the whole pattern."
                )
        return result


def _result_tensors(result: Any) -> list[Tensor]:
    return [tensor for _, tensor in tree.tensors(result)]


def _row_sum_rounding(rows: Tensor) -> float:
    """Return by how much rounding may change a sum over a row, such as one that cancels out."""
    if not rows.is_floating_point():
        return 0.0
    return (
        _ROUNDINGS
        * torch.finfo(rows.dtype).eps
        * _max_or_zero(_zero_non_finite(rows).abs().sum(-1))
    )


def _are_equal_up_to_rounding(first: Tensor, second: Tensor, rounding: float) -> bool:
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    # The entries of a long pattern are small: only what is measured says what is near.
    relative = max(_TOLERANCE, 2 * torch.finfo(first.dtype).eps)
    nearness = max(relative * _max_or_zero(_zero_non_finite(second).abs()), rounding)
    return torch.allclose(first, second, relative, nearness, equal_nan=True)


def _zero_non_finite(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor.detach(), 0)


def _max_or_zero(numbers: Tensor) -> float:
    return float(numbers.max()) if numbers.numel() else 0.0


def by_query(function: Callable[[Tensor], Any]) -> ByQuery:
    """Say that a function for `keep=` takes each query of an attention pattern alone.

    Then `hl.record` need not compute the whole pattern of a long text, which is a square of the
    number of tokens: the pattern is computed for some queries at a time, and the results are
    joined.

        >>> class Attention(nn.Module):
        ...     def forward(self, q, k, v):
        ...         return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> model = Attention()
        >>> entropy = hl.by_query(lambda pattern: torch.special.entr(pattern).sum(-1))
        >>> with hl.record(model, "@pattern", keep=entropy) as run:
        ...     _ = model(*torch.zeros(3, 1, 2, 4, 8))
        >>> run["@pattern"].shape
        torch.Size([1, 2, 4])

    `hl.monitor` and `hl.watch` take patterns in blocks without this.

    The blocks hold about 4 million scores, 16 MB, and at least 16 queries. The pattern is computed
    whole where it is no longer than a block, in compiled code, in a model that computes attention
    step by step, and where another hook takes the whole pattern.

    Args:
        function: a function of scores or patterns of shape [batch, head, query, key]. It returns a
            tensor, or several, with a result for each query in the place of the queries: [batch,
            head, query] or [batch, head, query, ...].

    Returns:
        A function for `keep=` of `hl.record`, `hl.features` and `hl.extract`.

    Raises:
        AttachError: `function` is not callable.
        StructureError: (when the model runs) the function has no result for each query, or the
            result of the last two queries depends on the others.
    """
    if not callable(function):
        raise AttachError(
            f"hl.by_query must be given a function, got {describe.in_words(function)}."
            "\nGive one such as lambda pattern: pattern.amax(-1)."
        )
    return ByQuery(function)
