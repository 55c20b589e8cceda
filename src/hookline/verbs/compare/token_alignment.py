"""Match the sequences of two recordings, and give values of common tokens in one order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import listed, plural
from hookline.statistics.flat_numbers import is_quantised
from hookline.verbs.compare.locate_tokens import ROWS, LocatedTokens
from hookline.verbs.compare.token_layouts import (
    HEADS,
    NO_ROW,
    ORDER,
    PAIRS,
    ROW,
    Reading,
    SequenceSpans,
    TokenPlaces,
)

# The tensor of a site in each pass, by the number of the pass.
ByPass = Mapping[int, Tensor]
Shapes = Mapping[int, tuple[int, ...]]
# The places of a recording's tokens, by pass and stream.
Layout = Mapping[int, Mapping[str, TokenPlaces]]
_Streams = dict[str, list[Hashable]]
_MOST_SHOWN = 3


@final
@dataclass
class Alignment:
    """The common tokens of two recordings, and where each recording has them."""

    # For each of the two recordings the places of its tokens, by pass and stream.
    places: tuple[Layout, Layout]
    spans: dict[str, SequenceSpans]  # the sequences of each stream in the common order
    n_sequences: int  # the number of matched sequences
    is_same: bool  # whether both have the same tokens at the same places
    positions: str = ""  # how the positions of the tokens differ; empty if they do not
    # What else a reader should know: sequences without a match, lengths that differ.
    notes: list[str] = field(default_factory=list)
    covers_all: bool = True  # whether each token of one recording has a counterpart in the other
    # For each of the two recordings and each sequence in the common order, the first of the
    # sequences that are the same one of the recording.
    origins: tuple[Tensor, Tensor] | None = None
    # For how many tokens, or rows, one of the pair that was taken last had no value.
    n_alone: int = 0
    _seen: dict[int, set[Reading]] = field(default_factory=dict)

    def observe_shapes(self, a: Shapes, b: Shapes) -> None:
        """Note how a value lies over the tokens if its shapes leave no doubt.

        What is seen at some sites decides at others, whose shapes fit several readings.
        """
        readings = self._common_readings(a, b)
        if len(readings) == 1:
            n_dims = len(next(iter(a.values())))
            self._seen.setdefault(n_dims, set()).update(readings)

    def pair_common_tokens(
        self, a: ByPass, b: ByPass, *, is_cache: bool = False
    ) -> tuple[Tensor, Tensor] | str:
        """Take the common tokens out of the values of a site, in one order.

        Args:
            a: the tensor of the first recording in each pass.
            b: the tensor of the second recording in each pass.
            is_cache: whether they lie in a cache, which may hold the last tokens of each row alone.

        Returns:
            Two tensors of shape `(tokens, …)` or `(sequences, …)`, or the reason why the values
            cannot be aligned.
        """
        self.n_alone = 0
        shapes = shapes_of(a), shapes_of(b)
        readings = self._common_readings(*shapes)
        if not readings:
            return self._pair_by_two_readings(a, b)
        if is_cache and {reading.axes for reading in readings} == {ROW} and not self._ends_alike:
            return "a cache of the last tokens, which are others in a than in b"
        # Heads as wide as there are keys look like attention weights: other sites tell nothing.
        if len(readings) > 1 and not {PAIRS, HEADS} <= {reading.axes for reading in readings}:
            known = readings & self._seen.get(len(next(iter(shapes[0].values()))), set())
            readings = known if len(known) == 1 else readings
        ordered = sorted(readings, key=lambda reading: (ORDER.index(reading.axes), reading.stream))
        first, *others = [
            self._take_common_tokens((a, b), (reading, reading)) for reading in ordered
        ]
        if all(_are_equal_pairs(first, other) for other in others):
            return first
        is_clear = len({reading.stream for reading in ordered}) == 1
        names = [reading.axes if is_clear else str(reading) for reading in ordered]
        return (
            f"{_shapes_text(*shapes)} may be {' or '.join(names)}: compare runs whose batch,"
            " length and width differ"
        )

    @property
    def is_padded(self) -> bool:
        """Tell whether a recording has tokens without a place, such as padding."""
        return any(
            bool((places.tokens < 0).any())
            for layout in self.places
            for streams in layout.values()
            for places in streams.values()
        )

    @cached_property
    def _ends_alike(self) -> bool:
        """Tell whether each row ends with the same tokens and padding in both recordings."""
        return self._places_by_row(0) == self._places_by_row(1)

    def _places_by_row(self, side: int) -> dict[tuple[str, int], list[int]]:
        """Return the places of the tokens of each row from its first token on; -1 for padding."""
        rows: dict[tuple[str, int], list[int]] = {}
        of_passes = [item for streams in self.places[side].values() for item in streams.items()]
        for stream, places in of_passes:
            for row, tokens in zip(places.rows.tolist(), places.tokens.tolist(), strict=True):
                if row >= 0:
                    rows.setdefault((stream, row), []).extend(tokens)
        return {row: [*dropwhile(lambda at: at < 0, tokens)] for row, tokens in rows.items()}

    def _pair_by_two_readings(self, a: ByPass, b: ByPass) -> tuple[Tensor, Tensor] | str:
        """Take the common tokens where no reading fits both values."""
        shapes = shapes_of(a), shapes_of(b)
        own = [
            {
                reading
                for reading in self._fitting_readings(side, shapes[side])
                if reading.axes != ROW
            }
            for side in (0, 1)
        ]
        streams = {reading.stream for of_side in own for reading in of_side}
        if len(streams) == 1 and all(len(of_side) == 1 for of_side in own):
            # such as (rows, tokens, …) in one and (rows·tokens, …) in the other
            return self._take_common_tokens((a, b), (own[0].pop(), own[1].pop()))
        first, *others = [*a.values(), *b.values()]
        is_setting = not first.dim() and not first.is_floating_point()
        if is_setting and all(torch.equal(first, other) for other in others):  # as of a cache
            return first[None], first[None]
        if self.is_same and len({*shapes[0].values(), *shapes[1].values()}) == 1:
            return torch.stack([*a.values()]), torch.stack([*b.values()])
        return f"no dimensions of rows and tokens in {_shapes_text(*shapes)}"

    def _common_readings(self, a: Shapes, b: Shapes) -> set[Reading]:
        """Return the readings that fit all passes of both; those of rows if none of tokens does."""
        of_sides = self._fitting_readings(0, a), self._fitting_readings(1, b)
        fitting = of_sides[0] & of_sides[1]
        of_tokens = {reading for reading in fitting if reading.axes != ROW}
        if {reading.axes for reading in of_tokens} == {NO_ROW}:
            of_tokens = fitting  # with as many rows as tokens, it may be a value a row
        n_keys = {
            places[number][reading.stream].keys.shape[1]
            for reading in of_tokens
            if reading.axes == PAIRS
            for places, shapes in zip(self.places, (a, b), strict=True)
            for number in shapes
        }
        if len(n_keys) > 1:  # the last dimension follows the number of keys
            return {reading for reading in of_tokens if reading.axes == PAIRS}
        has_tokens = any(reading.axes not in (ROW, NO_ROW) for reading in set.union(*of_sides))
        return of_tokens if of_tokens or has_tokens else fitting

    def _fitting_readings(self, side: int, shapes: Shapes) -> set[Reading]:
        sets = [
            {
                Reading(stream, axes)
                for stream, places in self.places[side].get(number, {}).items()
                for axes in places.possible_layouts(shape)
            }
            for number, shape in shapes.items()
        ]
        return set.intersection(*sets) if sets else set()

    def _take_common_tokens(
        self, tensors: tuple[ByPass, ByPass], readings: tuple[Reading, Reading]
    ) -> tuple[Tensor, Tensor] | str:
        """Take the tokens that both values have."""
        sides = []
        for side, (by_pass, reading) in enumerate(zip(tensors, readings, strict=True)):
            values = self._join_tokens_of_passes(side, by_pass, reading)
            if isinstance(values, str):
                return values
            sides.append(values)
        (a, in_a), (b, in_b) = sides
        if a.shape[1:] != b.shape[1:]:
            first, second = (next(iter(by_pass.values())).shape for by_pass in tensors)
            return f"shapes {list(first)} and {list(second)}"
        in_both = in_a & in_b
        is_cut = any(
            self._has_logits_of_last_tokens(side, by_pass) for side, by_pass in enumerate(tensors)
        )
        self.n_alone = 0 if is_cut else int((in_a ^ in_b).sum())
        if not bool(in_both.any()):
            return "the two have no token in common"
        if bool(in_both.all()):
            return a, b
        return a[in_both.to(a.device)], b[in_both.to(b.device)]

    def _has_logits_of_last_tokens(self, side: int, numbers: Iterable[int]) -> bool:
        """Tell whether a model was asked for the logits of the last tokens alone."""
        of_passes = (self.places[side][number].values() for number in numbers)
        return any(places.n_kept for streams in of_passes for places in streams)

    def _join_tokens_of_passes(
        self, side: int, by_pass: ByPass, reading: Reading
    ) -> tuple[Tensor, Tensor] | str:
        """Join the tokens of all passes in the common order, with a mark for each that is there."""
        parts = []
        for number, stored in by_pass.items():
            tensor = stored.dequantize() if is_quantised(stored) else stored
            places = self.places[side][number][reading.stream]
            if reading.axes == PAIRS:
                parts.append(places.take_attention_pairs(tensor, self.spans[reading.stream]))
            else:
                parts.append(places.take_tokens(tensor, reading.axes))
        if len({values.shape[1:] for values, _ in parts}) > 1:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in by_pass.values())
            return f"the passes have values of several widths, {shapes}"
        if reading.axes == ROW:
            n_places = self.n_sequences
            rows = torch.cat([at for _, at in parts])
            if len(set(rows.tolist())) < len(rows):
                return "each pass has a value a row, and rows go on from pass to pass"
        else:
            n_places = len(self.spans[reading.stream].sequence)
        first = parts[0][0]
        joined = first.new_zeros(n_places, *first.shape[1:])
        is_there = torch.zeros(n_places, dtype=torch.bool, device="cpu")
        for values, at in parts:
            joined[at.to(joined.device)] = values.to(joined.device)
            is_there[at] = True
        if self.origins is None:
            return joined, is_there
        origins = self.origins[side]
        if reading.axes != ROW:
            origins = self.spans[reading.stream].places_in_other_sequences(origins)
        return joined[origins.to(joined.device)], is_there[origins]


def align_tokens(
    a: LocatedTokens, b: LocatedTokens, *, with_copies: bool = False
) -> Alignment | str:
    """Match the sequences of two recordings by their tokens.

    Args:
        a: the tokens of the first recording.
        b: those of the second.
        with_copies: match what is left of one, too, if it has the tokens of a sequence of the other
            that is matched already, as rows of several ranks.

    Returns:
        The alignment, or the reason why nothing can be aligned.
    """
    pairs, is_known = _match_sequences(a, b)
    known = [{stream for row in side.contents for stream in row} for side in (a, b)]
    if not pairs and known[0] and known[1] and known[0].isdisjoint(known[1]):
        given = '{"input_ids": ids_a}, {"input_ids": ids_b}'
        return f"ids of tokens are known of one side alone: give tokens=({given})"
    if not pairs:
        return f"the inputs differ: no sequence is in both{_first_tokens_text(a, b)}"
    if with_copies and is_known:
        pairs = _add_copies(a, b, pairs)
    lengths, notes = _common_lengths(a, b, pairs)
    lengths_differ = bool(notes)
    if not is_known:
        notes.append("the ids of tokens are not known: sequences are matched in their order")
    ours, theirs = zip(*pairs, strict=True)
    alone = [*_unmatched_text("a", a, ours), *_unmatched_text("b", b, theirs)]
    notes += alone
    is_cut = any(_has_sequence_in_several_passes(tokens) for tokens in (a, b))
    spans = {
        stream: SequenceSpans.from_lengths(counts, is_cut=is_cut)
        for stream, counts in lengths.items()
    }
    places = _common_places(a, ours, spans), _common_places(b, theirs, spans)
    alignment = Alignment(
        places, spans, len(pairs), have_equal_tensors(*places, "tokens", "rows"), notes=notes,
        covers_all=not lengths_differ and not alone, origins=_first_equal_pairs(pairs),
    )  # fmt: skip
    alignment.positions = _position_difference(a, b, alignment)
    return alignment


def _unmatched_text(name: str, tokens: LocatedTokens, matched: Collection[int]) -> list[str]:
    """Say which sequences of a recording have no counterpart."""
    rows = [str(row) for row in range(len(tokens.contents)) if row not in matched]
    sequences = plural(len(rows), "sequence")
    return [f"{sequences} only in {name}: {listed(rows, _MOST_SHOWN)}"] if rows else []


def _match_sequences(a: LocatedTokens, b: LocatedTokens) -> tuple[list[tuple[int, int]], bool]:
    """Pair the sequences with equal tokens, then those of which one begins with the other.

    Returns:
        The pairs in the order of a, and whether the tokens of both are known.
    """
    rows = [*a.contents, *b.contents]
    if not all(contents for streams in rows for contents in streams.values()):
        are_alike = len(a.contents) == len(b.contents)
        return [(row, row) for row in range(len(a.contents))] if are_alike else [], False
    free: dict[tuple[Hashable, ...], list[int]] = {}
    for number, streams in enumerate(b.contents):
        free.setdefault(_sequence_key(streams), []).append(number)
    pairs: dict[int, int] = {}
    for number, streams in enumerate(a.contents):
        same = free.get(_sequence_key(streams))
        if same:
            pairs[number] = same.pop(0)
    left = {*range(len(b.contents))} - {*pairs.values()}
    for number in [number for number in range(len(a.contents)) if number not in pairs]:
        begun = [other for other in left if _share_prefix(a.contents[number], b.contents[other])]
        if len(begun) == 1:
            pairs[number] = begun[0]
            left.remove(begun[0])
    return sorted(pairs.items()), True


def _add_copies(
    a: LocatedTokens, b: LocatedTokens, pairs: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Pair the sequences that are left with equal ones that have a counterpart already."""
    matched = [{pair[side] for pair in pairs} for side in (0, 1)]
    keys = [[_sequence_key(streams) for streams in tokens.contents] for tokens in (a, b)]
    first_a = {keys[0][ours]: ours for ours, _ in reversed(pairs)}
    first_b = {keys[1][theirs]: theirs for _, theirs in reversed(pairs)}
    more = [
        (ours, first_b[key])
        for ours, key in enumerate(keys[0])
        if ours not in matched[0] and key in first_b
    ]
    more += [
        (first_a[key], theirs)
        for theirs, key in enumerate(keys[1])
        if theirs not in matched[1] and key in first_a
    ]
    return pairs + more


def _first_equal_pairs(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | None:
    """Return for each pair the first with the same sequence, by side; None if none comes twice."""
    of_sides = []
    for side in (0, 1):
        firsts: dict[int, int] = {}
        of_sides.append([firsts.setdefault(pair[side], n) for n, pair in enumerate(pairs)])
    if all(origins == [*range(len(pairs))] for origins in of_sides):
        return None
    first, second = torch.tensor(of_sides, device="cpu")
    return first, second


def _sequence_key(streams: _Streams) -> tuple[Hashable, ...]:
    return tuple((stream, tuple(contents)) for stream, contents in sorted(streams.items()))


def _share_prefix(a: _Streams, b: _Streams) -> bool:
    """Tell whether in each common stream the tokens of one begin with those of the other."""
    streams = a.keys() & b.keys() - {ROWS}
    both = [(a[stream], b[stream]) for stream in streams]
    return bool(both) and all(mine[: len(yours)] == yours[: len(mine)] for mine, yours in both)


def _common_lengths(
    a: LocatedTokens, b: LocatedTokens, pairs: list[tuple[int, int]]
) -> tuple[dict[str, list[int]], list[str]]:
    """Count the common tokens of each pair in each stream, and note where one is longer."""
    streams = dict.fromkeys(
        stream for tokens in (a, b) for grids in tokens.grids.values() for stream in grids
    )
    lengths: dict[str, list[int]] = {stream: [] for stream in streams}
    longer = []
    n_tokens = [_count_tokens(tokens) for tokens in (a, b)]
    for pair in pairs:
        for stream in streams:
            counts = [n_tokens[side][pair[side], stream] for side in (0, 1)]
            lengths[stream].append(min(counts))
            if counts[0] != counts[1] and min(counts):
                longer.append((pair, counts))
    if not longer:
        return lengths, []
    (pair, counts), *_ = longer
    text = (
        f"{plural(len(longer), 'sequence')} longer on one side ({counts[0]} and {counts[1]} tokens"
        f" at row {pair[0]} of a): compared where both have tokens, which must not see later ones"
    )
    return lengths, [text]


def _count_tokens(tokens: LocatedTokens) -> Counter[tuple[int, str]]:
    """Count the tokens of each sequence and stream."""
    return Counter(
        (owner, stream)
        for grids in tokens.grids.values()
        for stream, grid in grids.items()
        for owner in grid.owner[grid.owner >= 0].tolist()
    )


def _has_sequence_in_several_passes(tokens: LocatedTokens) -> bool:
    """Tell whether a sequence lies in several passes."""
    of_passes = [
        {owner for grid in grids.values() for owner in grid.owner[grid.owner >= 0].tolist()}
        for grids in tokens.grids.values()
    ]
    return sum(map(len, of_passes)) > len(set[int]().union(*of_passes))


def _common_places(
    tokens: LocatedTokens, sequences: Sequence[int], spans: Mapping[str, SequenceSpans]
) -> Layout:
    """Return where the tokens of a recording go in the common order of its sequences."""
    number = torch.full((len(tokens.contents) + 1,), -1, device="cpu")  # the last is for padding
    for place, sequence in reversed([*enumerate(sequences)]):  # of copies, the first
        number[sequence] = place

    def placed(owner: Tensor, order: Tensor, span: SequenceSpans) -> Tensor:
        sequence = number[owner]
        is_common = (sequence >= 0) & (order >= 0) & (order < span.lengths[sequence])
        return torch.where(is_common, span.starts[sequence] + order, -1)

    return {
        in_pass: {
            stream: TokenPlaces(
                placed(grid.owner, grid.order, spans[stream]),
                placed(grid.key_owner, grid.key_order, spans[stream]),
                number[grid.row_owner],
                grid.n_kept,
            )
            for stream, grid in grids.items()
        }
        for in_pass, grids in tokens.grids.items()
    }


def have_equal_tensors(
    a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]], *names: str
) -> bool:
    """Tell whether two recordings have equal tensors of these names in all passes and streams."""
    return a.keys() == b.keys() and all(
        a[number].keys() == b[number].keys()
        and all(
            torch.equal(getattr(mine, name), getattr(b[number][stream], name))
            for stream, mine in a[number].items()
            for name in names
        )
        for number in a
    )


def _position_difference(a: LocatedTokens, b: LocatedTokens, alignment: Alignment) -> str:
    """Say how the positions of common tokens differ."""
    for stream, span in alignment.spans.items():
        ours, theirs = (
            _positions_in_order(tokens, places, stream, len(span.sequence))
            for tokens, places in zip((a, b), alignment.places, strict=True)
        )
        odd = ((ours != theirs) & (ours >= 0) & (theirs >= 0)).nonzero()
        if len(odd):
            place = int(odd[0])
            sequence = int(span.sequence[place])
            return (
                f"{stream}position_ids are {int(ours[place])} in a and {int(theirs[place])} in b"
                f" at token {place - int(span.starts[sequence])} of sequence {sequence}"
            )
    return ""


def _positions_in_order(
    tokens: LocatedTokens, places: Layout, stream: str, n_places: int
) -> Tensor:
    """Return the positions of a stream's tokens in the common order; -1 where there is none."""
    positions = torch.full((n_places,), -1, device="cpu")
    for number, grids in tokens.grids.items():
        if stream in grids:
            at = places[number][stream].tokens
            positions[at[at >= 0]] = grids[stream].position[at >= 0]
    return positions


def _first_tokens_text(a: LocatedTokens, b: LocatedTokens) -> str:
    """Show how the first sequences of two recordings begin."""
    texts = []
    for name, tokens in (("a", a), ("b", b)):
        streams = tokens.contents[0] if tokens.contents else {}
        contents: list[Hashable] = next((ids for ids in streams.values() if ids), [])
        if contents and isinstance(contents[0], int):
            texts.append(f"{name} begins with {', '.join(map(str, contents[:4]))}")
    return f" ({'; '.join(texts)})" if len(texts) == 2 else ""


def _are_equal_pairs(a: tuple[Tensor, Tensor] | str, b: tuple[Tensor, Tensor] | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return False
    return all(
        len(mine) == len(yours)
        and torch.equal(mine.reshape(len(mine), -1), yours.reshape(len(yours), -1))
        for mine, yours in zip(a, b, strict=True)
    )


def shapes_of(by_pass: ByPass) -> Shapes:
    """Return the shape of a tensor in each pass."""
    return {number: tuple(tensor.shape) for number, tensor in by_pass.items()}


def _shapes_text(a: Shapes, b: Shapes) -> str:
    both = [
        " and ".join(dict.fromkeys(str(list(shape)) for shape in side.values())) for side in (a, b)
    ]
    return both[0] if both[0] == both[1] else f"{both[0]}, and {both[1]} in b"
