"""Tell by its shape how a value lies over the tokens of a pass, and take tokens out of it."""

from __future__ import annotations

from typing import NamedTuple, final

import torch
from torch import Tensor

from hookline.verbs.compare.locate_tokens import ROWS

ROW = "(rows, …)"
PAIRS = "(rows, heads, tokens, keys)"
HEADS = "(rows, heads, tokens, …)"
NO_ROW = "(tokens, …)"
_BATCH = "(rows, tokens, …)"
_FLAT = "(rows·tokens, …)"
_TOKENS_FIRST = "(tokens, rows, …)"
_ANY_ROW = "(1, tokens, …)"
# The likeliest first: of readings that give the same values, the first is taken.
ORDER = (_BATCH, _FLAT, PAIRS, HEADS, _TOKENS_FIRST, _ANY_ROW, NO_ROW, ROW)


class Reading(NamedTuple):
    """Describe how a value lies over the tokens of a stream: its first dimensions, in words."""

    stream: str
    axes: str

    def __str__(self) -> str:
        return f"{self.axes} of {self.stream}input_ids" if self.stream != ROWS else self.axes


@final
class TokenPlaces(NamedTuple):
    """Place the tokens of a stream and pass in the common order; -1 for those without a place."""

    tokens: Tensor  # the place of each token, shape `(rows, tokens)`
    keys: Tensor  # as `tokens`, with those that the cache holds before, shape `(rows, keys)`
    rows: Tensor  # the place of each row in the order of sequences, shape `(rows,)`
    n_kept: int  # for how many last tokens of each row the model gives logits; 0 for all

    def possible_layouts(self, shape: tuple[int, ...]) -> list[str]:
        """List the ways in which a value of this shape may lie over the tokens."""
        (n_rows, n_tokens), n_keys = self.tokens.shape, self.keys.shape[1]
        sizes = (*shape, -1, -1, -1, -1)  # no dimension has the size -1
        has_rows = sizes[0] == n_rows
        # A table of tokens by keys, such as a bias of distances, belongs to no sequence.
        is_table = bool({n_tokens, n_keys}.intersection(shape[2 if shape[:1] == (1,) else 1 :]))
        fits = {
            _BATCH: has_rows and sizes[1] in (n_tokens, self.n_kept or n_tokens),
            _FLAT: sizes[0] == n_rows * n_tokens and not (is_table and n_rows == 1),
            PAIRS: has_rows and sizes[2:5] == (n_tokens, n_keys, -1),
            HEADS: has_rows and sizes[2] in (n_tokens, n_keys),
            _TOKENS_FIRST: sizes[:2] == (n_tokens, n_rows),
            _ANY_ROW: sizes[:2] == (1, n_tokens) and not is_table,
            NO_ROW: sizes[0] == n_tokens and n_rows > 1 and not is_table,
        }
        of_tokens = [axes for axes, does_fit in fits.items() if does_fit and n_tokens]
        return of_tokens + [ROW] * has_rows

    def take_tokens(self, value: Tensor, axes: str) -> tuple[Tensor, Tensor]:
        """Take the tokens or rows that have a place out of a value.

        Returns:
            The values of the tokens, shape `(tokens, …)`, and the place of each.
        """
        places = self.tokens
        n_rows, n_tokens = places.shape
        if axes == ROW:
            value, places = value[:, None], self.rows[:, None]
        elif axes == _BATCH:
            places = places[:, n_tokens - value.shape[1] :]
        elif axes == _FLAT:
            value = value.reshape(n_rows, n_tokens, *value.shape[1:])
        elif axes == HEADS:
            value = value.movedim(2, 1)
            places = places if value.shape[1] == n_tokens else self.keys
        elif axes == _TOKENS_FIRST:
            value = value.transpose(0, 1)
        elif axes == _ANY_ROW:
            value = value.expand(n_rows, *value.shape[1:])
        elif axes == NO_ROW:
            value = value.expand(n_rows, *value.shape)
        is_placed = places >= 0
        return value[is_placed.to(value.device)], places[is_placed]

    def take_attention_pairs(self, value: Tensor, span: SequenceSpans) -> tuple[Tensor, Tensor]:
        """Take the pairs of tokens and keys of one sequence out of a value.

        Returns:
            The values, shape `(tokens, heads, longest sequence)`, with 0 for keys that are not
            there; and the place of each token.
        """
        value = value.movedim(2, 1)
        is_placed = self.tokens >= 0
        places = self.tokens[is_placed]
        pairs = value.new_zeros(len(places), value.shape[2], int(span.lengths.max()))
        for number, (row, token) in enumerate(is_placed.nonzero().tolist()):
            sequence = int(span.sequence[places[number]])
            keys = self.keys[row]
            is_seen = (keys >= 0) & (span.sequence[keys] == sequence)
            if span.is_cut:
                is_seen &= keys <= places[number]
            columns = keys[is_seen] - span.starts[sequence]
            pairs[number][:, columns] = value[row, token][:, is_seen.to(value.device)]
        return pairs, places


@final
class SequenceSpans(NamedTuple):
    """The sequences in the common order of tokens."""

    sequence: Tensor  # the number of the sequence of each place
    starts: Tensor  # the first place of each sequence
    lengths: Tensor  # the number of tokens of each sequence
    is_cut: bool  # whether a sequence lies in several passes, so that a token has no later keys

    @classmethod
    def from_lengths(cls, counts: list[int], *, is_cut: bool) -> SequenceSpans:
        """Lay sequences of so many tokens one behind the other."""
        lengths = torch.tensor(counts, dtype=torch.long, device="cpu")
        sequence = torch.arange(len(counts), device="cpu").repeat_interleave(lengths)
        return cls(sequence, lengths.cumsum(0) - lengths, lengths, is_cut)

    def places_in_other_sequences(self, sequences: Tensor) -> Tensor:
        """Return for each place that of the same token of another sequence.

        Args:
            sequences: for each sequence the other one, which has the same tokens.
        """
        places = torch.arange(len(self.sequence), device=self.starts.device)
        tokens = places - self.starts[self.sequence]
        return self.starts[sequences][self.sequence] + tokens
