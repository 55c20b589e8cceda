"""Make a random batch from `random:SHAPE[:DTYPE]`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hookline.errors import InputError, check_one_of
from hookline.models.loaded_model import Batch, LoadedModel, describe
from hookline.util.local_paths import printable

PREFIX = "random:"

_DTYPES = (
    "float32", "float", "float64", "double", "float16", "half", "bfloat16", "int64", "long",
    "int32", "int", "uint8", "bool",
)  # fmt: skip
_SEED = 0
_N_TOKENS = 100
_MAX_ELEMENTS = 2**31
_MAX_DIMENSIONS = 64  # torch's own limit
_N_DIGITS = 20  # more digits than any valid size has


def make_random(spec: str, loaded: LoadedModel) -> Batch:
    """Draw the input that `random:SHAPE[:DTYPE]` describes, from a fixed seed.

        >>> make_random("random:1x128:int64", loaded).description
        'random, 1x128 int64'

    Args:
        spec: `random:1x3x224x224`, or with a dtype: `random:1x128:int64`. The default dtype is
            float32. Floats are drawn from the normal distribution. Integers are drawn from 0 to
            99, or below the size of the model's vocabulary if that is smaller. For bool, true and
            false are equally likely.
        loaded: the model.

    Raises:
        InputError: the shape or the dtype is malformed, or the tensor would be too large.
    """
    match = re.fullmatch(r"random:([0-9]+(?:x[0-9]+)*)(?::(\w+))?", spec.strip(), re.IGNORECASE)
    if match is None:
        raise InputError(
            f"the input must be random:SHAPE or random:SHAPE:DTYPE, got {printable(spec)}.\n"
            "For instance random:1x3x224x224 for a picture, random:1x128:int64 for tokens."
        )
    name = (match[2] or "float32").lower()
    fix = f"Write random:{match[1]}:float32, for instance."
    check_one_of(f"the type in {spec!r}", name, _DTYPES, fix)
    shape = [int(size[:_N_DIGITS]) for size in re.split("x", match[1], flags=re.IGNORECASE)]
    if math.prod(shape) > _MAX_ELEMENTS or len(shape) > _MAX_DIMENSIONS:
        raise InputError(
            f"the shape must have at most {_MAX_ELEMENTS:,} numbers and {_MAX_DIMENSIONS}"
            f" dimensions, got {printable(spec)}.\nGive a smaller shape."
        )
    dtype = getattr(torch, name)
    if dtype.is_floating_point:
        tensor = seeded_normal(shape).to(dtype)
    else:
        high = 2 if dtype is torch.bool else min(_N_TOKENS, _vocabulary_size(loaded.model))
        tensor = seeded_integers(shape, high).to(dtype)
    return Batch((tensor,), {}, f"random, {describe(tensor)}")


def seeded_normal(shape: Sequence[int]) -> Tensor:
    """Draw floats from the normal distribution, from a fixed seed."""
    return torch.randn(shape, generator=_seeded_generator(), device="cpu")


def seeded_integers(shape: Sequence[int], high: int) -> Tensor:
    """Draw integers from 0 to below `high`, from a fixed seed."""
    return torch.randint(0, high, shape, generator=_seeded_generator(), device="cpu")


def _seeded_generator() -> torch.Generator:
    """Return a separate generator: torch's global random state is not consumed."""
    return torch.Generator().manual_seed(_SEED)


def _vocabulary_size(model: nn.Module) -> int:
    get = getattr(model, "get_input_embeddings", None)
    try:
        embeddings = get() if callable(get) else None
    except NotImplementedError:  # transformers raises it for a model without embeddings
        return _N_TOKENS
    return embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else _N_TOKENS
