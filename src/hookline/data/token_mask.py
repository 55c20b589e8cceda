"""Find the tokens of a batch by its mask, or by the length of each item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hookline.engine.pytree import describe
from hookline.errors import InputError
from hookline.stores.batch_columns import Tokens

Mask = str | Callable[[Any], Tensor] | None
DEFAULT_MASK = "attention_mask"


def tokens_of(data: Any, mask: Mask, n_items: int) -> Tokens | None:
    """Find the tokens of a batch.

    Args:
        data: the batch, as the model takes it.
        mask: the key of the mask in a batch that is a dict; or a function that takes the batch and
            returns a mask of shape (items, tokens) or a length for each item.
        n_items: how many items the batch has.

    Returns:
        The tokens; None if the mask is None, or the default key, and the batch has none.

    Raises:
        InputError: the batch does not have the key, or the value is neither a mask nor lengths of
            the batch's items.
    """
    value = _value_of(mask, data)
    if value is None:
        return None
    try:
        marks = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise _no_mask(value) from None
    if marks.is_complex() or marks.ndim not in (1, 2):
        raise _no_mask(value)
    ids = _ids(data)
    if len(marks) != n_items:
        raise InputError(
            f"mask must give a row or a length for each of the {n_items} items of a batch, got"
            f" {describe.in_words(marks)}.\nLook at what it gives for one batch."
        )
    if marks.ndim == 1 and not marks.is_floating_point() and marks.dtype is not torch.bool:
        marks = _mask_of(marks, None if ids is None else ids.shape[1])
    elif marks.ndim == 1:
        raise _no_mask(value)
    _check_mask(marks, ids)
    marks = marks.bool()
    return Tokens(marks, marks.sum(1).tolist(), None if ids is None else ids.cpu()[marks])


def _value_of(mask: Mask, data: Any) -> Any:
    """Return the mask or the lengths of a batch; None without one.

    Raises:
        InputError: the batch does not have the key.
    """
    if not isinstance(mask, str):
        return None if mask is None else mask(data)
    if isinstance(data, Mapping) and mask in data:
        return data[mask]
    if mask == DEFAULT_MASK:
        return None
    keys = f"a dict with {', '.join(map(repr, data))}" if isinstance(data, Mapping) else ""
    raise InputError(
        f"mask must be a key of the batch, got {mask!r} for {keys or describe.in_words(data)}."
        "\nGive the key of its mask, a function of the batch, or None for a row an item."
    )


def _no_mask(value: Any) -> InputError:
    return InputError(
        f"mask must give a mask of shape (items, tokens) or a length for each item, got"
        f" {describe.in_words(value)}.\nGive the key of the mask in the batch, such as"
        " mask='attention_mask', or a function such as mask=lambda ids: ids != 0."
    )


def _mask_of(lengths: Tensor, longest: int | None) -> Tensor:
    """Make a mask of lengths.

    Raises:
        InputError: a length is negative, or above the number of tokens.
    """
    most = int(lengths.max()) if longest is None else longest
    bad = lengths[(lengths < 0) | (lengths > most)]
    if len(bad):
        raise InputError(
            f"mask must give lengths from 0 to {most}, the tokens of the batch, got"
            f" {int(bad[0])}.\nGive the number of tokens of each item."
        )
    return torch.arange(most) < lengths[:, None]


def _check_mask(mask: Tensor, ids: Tensor | None) -> None:
    """Check that a mask is of the batch's tokens, and not one that is added to scores.

    Raises:
        InputError: it has another shape than the ids, or a number that is negative or NaN.
    """
    if ids is not None and mask.shape != ids.shape:
        raise InputError(
            f"mask must have the shape of the ids of tokens, {list(ids.shape)}, got"
            f" {list(mask.shape)}.\nGive a mask of shape (items, tokens)."
        )
    if not bool((mask >= 0).all()):
        raise InputError(
            "mask must be 0 where a token does not count and positive where it does, got numbers"
            " below 0 or NaN.\nOf a mask that is added to scores give mask=lambda batch:"
            " batch['attention_mask'] == 0."
        )


def _ids(data: Any) -> Tensor | None:
    """Return the ids of tokens: the batch's `input_ids`, or a batch that is integers itself."""
    ids = data.get("input_ids") if isinstance(data, Mapping) else data
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return None
    return ids
