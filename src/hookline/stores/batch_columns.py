"""The values of one batch as columns: one row for each item, or one for each token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor

from hookline.display.text import listed, name_without_torch
from hookline.engine import Site
from hookline.engine.pytree import describe, tree
from hookline.errors import AmbiguousError, StructureError, warn
from hookline.files.safetensors_file import DTYPE_NAMES
from hookline.stores.shard_file import METADATA, OWN, ColumnForm


@final
@dataclass(frozen=True)
class BatchTokens:
    """The tokens of a batch."""

    mask: Tensor  # whether each token counts, as a bool tensor of shape (items, longest item)
    lengths: list[int]  # how many tokens each item has
    ids: Tensor | None  # the id of each token that counts; None where the batch has none
    # The key of other tokens of the batch, of the same shape: those of a decoder. None where the
    # mask is clear.
    rival: str | None = None


class PassValues(Protocol):
    """A pass: the values at its sites."""

    def calls(self, key: Site) -> list[Any]:
        """Return the value of each call at a site."""


def extract_columns(
    record: PassValues,
    sites: Sequence[Site],
    n_items: int,
    tokens: BatchTokens | None,
    forms_before: Mapping[str, ColumnForm] | None,
) -> tuple[dict[str, Tensor], dict[str, ColumnForm]]:
    """Take the columns out of one pass.

    Args:
        record: the pass.
        sites: the wanted sites.
        n_items: how many items the batch has.
        tokens: its tokens, for rows a token.
        forms_before: the form of each column, as the first batch had it; None in the first batch.

    Returns:
        The columns by name, on the device where the model left them, and their forms.

    Raises:
        AmbiguousError: a module ran several times.
        StructureError: a value has no row an item or token, or another form than before; or the
            store itself has a column of the name.
    """
    columns: dict[str, Tensor] = {}
    forms_here: dict[str, ColumnForm] = {}
    without = []
    for site in sites:
        tensors = list(tree.tensors(_value_of_single_call(record, site)))
        if not tensors:
            without.append(str(site))
        for leaf, tensor in tensors:
            name = str(replace(site, leaf=site.leaf + leaf))
            _check_name(name)
            _check_dense(name, tensor)
            form_before = None if forms_before is None else forms_before.get(name)
            rows, per = _find_rows_and_kind(name, tensor, n_items, tokens, form_before)
            form = ColumnForm(name, DTYPE_NAMES[rows.dtype], tuple(rows.shape[1:]), per)
            if forms_before is not None and form != form_before:
                raise StructureError(_form_change_text(name, form_before, form))
            columns[name], forms_here[name] = rows, form
    missing = [name for name in forms_before or () if name not in columns]
    if missing:
        raise StructureError(
            f"{missing[0]} must have a value for each batch, got none.\nSelect the leaf that is"
            " there for each batch, or give the batches apart to two stores."
        )
    if not forms_here:
        raise StructureError(
            f"a selected site must have a tensor, got none at {listed(sites, 3)}."
            "\nSelect a site whose value has tensors; a function keep= must return tensors."
        )
    if without and forms_before is None:
        warn(f"{listed(without, 3)} has no tensor in the first batch, so it gets no column.")
    return columns, forms_here


def _check_name(name: str) -> None:
    """Check that a name is free in a shard, beside the columns of the store itself."""
    if name in (*OWN, METADATA):
        raise StructureError(
            f"a site must not have the name of what the store itself writes, got {name!r}."
            "\nGive the module another name, or leave it out."
        )


def _check_dense(name: str, tensor: Tensor) -> None:
    """Check that a tensor can be stored."""
    if tensor.is_nested:
        actual, remedy = "a nested one", "keep=lambda t: t.to_padded_tensor(0.0)"
    elif tensor.layout is not torch.strided:
        actual, remedy = f"a {name_without_torch(tensor.layout)} one", "keep=lambda t: t.to_dense()"
    elif tensor.is_quantized:
        actual, remedy = f"one of {tensor.dtype}", "keep=lambda t: t.dequantize()"
    elif tensor.dtype not in DTYPE_NAMES:
        actual, remedy = f"one of {tensor.dtype}", "keep=, a function that converts it"
    elif tensor.is_meta:
        actual, remedy = (
            "one on the meta device",
            "a model with weights: model.to_empty(device='cpu')",
        )
    else:
        return
    raise StructureError(
        f"{name} must be a dense tensor of a dtype that safetensors has, got {actual}."
        f"\nGive {remedy}."
    )


def _value_of_single_call(record: PassValues, site: Site) -> Any:
    calls = record.calls(site)
    if len(calls) > 1:
        raise AmbiguousError(
            f"{site} must run once a batch, got {len(calls)} calls."
            f"\nSelect one of them, such as '{replace(site, call=0)}'."
        )
    return calls[0]


def _find_rows_and_kind(
    name: str, tensor: Tensor, n_items: int, tokens: BatchTokens | None, old_form: ColumnForm | None
) -> tuple[Tensor, Literal["item", "token"]]:
    """Return a value's rows, and whether they are of items or of tokens.

    A batch may have as many tokens as a value has anything else: the first batch then decides.
    """
    is_as_before = old_form is not None and tensor.ndim > 0 and tensor.shape[1:] == old_form.shape
    before = old_form.per if old_form is not None and is_as_before else None
    if before == "item" and len(tensor) == n_items:
        return tensor, "item"
    if tokens is not None:
        # Of one token for each item there are as many rows of tokens as of items.
        may_be_flat = before == "token" or tokens.mask.numel() != n_items
        if old_form is None:
            _check_token_dimension(name, tensor, tokens)
        rows = _token_rows(tensor, tokens, may_be_flat=may_be_flat)
        if rows is not None:
            if old_form is None:
                _check_encoder_or_decoder(name, tensor, tokens)
            return rows, "token"
    if tensor.ndim > 0 and len(tensor) == n_items:
        return tensor, "item"
    expected = f"a row for each of the {n_items} items of the batch"
    if tokens is not None:
        expected += f", or for each token: {list(tokens.mask.shape)}"
    raise StructureError(
        f"{name} must have {expected}, got {describe.in_words(tensor)}."
        "\nSelect another leaf, or give keep= a function that makes such rows."
    )


def _check_token_dimension(name: str, tensor: Tensor, tokens: BatchTokens) -> None:
    """Refuse a value whose second dimension may be tokens or something else.

    Such are scores of shape (items, tokens), and attention of shape (items, heads, tokens, ...) in
    a batch that has as many tokens as heads.
    """
    shape = tokens.mask.shape
    may_be_heads = tensor.ndim > 3 and tensor.shape[2] == shape[1]
    if tensor.shape[:2] != shape or not (tensor.ndim == 2 or may_be_heads):
        return
    per_token = "t.flatten(2)" if may_be_heads else "t[..., None]"
    raise StructureError(
        f"{name} must have rows that are clearly of items or of tokens, got"
        f" {describe.in_words(tensor)} for {shape[0]} items of up to {shape[1]} tokens."
        f"\nGive keep=lambda t: {per_token} for a row a token, or keep=lambda t: t[:, None]"
        " for a row an item."
    )


def _check_encoder_or_decoder(name: str, tensor: Tensor, tokens: BatchTokens) -> None:
    """Refuse a value whose rows may be the tokens of an encoder or those of its decoder."""
    if tokens.rival is None:
        return
    of_decoder = "mask='decoder_attention_mask'"
    if tokens.rival != "decoder_attention_mask":
        of_decoder = "mask=, a function that makes it of the batch"
    raise StructureError(
        f"{name} must have rows of clear tokens, got {describe.in_words(tensor)} in a batch whose"
        f" 'attention_mask' and {tokens.rival!r} have one shape, {list(tokens.mask.shape)}."
        f"\nGive mask='attention_mask' for sites of the encoder; for sites of the decoder, in a"
        f" store of their own, {of_decoder}."
    )


def _token_rows(tensor: Tensor, tokens: BatchTokens, *, may_be_flat: bool) -> Tensor | None:
    """Return the rows of tokens without padding; None if a value has none.

    `may_be_flat` allows the tokens of all items to follow each other in the first dimension.
    """
    shape = tokens.mask.shape
    if tensor.ndim > 2 and tensor.shape[:2] == shape:
        return _drop_padding(tensor, tokens)
    if may_be_flat and tensor.ndim > 0 and len(tensor) == shape.numel():
        return _drop_padding(tensor.reshape(*shape, *tensor.shape[1:]), tokens)
    return None


def _drop_padding(tensor: Tensor, tokens: BatchTokens) -> Tensor:
    """Drop the padding: slices where it is at the end, which are five times faster than a mask."""
    longest = tokens.mask.shape[1]
    lengths = torch.tensor(tokens.lengths, device=tokens.mask.device)
    if min(tokens.lengths, default=longest) == longest:
        return tensor.flatten(0, 1)
    if torch.equal(tokens.mask, torch.arange(longest, device=lengths.device) < lengths[:, None]):
        return torch.cat([row[:n] for row, n in zip(tensor, tokens.lengths, strict=True)])
    return tensor[tokens.mask.to(tensor.device)]


def _form_change_text(name: str, before: ColumnForm | None, form: ColumnForm) -> str:
    if before is None:
        return (
            f"{name} must have a value for each batch, got none for the first."
            "\nSelect the leaf that is there for each batch."
        )
    remedy = "Give keep= a function that makes rows of one shape."
    if before.shape != form.shape and before.dtype == form.dtype:
        remedy += " If its rows are tokens, give mask=, the key of the mask in the batch."
    return f"{name} must have rows of {before}, as in the first batch, got {form}.\n{remedy}"


@final
class CpuOffload:
    """Copies values to the CPU: from a GPU into pinned memory, on a stream of its own.

    Args:
        device: the device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a contiguous CPU tensor that holds no more memory than its rows."""
        tensor = tensor.detach().contiguous()
        # torch copies on a stream of the tensor's own device: that of another GPU is not this one.
        if self._stream is None or tensor.device != self._stream.device:
            tensor = tensor.cpu()
            is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
            return tensor.clone() if is_part else tensor
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
        # The allocator may reuse the memory only when this stream is done with it.
        tensor.record_stream(self._stream)
        return copy

    def make_waiter(self) -> Callable[[], None]:
        """Return a function that waits until the values copied so far are on the CPU."""
        if self._stream is None:
            return lambda: None  # the values are on the CPU already
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize
