"""Read from the inputs of a model which tokens a pass has: padding, cache, positions, packing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.pytree import describe
from hookline.errors import StructureError

# The argument and the output of transformers that hold a cache; 5.24 has renamed them.
CACHES = ("cache", "past_key_values")
# Those of single models, too; a `state` only beside token ids, as in RWKV.
_ALL_CACHES = (*CACHES, "cache_params", "mems", "past_buckets_states")
# The method by which a cache of states tells whether it is in use.
_STATE = "has_previous_state"
# The masks of one number for each token; whether a number other than 0 means a token.
MASKS = {"attention_mask": True, "src_key_padding_mask": False, "key_padding_mask": False}
_BORDERS = ("cu_seq_lens_q", "cu_seqlens_q", "cu_seqlens", "cu_seq_lens")


@final
@dataclass(frozen=True, eq=False)
class TokenInputs:
    """The tokens of one stack of a model in one pass, on the CPU."""

    shape: tuple[int, int]  # the number of rows, and of tokens in each, padding included
    # Which columns are no padding, `(rows, columns)`, those of the cache first; None without a
    # mask.
    is_token: Tensor | None
    # The position of each token, `(rows, tokens)`; None if none is given.
    position_ids: Tensor | None
    # Where packed sequences begin and end, `cu_seqlens`; None if none is given.
    borders: Tensor | None
    # How many columns of each row the cache holds; None if the inputs do not tell.
    n_cached: int | None

    @property
    def is_present(self) -> Tensor:
        """Which of the tokens of this pass are no padding, `(rows, tokens)`."""
        if self.is_token is None:
            return torch.ones(self.shape, dtype=torch.bool, device="cpu")
        return self.is_token[:, self.is_token.shape[1] - self.shape[1] :]

    @property
    def is_start(self) -> Tensor:
        """Mark the first token of each sequence, `(rows, tokens)`, also of those packed into a row.

        Raises:
            StructureError: `cu_seqlens` does not cover the tokens.
        """
        starts = torch.zeros(self.shape, dtype=torch.bool, device="cpu")
        starts[:, :1] = True
        if self.borders is not None:
            if int(self.borders[0]) != 0 or int(self.borders[-1]) != starts.numel():
                raise StructureError(
                    f"cu_seqlens must go from 0 to the {starts.numel()} tokens, got"
                    f" {int(self.borders[0])} to {int(self.borders[-1])}."
                    "\nPass the borders of all sequences in the batch."
                )
            starts.view(-1)[self.borders[:-1]] = True
        elif self.position_ids is not None:
            goes_on = self.is_present[:, 1:] & self.is_present[:, :-1]
            starts[:, 1:] |= goes_on & (self.position_ids[:, 1:] <= self.position_ids[:, :-1])
        return starts


def token_inputs(
    inputs: Mapping[str, Any], shape: tuple[int, int], prefix: str = "", n_cached: int | None = None
) -> TokenInputs:
    """Read the tokens of a stack.

    Args:
        inputs: the arguments of the model by name.
        shape: the number of rows and tokens.
        prefix: what the names of the stack's arguments begin with: "decoder_", or nothing.
        n_cached: how many tokens of each row the cache holds, if it is at hand.

    Raises:
        StructureError: the mask has not one number for each token.
    """
    is_token = _token_mask(inputs, shape, prefix, n_cached)
    position_ids = _position_ids(inputs, shape, prefix)
    if n_cached is None:
        n_cached = _n_cached_by_inputs(inputs, shape, is_token)
    borders = [inputs.get(name) for name in _BORDERS if not prefix]
    given = next((border for border in borders if isinstance(border, Tensor)), None)
    flat = None if given is None else given.detach().cpu().flatten().long()
    return TokenInputs(shape, is_token, position_ids, flat, n_cached)


def _token_mask(
    inputs: Mapping[str, Any], shape: tuple[int, int], prefix: str, n_cached: int | None
) -> Tensor | None:
    """Return which cached and present columns are tokens; None without a mask."""
    names = MASKS if not prefix else {f"{prefix}attention_mask": True}
    name = next((name for name in names if isinstance(inputs.get(name), Tensor)), None)
    if name is None:
        return None
    mask: Tensor = inputs[name]
    mask = mask[None] if mask.dim() == 1 else mask
    n_rows, n_tokens = shape
    n_all = None if n_cached is None else n_cached + n_tokens
    has_columns = mask.dim() == 2 and (
        mask.shape[1] >= n_tokens if n_all is None else mask.shape[1] == n_all
    )
    if not has_columns or mask.shape[0] not in (1, n_rows):
        raise StructureError(
            f"{name} must have a number for each token, [{n_rows}, {n_all or n_tokens}], got"
            f" {describe.shape(mask)}.\nPass a mask of two dimensions. In generate, use the default"
            " cache, since a static one makes a mask of four."
        )
    is_token = mask.detach().cpu() != 0
    is_addend = mask.is_floating_point() and bool((mask < 0).any())  # 0 for tokens
    if is_addend or not names[name]:
        is_token = ~is_token
    return is_token.expand(n_rows, -1)


def _position_ids(inputs: Mapping[str, Any], shape: tuple[int, int], prefix: str) -> Tensor | None:
    given = inputs.get(f"{prefix}position_ids")
    if not isinstance(given, Tensor) or given.is_floating_point():
        return None
    given = given[None] if given.dim() == 1 else given
    # Others have three positions a token, such as of text and images.
    if given.dim() != 2 or given.shape[1] != shape[1] or given.shape[0] not in (1, shape[0]):
        return None
    return given.detach().cpu().long().expand(shape)


def _n_cached_by_inputs(
    inputs: Mapping[str, Any], shape: tuple[int, int], is_token: Tensor | None
) -> int | None:
    """Return how many columns the cache holds, as the inputs beside it tell."""
    if is_token is not None and is_token.shape[1] > shape[1]:
        return int(is_token.shape[1] - shape[1])
    places = inputs.get("cache_position")
    if isinstance(places, Tensor) and places.numel():
        return int(places.flatten()[0])
    return None


# -- the cache ------------------------------------------------------------------------------------


def find_cache(inputs: Mapping[str, Any]) -> Any:
    """Return the cache among the arguments of a model; None without one."""
    is_of_ids = "input_ids" in inputs or "inputs_embeds" in inputs
    names = (*_ALL_CACHES, "state") if is_of_ids else _ALL_CACHES
    return next((inputs[name] for name in names if inputs.get(name) is not None), None)


def n_cached_tokens(cache: Any) -> int | None:
    """Return the number of tokens in a cache; None if it does not tell.

    `generate` begins with a cache of 0.
    """
    count, has_state = (getattr(cache, name, None) for name in ("get_seq_length", _STATE))
    if callable(count):
        with suppress(Exception):  # a cache of states alone has no length
            return int(count())
        with suppress(Exception):
            return None if has_state is None or has_state() else 0
    if isinstance(cache, tuple | list):
        if not cache:
            return 0
        layer = cache[0]
        keys = layer[0] if isinstance(layer, tuple | list) and layer else None
        return int(keys.shape[-2]) if isinstance(keys, Tensor) and keys.dim() == 4 else None
    return None
