"""Find the cache of earlier tokens among the inputs of a model, and count its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

# The argument and the output of transformers that hold a cache; 5.24 has renamed them.
CACHES = ("cache", "past_key_values")
# Those of single models, too; a `state` only beside token ids, as in RWKV.
_ALL_CACHES = (*CACHES, "cache_params", "mems", "past_buckets_states")
# The method by which a cache of states tells whether it is in use.
_STATE = "has_previous_state"


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
