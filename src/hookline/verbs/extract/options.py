"""The options of `hl.extract` about what is kept, and how data is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

import torch

from hookline.engine.pytree import describe
from hookline.errors import InputError, check_positive_int


class Extracting(TypedDict, total=False):
    """The options of `hl.extract` about what is kept, and how data is loaded.

    Args:
        keep: what to keep of each value, as in `hl.record`.
        dtype: the dtype of floating tensors as stored; None keeps theirs.
        mask: for rows that are tokens: the key of the mask in a batch that is a dict, or a function
            that takes the batch and returns a mask of shape (items, tokens), or the length of each
            item. Values with a row a token are stored without padding. None: rows are items.
        inputs: a function that takes a batch and returns what the model takes; None takes all.
        workers: the processes that load data; 0 loads it in this one.
        on_error: "raise" stops at an item that cannot be loaded; "skip" leaves it out and lists it
            in `store.skipped`.
        preprocess: for a folder of images: the function that makes a tensor of a picture.
        tokenize: for text: a tokenizer of transformers, or a function that takes a list of strings
            and returns the batch.
        eval: False keeps the mode that the model is in.
        shard_bytes: about how large a shard is, in bytes.
        progress: False shows no progress bar; it is only shown in a terminal.
    """

    keep: Callable[[Any], Any] | None
    dtype: torch.dtype | None
    mask: str | Callable[[Any], torch.Tensor] | None
    inputs: Callable[[Any], Any] | None
    workers: int
    on_error: Literal["raise", "skip"]
    preprocess: Callable[[Any], Any] | None
    tokenize: Callable[..., Any] | None
    eval: bool
    shard_bytes: int
    progress: bool


def check_options(options: Extracting) -> None:
    """Check what is not checked where it is used.

    Raises:
        InputError: an option has another type, or is too small.
    """
    mask, inputs, n_bytes = options.get("mask"), options.get("inputs"), options.get("shard_bytes")
    if not (mask is None or isinstance(mask, str) or callable(mask)):
        raise InputError(
            f"mask must be a key of a batch, a function of one, or None, got"
            f" {describe.in_words(mask)}.\nGive one such as mask=lambda ids: ids != 0."
        )
    if inputs is not None and not callable(inputs):
        raise InputError(
            f"inputs must be a function of a batch, got {describe.in_words(inputs)}."
            "\nGive one such as inputs=lambda batch: batch[0]."
        )
    if "shard_bytes" in options:
        fix = "Leave it out, or give shard_bytes=32 * 1024**2."
        check_positive_int("shard_bytes", n_bytes, fix)
    if not isinstance(options.get("eval", True), bool):
        raise InputError(
            f"eval must be True or False, got {options['eval']!r}."
            "\nGive eval=False to keep the mode that the model is in."
        )
