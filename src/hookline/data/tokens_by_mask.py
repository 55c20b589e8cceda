"""Find the tokens of a batch by its mask, or by the length of each item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.engine.pytree import describe, tree
from hookline.errors import InputError
from hookline.stores.batch_columns import BatchTokens

DEFAULT_MASK = "attention_mask"
_DECODER_MASK = "decoder_attention_mask"
# In a model with a decoder, the inputs that have a column for each of its tokens.
_OF_A_DECODER = (_DECODER_MASK, "decoder_input_ids", "labels")


@final
@dataclass(frozen=True)
class MaskOption:
    """The option `mask=` of `hl.extract`."""

    # The key of the mask in a batch that is a dict; or a function that takes the batch and returns
    # a mask of shape (items, tokens) or a length for each item; or None.
    value: str | Callable[[Any], Tensor] | None = DEFAULT_MASK
    # Whether the user gave it. A batch may lack the key by default.
    is_given: bool = False


class BatchAndInputs(NamedTuple):
    """A batch, and what the model takes of it."""

    inputs: Any  # what the model takes: here keys are looked up first, because `inputs=` may cut
    batch: Any  # the batch, as a function `mask=` takes it
    n_items: int  # how many items the batch has
    has_decoder: bool = False  # whether the model is an encoder and a decoder by its config

    def get(self, key: str) -> Any:
        """Return the value of a key in the inputs or else in the batch; None if neither has it."""
        places = (self.inputs, self.batch)
        return next((at[key] for at in places if isinstance(at, Mapping) and key in at), None)

    def shape_of(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of the value of a key; None if there is none."""
        value = self.get(key)
        return None if value is None else tuple(getattr(value, "shape", ()))


def find_tokens(given: BatchAndInputs, mask: MaskOption) -> BatchTokens | None:
    """Find the tokens of a batch.

    Returns:
        The tokens; None if the mask is None, or the default key, and the batch has none.

    Raises:
        InputError: the batch does not have the key, or the value is neither a mask nor lengths of
            the batch's items.
    """
    value = _mask_or_lengths(mask, given)
    if value is None:
        return None
    try:
        marks = torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise _no_mask_error(value) from None
    if marks.is_complex() or marks.ndim not in (1, 2):
        raise _no_mask_error(value)
    if len(marks) != given.n_items:
        raise InputError(
            f"mask must give a row or a length for each of the {given.n_items} items of a batch,"
            f" got {describe.in_words(marks)}.\nLook at what it gives for one batch."
        )
    decoder = _decoder_key(given)
    ids = _find_token_ids(given, _ids_key(mask, decoder), marks)
    if marks.ndim == 1:
        if marks.is_floating_point() or marks.dtype is torch.bool:
            raise _no_mask_error(value)
        if decoder and ids is None:
            raise InputError(
                "mask must give a mask of shape (items, tokens) for a model with a decoder, got"
                " a length for each item.\nMake it of the lengths: torch.arange(n_tokens) <"
                " lengths[:, None]."
            )
        marks = _lengths_to_mask(marks, None if ids is None else ids.shape[1])
    _check_mask(marks, ids)
    marks = marks.bool()
    rival = None
    if not mask.is_given and decoder and given.shape_of(decoder) == tuple(marks.shape):
        rival = decoder
    return BatchTokens(
        marks, marks.sum(1).tolist(), None if ids is None else ids.cpu()[marks], rival
    )


def _mask_or_lengths(mask: MaskOption, given: BatchAndInputs) -> Any:
    """Return the mask or the lengths of a batch; None without one."""
    key = mask.value
    if not isinstance(key, str):
        return None if key is None else key(given.batch)
    value = given.get(key)
    if value is not None and (mask.is_given or _is_mask_of_inputs(key, given)):
        return value
    if not mask.is_given:
        return None
    keys = f"a dict with {', '.join(map(repr, given.batch))}" * isinstance(given.batch, Mapping)
    raise InputError(
        f"mask must be a key of the batch, got {key!r} for"
        f" {keys or describe.in_words(given.batch)}."
        "\nGive the key of its mask, a function of the batch, or None for a row an item."
    )


def _is_mask_of_inputs(key: str, given: BatchAndInputs) -> bool:
    """Tell whether a mask is of what the model takes: the rest of a batch may have one, too."""
    if isinstance(given.inputs, Mapping) and key in given.inputs:
        return True
    shape = given.shape_of(key)
    return any(tuple(tensor.shape[:2]) == shape for _, tensor in tree.tensors(given.inputs))


def _decoder_key(given: BatchAndInputs) -> str | None:
    """Return the key of a decoder's tokens in a batch; None if the model has no decoder."""
    keys = [key for key in _OF_A_DECODER if len(given.shape_of(key) or ()) == 2]
    # A model that is a decoder alone has labels of the tokens that it reads.
    return keys[0] if keys and (given.has_decoder or keys != ["labels"]) else None


def _ids_key(mask: MaskOption, decoder: str | None) -> str | None:
    """Return the key of the ids of the tokens; None if either side's tokens may be meant."""
    if decoder is None or mask.value == DEFAULT_MASK:
        return "input_ids"
    return "decoder_input_ids" if mask.value == _DECODER_MASK else None


def _no_mask_error(value: Any) -> InputError:
    return InputError(
        f"mask must give a mask of shape (items, tokens) or a length for each item, got"
        f" {describe.in_words(value)}.\nGive the key of the mask in the batch, such as"
        " mask='attention_mask', or a function such as mask=lambda ids: ids != 0."
    )


def _lengths_to_mask(lengths: Tensor, longest: int | None) -> Tensor:
    """Make a mask of lengths."""
    most = int(lengths.max()) if longest is None else longest
    bad = lengths[(lengths < 0) | (lengths > most)]
    if len(bad):
        raise InputError(
            f"mask must give lengths from 0 to {most}, the tokens of the batch, got"
            f" {int(bad[0])}.\nGive the number of tokens of each item."
        )
    return torch.arange(most, device=lengths.device) < lengths[:, None]


def _check_mask(mask: Tensor, ids: Tensor | None) -> None:
    """Check that a mask is of the batch's tokens, and not one that is added to scores."""
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


def _find_token_ids(given: BatchAndInputs, key: str | None, marks: Tensor) -> Tensor | None:
    """Return the ids of tokens, or None: by their key, or inputs that are integers themselves."""
    if key is None:
        return None
    for place in (given.inputs, given.batch):
        ids = place.get(key) if isinstance(place, Mapping) else place
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            continue
        # The model may read other tokens than the batch has, such as those of a prompt, too.
        if place is given.inputs or marks.ndim == 1 or marks.shape == ids.shape:
            return ids
    return None
