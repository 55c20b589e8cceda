"""Read from the root's inputs which token each column of a pass is: padding, cache, positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.errors import StructureError
from hookline.verbs.edit.indices import Indices
from hookline.verbs.shared.token_inputs import (
    MASKS,
    TokenInputs,
    find_cache,
    n_cached_tokens,
    token_inputs,
)


@final
@dataclass(slots=True, eq=False)
class Tokens:
    """The tokens of one pass, on the CPU."""

    # The position of each token in its sequence, `(rows, tokens)`; -1 for padding.
    positions: Tensor
    lengths: Tensor  # the length of each token's sequence so far, cached tokens included
    # How many tokens, the last ones, the model's head gets; None if it gets all.
    n_kept: int | None = None
    # The tokens that the edits of a line have chosen, by `id()` of their indices.
    masks: dict[int, Tensor] = field(default_factory=dict)

    def chosen_mask(self, at: Indices) -> Tensor:
        """Return a mask of the chosen tokens."""
        mask = self.masks.get(id(at))
        if mask is None:
            mask = self.masks[id(at)] = at.match_tokens(self.positions, self.lengths)
        return mask

    def broadcast_mask(self, value: Tensor, at: Indices, *, in_order: bool = True) -> Tensor | None:
        """Return a mask of the chosen tokens that broadcasts to a value.

        Args:
            value: the value.
            at: chooses the tokens.
            in_order: whether tokens of all rows in a row stand in their order.

        Returns:
            The mask; None if the value has no dimension of tokens, or if it is not clear which.
        """
        mask, shape = self.chosen_mask(at), value.shape
        n_rows, n_tokens = mask.shape
        if value.is_nested or not shape:
            return None
        if shape[0] == n_rows * n_tokens and shape[:2] != mask.shape:
            return _flat_mask(mask, value, in_order=in_order)
        is_unclear = (value.dim() > 3 and shape[2] == n_tokens) or (
            value.dim() == 2 and value.is_floating_point()
        )
        if value.dim() < 2 or shape[1] != n_tokens or is_unclear:
            return None
        if shape[0] == n_rows:
            return add_trailing_dims(mask, value)
        is_shared = shape[0] == 1 and bool((mask == mask[:1]).all())
        return add_trailing_dims(mask[:1], value) if is_shared else None

    @property
    def is_numbered_by_column(self) -> bool:
        """Tell whether each column is the token of that number, in every row."""
        columns = torch.arange(self.positions.shape[1], device=self.positions.device)
        return bool((self.positions == columns).all())


def _flat_mask(mask: Tensor, value: Tensor, *, in_order: bool) -> Tensor | None:
    """Return a mask for a value in which the tokens of all rows stand in a row; None if unclear."""
    n_tokens = mask.shape[1]
    is_ordered = in_order or bool((mask == mask[:1, :1]).all())
    # Or the rows and heads in a row, as many as there are tokens.
    may_be_heads = value.dim() > 2 and n_tokens in value.shape[1:] and n_tokens > 1
    # Of one token, the heads and all keys of a row, those of the cache, too.
    may_be_keys = value.dim() > 3 and n_tokens == 1 and 1 not in value.shape[1:3]
    is_clear = is_ordered and not may_be_heads and not may_be_keys
    return mask.reshape(-1, *[1] * (value.dim() - 1)) if is_clear else None


def add_trailing_dims(mask: Tensor, value: Tensor) -> Tensor:
    """Give a mask of rows and tokens dimensions of size 1, so that it broadcasts to a value."""
    return mask.reshape(*mask.shape, *[1] * (value.dim() - 2))


def tokens_by_column(n_rows: int, n_tokens: int) -> Tokens:
    """Return the tokens of a value whose columns are numbered from 0 and have no padding."""
    positions = torch.arange(n_tokens, device="cpu").expand(n_rows, n_tokens)
    return Tokens(positions, torch.full_like(positions, n_tokens))


class PassTokens(NamedTuple):
    """The tokens of the stacks of a model in one pass; None for a stack without known tokens."""

    main: Tokens | None  # the tokens of the model; of an encoder and decoder, those of the encoder
    decoder: Tokens | None  # the tokens of the decoder of an encoder and decoder


def read_tokens(inputs: Mapping[str, Any]) -> PassTokens:
    """Read the tokens from the arguments of the root.

    Raises:
        StructureError: the mask or the cache does not tell which tokens the model gets.
    """
    named: dict[str, Any] = {}
    for name, value in inputs.items():
        named |= value if isinstance(value, Mapping) else {name: value}  # a batch is one argument
    sizes = _first_rows_and_tokens(named, "decoder_input_ids", "decoder_inputs_embeds", "labels")
    is_pair = "decoder_input_ids" in named or "decoder_inputs_embeds" in named
    if not is_pair:
        return PassTokens(
            _read_stack_tokens(named, _input_rows_and_tokens(named), has_cache=True), None
        )
    main = _read_stack_tokens(named, _input_rows_and_tokens(named), has_cache=False)
    return PassTokens(main, _read_stack_tokens(named, sizes, "decoder_", has_cache=True))


def _first_rows_and_tokens(named: Mapping[str, Any], *names: str) -> tuple[int, int] | None:
    """Return (rows, tokens) of the first argument that is given."""
    for name in names:
        value = named.get(name)
        if isinstance(value, Tensor) and value.dim() >= 2:
            return int(value.shape[0]), int(value.shape[1])
    return None


def _input_rows_and_tokens(named: Mapping[str, Any]) -> tuple[int, int] | None:
    sizes = _first_rows_and_tokens(named, "input_ids", "inputs_embeds")
    if sizes is not None:
        return sizes
    for name, value in named.items():
        if not isinstance(value, Tensor) or value.dim() != 2 or value.is_floating_point():
            continue
        if not any(word in name for word in ("mask", "position", "label", "type", "decoder")):
            return int(value.shape[0]), int(value.shape[1])
    return _first_rows_and_tokens(named, *MASKS)


def _read_stack_tokens(
    named: Mapping[str, Any], sizes: tuple[int, int] | None, prefix: str = "", *, has_cache: bool
) -> Tokens | None:
    if sizes is None:
        return None
    cache = find_cache(named) if has_cache else ()  # an encoder has none
    given = token_inputs(named, sizes, prefix, n_cached_tokens(cache))
    if given.n_cached is None and cache is not None and given.is_token is None:
        raise StructureError(
            f"at must know how many tokens are cached, got a {type(cache).__name__} that does not"
            " tell.\nPass attention_mask to the model, or in generate choose the prompt: steps=0."
        )
    n_kept = named.get("logits_to_keep")
    is_count = type(n_kept) is int and 0 < n_kept < sizes[1]
    return Tokens(*_positions_and_lengths(given), n_kept if is_count else None)


def _positions_and_lengths(given: TokenInputs) -> tuple[Tensor, Tensor]:
    """Return the position of each token, -1 for padding, and the length of its sequence.

    Several sequences may be packed into one row.
    """
    n_rows, n_tokens = given.shape
    is_present, starts = given.is_present, given.is_start
    positions = given.position_ids
    if positions is None:
        shape = n_rows, (given.n_cached or 0) + n_tokens
        columns = torch.ones(shape, dtype=torch.bool, device="cpu")
        is_token = columns if given.is_token is None else given.is_token
        positions = (is_token.cumsum(1) - 1)[:, is_token.shape[1] - n_tokens :]
        if given.borders is not None:
            positions = positions - positions.where(starts, 0).cummax(1).values
    sequence = starts.cumsum(1) - 1
    ends = torch.zeros(given.shape, dtype=torch.long, device="cpu")
    ends.scatter_reduce_(1, sequence, (positions + 1).where(is_present, 0), "amax")
    return positions.where(is_present, -1), ends.gather(1, sequence)
