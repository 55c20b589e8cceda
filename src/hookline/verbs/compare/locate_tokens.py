"""Read which token of which sequence lies where in each pass, from the inputs of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import first_line
from hookline.engine import has_numbers
from hookline.engine.pytree import describe, tree
from hookline.errors import HooklineError
from hookline.recordings import PassRecord, Recording
from hookline.util.view_as_array import view_as_array
from hookline.verbs.compare.rank_groups import INPUT, RankGroup, passes_with_values
from hookline.verbs.shared.token_inputs import CACHES, token_inputs

ROWS = "rows"  # the stream of inputs that are rows without tokens, such as images
_PREFIXES = ("", "decoder_")
_CONTENTS = ("input_ids", "inputs_embeds")
_RECORD = 'Record the inputs: hl.record(model, ["**", "(root):input"]), or give tokens=.'


class UnreadableTokens(Exception):
    """The inputs do not tell which tokens they hold; the text says why."""


@final
@dataclass(frozen=True)
class TokenGrid:
    """The tokens of one stream in one pass, in the layout of the ids that the model was given."""

    owner: Tensor  # the sequence of each token, -1 for padding, shape `(rows, tokens)`
    order: Tensor  # the number of each token in its sequence, from 0, of the same shape
    position: Tensor  # the position that the model was given, or counts itself, of the same shape
    key_owner: Tensor  # as `owner`, with the tokens that the cache holds before these
    key_order: Tensor  # as `order`, with the tokens that the cache holds before these
    # The sequence of each row, -1 where a row holds none or several, shape `(rows,)`.
    row_owner: Tensor
    n_kept: int = 0  # for how many last tokens of each row the model gives logits; 0 for all


@final
@dataclass
class LocatedTokens:
    """The sequences of a recording, and where their tokens lie."""

    # For each pass, by number, the grid of each stream.
    grids: dict[int, dict[str, TokenGrid]] = field(default_factory=dict)
    # For each sequence and stream, what tells its tokens from others, such as their ids; empty
    # where that is unknown.
    contents: list[dict[str, list[Hashable]]] = field(default_factory=list)


def locate_tokens(
    source: Recording | PassRecord, given: Any = None, groups: Sequence[RankGroup] = ()
) -> LocatedTokens | str:
    """Read the tokens of a recording from the inputs of its passes.

    Args:
        source: a recording, or one of its passes.
        given: what was not recorded, by the names of a transformers model's inputs: a dict for all
            passes, or a sequence with a dict for each.
        groups: of a recording of several ranks, the groups of ranks with the same rows.

    Returns:
        The tokens, or the reason why they are not known.
    """
    numbered = passes_by_number(source, groups)
    inputs = given if isinstance(given, Sequence) else [given] * len(numbered)
    if len(inputs) != len(numbered):
        return f"tokens must have a dict for each of {len(numbered)} passes, got {len(inputs)}"
    reader = _TokenReader()
    has_inputs = any(INPUT in record for record in numbered.values())
    for (number, record), told in zip(numbered.items(), inputs, strict=True):
        if given is None and has_inputs and INPUT not in record:  # such as an encoder's own call
            reader.tokens.grids[number] = {}
            continue
        try:
            reader.read_pass(number, _named_inputs(record, told))
        except (UnreadableTokens, HooklineError) as error:
            where = f"pass {number}: " * (len(numbered) > 1)
            return f"{where}{first_line(error)}"
    return reader.tokens


def passes_by_number(
    source: Recording | PassRecord, groups: Sequence[RankGroup] = ()
) -> dict[int, PassRecord]:
    """Return the passes with values that tell the tokens, by number.

    Of several ranks, the passes of each group follow those of the one before. Those of its first
    rank count.
    """
    if isinstance(source, PassRecord):
        return {source.number: source}
    if len(groups) > 1:
        return dict(enumerate(record for group in groups for record in group.passes))
    records = groups[0].passes if groups else passes_with_values(source)
    return {record.number: record for record in records}


def _named_inputs(record: PassRecord, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of the model in a pass by name.

    The ids of tokens may have another name: a lone tensor of integers, or a matrix of them that is
    the first of several.
    """
    value = record.calls(INPUT)[0] if INPUT in record else None
    if value is None and given is None:
        raise UnreadableTokens(f"the inputs of the model were not recorded.\n{_RECORD}")
    named: dict[Any, Any] = dict(tree.items(value) or ())
    if isinstance(value, Tensor):
        named = {"input": value}
    named |= given or {}
    has_ids = any(f"{prefix}{name}" in named for prefix in _PREFIXES for name in _CONTENTS)
    tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    if has_ids or not all(map(_is_integer, tensors.values())):
        return named
    first = next(iter(tensors), None)
    if first is not None and (tensors[first].ndim == 2 or tensors[first].ndim == len(named) == 1):
        named["input_ids"] = named.pop(first)
    return named


class _TokenReader:
    """Reads pass after pass: with a cache, a pass goes on with the sequences of the one before."""

    def __init__(self) -> None:
        self.tokens = LocatedTokens()
        self._before: dict[str, TokenGrid] = {}

    def read_pass(self, number: int, inputs: Mapping[str, Any]) -> None:
        """Read the grids of a pass.

        Raises:
            UnreadableTokens: the inputs do not tell them.
        """
        grids: dict[str, TokenGrid] = {}
        for prefix in _PREFIXES:
            given = (inputs.get(f"{prefix}{name}") for name in _CONTENTS)
            content = next((value for value in given if isinstance(value, Tensor)), None)
            if content is not None:
                rows = next((grid.row_owner for grid in grids.values()), None)
                stream = _TokenStream(prefix, content, inputs)
                grids[prefix] = self._token_grid(stream, rows)
        if not grids:
            grids[ROWS] = self._row_grid(inputs)
        self.tokens.grids[number] = grids
        self._before.update(grids)

    def _token_grid(self, stream: _TokenStream, rows: Tensor | None) -> TokenGrid:
        past = stream.n_past_tokens(self._before.get(stream.prefix))
        before = self._before.get(stream.prefix) if past else None
        starts, is_present = stream.tokens.is_start, stream.tokens.is_present
        if before is None:
            owner = self._number_sequences(starts, rows)
        elif bool(starts[:, 1:].any()):
            raise UnreadableTokens("packed sequences that go on from a cache cannot be told apart")
        else:
            owner = before.row_owner[:, None].expand(starts.shape)
        owner = torch.where(is_present, owner, -1)
        order = torch.full_like(owner, -1)
        none = owner[:, :0]
        held, held_order = (none, none) if before is None else (before.key_owner, before.key_order)
        for sequence in sorted(set(owner[is_present].tolist())):
            mine = owner == sequence
            n_before = int((held == sequence).sum())
            order[mine] = torch.arange(int(mine.sum()), device=mine.device) + n_before
            known = self.tokens.contents[sequence]
            known[stream.prefix] = [*known.get(stream.prefix, ()), *stream.contents_at(mine)]
        return TokenGrid(
            owner,
            order,
            stream.positions(past),
            torch.cat([held, owner], 1),
            torch.cat([held_order, order], 1),
            _sequence_of_rows(owner) if before is None else before.row_owner,
            stream.n_kept,
        )

    def _number_sequences(self, starts: Tensor, rows: Tensor | None) -> Tensor:
        """Number the sequences that begin in a pass; streams of one pass share their rows."""
        one_a_row = not bool(starts[:, 1:].any())
        if rows is not None and one_a_row and len(rows) == len(starts):
            return rows[:, None].expand(starts.shape)
        first = len(self.tokens.contents)
        owner = starts.flatten().cumsum(0).view(starts.shape) - 1
        self.tokens.contents += [{} for _ in range(int(starts.sum()))]
        return owner + first

    def _row_grid(self, inputs: Mapping[str, Any]) -> TokenGrid:
        """Return the grid of inputs without tokens: a row an item."""
        parts = tree.tensors(dict(inputs))
        tensors = [tensor for _, tensor in parts if _has_readable_rows(tensor)]
        if not tensors:
            raise UnreadableTokens(f"the inputs hold no tensor with rows.\n{_RECORD}")
        n_rows = len(tensors[0])
        of_rows = [tensor for tensor in tensors if len(tensor) == n_rows]
        first = len(self.tokens.contents)
        for row in range(n_rows):
            digests: list[Hashable] = [_digest(tensor[row]) for tensor in of_rows]
            self.tokens.contents.append({ROWS: digests})
        none = torch.zeros(n_rows, 0, dtype=torch.long, device="cpu")
        rows = torch.arange(first, first + n_rows, device="cpu")
        return TokenGrid(none, none, none, none, none, rows)


class _TokenStream:
    """The ids or embeddings of one stream in a pass, and what tells their padding and place."""

    def __init__(self, prefix: str, content: Tensor, inputs: Mapping[str, Any]) -> None:
        self.prefix = prefix
        self._inputs = inputs
        self._content = content if has_numbers(content) else None
        n_dims = content.ndim - content.is_floating_point()  # embeddings have one more
        shape, self._of_each = content.shape[:n_dims], content.shape[n_dims:]
        if n_dims not in (1, 2):
            raise UnreadableTokens(
                f"ids of tokens must be (rows, tokens), got {describe.shape(content)}"
            )
        n_rows, n_tokens = (1, *shape) if n_dims == 1 else shape
        self.tokens = token_inputs(inputs, (n_rows, n_tokens), prefix)
        kept = inputs.get("logits_to_keep")
        self.n_kept = kept if type(kept) is int and kept > 0 else 0

    def n_past_tokens(self, before: TokenGrid | None) -> int:
        """Return how many tokens of each row the cache held before this pass.

        Raises:
            UnreadableTokens: they were not recorded.
        """
        is_same_batch = before is not None and len(before.owner) == self.tokens.shape[0]
        held = before.key_owner.shape[1] if before is not None and is_same_batch else 0
        past = self._n_past_from_inputs()
        if past is None:
            past = held if self._cache is not None else 0
        if past and past != held:
            raise UnreadableTokens(
                f"the cache held {past} tokens of each row that the recording does not have."
                "\nRecord from the first chunk on."
            )
        return past

    @property
    def _cache(self) -> Any:
        """Return the argument that holds a cache; None without one."""
        return next((self._inputs[name] for name in CACHES if name in self._inputs), None)

    def _n_past_from_inputs(self) -> int | None:
        """Return the number of tokens in the cache as far as the inputs tell it."""
        tokens = self.tokens
        if tokens.n_cached is not None:
            return tokens.n_cached
        cache = [
            tensor
            for leaf, tensor in tree.tensors(self._cache)
            if tensor.ndim == 4 and "cross_attention_cache" not in leaf
        ]
        if cache:
            return int(cache[0].shape[2])
        if tokens.position_ids is not None and tokens.is_token is None and tokens.shape[1]:
            return int(tokens.position_ids[:, 0].min())
        return None

    def positions(self, n_past: int) -> Tensor:
        """Return the position of each token as given, or as a model counts that is given none."""
        shape, given = self.tokens.shape, self.tokens.position_ids
        if given is not None:
            return given
        return torch.arange(n_past, n_past + shape[1], device="cpu").expand(shape)

    def contents_at(self, mask: Tensor) -> list[Hashable]:
        """Return what tells the tokens at some places from others: their ids, or digests."""
        if self._content is None:
            return []
        values, shape = self._content.detach().cpu(), self.tokens.shape
        rows = values.reshape(*shape, *self._of_each)[mask]
        return [_digest(row) for row in rows] if rows.ndim > 1 else list(rows.tolist())


def _sequence_of_rows(owner: Tensor) -> Tensor:
    """Return the sequence of each row; -1 where a row holds none or several."""
    most = owner.amax(1) if owner.shape[1] else owner.new_full((len(owner),), -1)
    is_only = ((owner == most[:, None]) | (owner == -1)).all(1)
    return torch.where(is_only, most, -1)


def _has_readable_rows(tensor: Tensor) -> bool:
    """Tell whether a tensor has rows that can be read: it is not sparse, quantised or nested."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    return is_strided and not tensor.is_quantized and tensor.ndim > 0 and has_numbers(tensor)


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _digest(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous()
    if numbers.is_floating_point():  # equal numbers of two dtypes are the same
        numbers = numbers.double()
    return hashlib.sha256(view_as_array(numbers).tobytes()).hexdigest()[:16]
