"""Compare recordings token by token: join the passes of each site, and take the common tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from hookline.display.text import listed
from hookline.engine.pytree import describe
from hookline.engine.pytree.tree import Leaf
from hookline.errors import InputError
from hookline.recordings import Recording
from hookline.statistics.difference import difference
from hookline.verbs.compare.join_ranks import Dims
from hookline.verbs.compare.locate_tokens import locate_tokens
from hookline.verbs.compare.measure import (
    MeasuredPair,
    arrays_in,
    holds_number,
    measure_pair,
    measure_unpaired,
    measure_values,
    pair_leaves,
)
from hookline.verbs.compare.rank_groups import RankGroup, group_ranks
from hookline.verbs.compare.read_sides import Entry, Side, check_passes_of_ranks, groups_as_passes
from hookline.verbs.compare.token_alignment import (
    Alignment,
    ByPass,
    Layout,
    align_tokens,
    have_equal_tensors,
    shapes_of,
)
from hookline.verbs.shared.token_inputs import CACHES

_PASS = re.compile(r"#pass(\d+)$")
# Inputs that say where tokens lie, and not what they are. The tokens themselves are matched.
_PLACES = re.compile(
    r"(decoder_)?(input_ids|inputs_embeds|attention_mask|position_ids)|cache_position"
    r"|past_key_values|cache|cu_seq_?lens?(_[qk])?|max_length_[qk]|input"
)


@final
class ValuesByPass(NamedTuple):
    """The values of a site in each pass, by the number of the pass."""

    values: Mapping[int, Any]


class AlignedSides(NamedTuple):
    """Two sides, with one entry a site for all passes where their tokens are aligned."""

    sides: tuple[Side, Side]  # the sides
    # Where their tokens lie; None if values are compared as they are.
    alignment: Alignment | None = None
    why: str = ""  # the reason why there is no alignment; empty if none is needed


def align_sides(a: Side, b: Side, tokens: Any, dims: Dims | None = None) -> AlignedSides:
    """Align two recordings by their tokens.

    Args:
        a: the first side.
        b: the second side.
        tokens: "auto"; None; or what `hl.compare` takes.
        dims: how the values of several ranks are joined, as `hl.compare` takes it.

    Raises:
        InputError: tokens are given, and invalid or of no use for what is compared.
    """
    given = _parse_tokens(tokens)
    if tokens is None or a.source is None or b.source is None:
        if given != (None, None):
            raise InputError(
                f"tokens must be left out for {a.noun} and {b.noun}: they tell which tokens"
                " recordings hold.\nLeave tokens out."
            )
        return AlignedSides((a, b))
    by_token = _try_align((a, b), given, dims)
    if by_token.alignment is not None:
        return by_token
    if given != (None, None) and by_token.why:
        raise InputError(
            f"tokens must tell which token lies where, got: {by_token.why}."
            '\nGive the inputs of both: tokens=({"input_ids": …}, {"input_ids": …}).'
        )
    check_passes_of_ranks(a, "a")
    check_passes_of_ranks(b, "b")
    if not by_token.why or "were not recorded" in by_token.why:  # which the findings say anyway
        return AlignedSides((a, b))
    return AlignedSides((a, b), why=f"rows and tokens are not aligned: {by_token.why}")


def _try_align(sides: tuple[Side, Side], given: tuple[Any, Any], dims: Dims | None) -> AlignedSides:
    """Align two recordings by their tokens, which are read from the inputs, or are given."""
    groups = [_rank_groups(side) for side in sides]
    tokens = [
        locate_tokens(side.source, *of_side)
        for side, *of_side in zip(sides, given, groups, strict=True)
        if side.source is not None
    ]
    ours, theirs = tokens
    if isinstance(ours, str) or isinstance(theirs, str):
        return AlignedSides(sides, why=next(why for why in tokens if isinstance(why, str)))
    has_groups = any(len(of_side) > 1 for of_side in groups)
    alignment = align_tokens(ours, theirs, with_copies=has_groups)
    n_matched = 0 if isinstance(alignment, str) else alignment.n_sequences
    if n_matched < len(ours.contents) and have_equal_tensors(
        ours.grids, theirs.grids, "owner", "row_owner"
    ):
        return AlignedSides(sides)  # one layout: the inputs differ, which the findings say
    if isinstance(alignment, str):
        return AlignedSides(sides, why=alignment)
    if alignment.is_same and not alignment.is_padded and not has_groups:
        return AlignedSides(sides)
    if has_groups:
        for other, layout, of_side in zip("ba", alignment.places, groups, strict=True):
            alignment.notes += _unmatched_ranks_note(other, layout, of_side)
    a, b = (
        _join_passes(groups_as_passes(side, of_side, dims), list(of_tokens.grids))
        for side, of_side, of_tokens in zip(sides, groups, (ours, theirs), strict=True)
    )
    return AlignedSides((a, b), alignment)


def _unmatched_ranks_note(other: str, layout: Layout, groups: Sequence[RankGroup]) -> list[str]:
    """Say of which ranks no row is on the other side, so that no value of theirs is compared."""
    numbers = [group.numbers for group in groups for _ in group.passes]
    matched = {
        ranks
        for ranks, streams in zip(numbers, layout.values(), strict=False)
        if any(bool((at >= 0).any()) for places in streams.values() for at in places[:3])
    }
    ranks = [rank for group in groups if group.numbers not in matched for rank in group.numbers]
    text = f"no row of rank{'s' * (len(ranks) > 1)} {listed(ranks, 4)} is in {other}"
    return [f"{text}: what is there is not compared"] if len(groups) > 1 and ranks else []


def _rank_groups(side: Side) -> list[RankGroup]:
    """Return the groups of ranks with the same rows; none for a side of one process."""
    source = side.source
    return group_ranks(source) if isinstance(source, Recording) and source.ranks else []


def _parse_tokens(tokens: Any) -> tuple[Any, Any]:
    """Return what is given of each side; None where nothing is.

    Raises:
        InputError: it is none of the forms that are allowed.
    """
    if tokens is None or (isinstance(tokens, str) and tokens == "auto"):
        return None, None
    if isinstance(tokens, Mapping):
        return tokens, tokens
    if isinstance(tokens, tuple) and len(tokens) == 2 and all(map(_is_inputs, tokens)):
        return tokens
    raise InputError(
        f'tokens must be "auto", None, a dict of inputs or a tuple of two, got {tokens!r:.80}.'
        '\nGive tokens=({"attention_mask": mask_a}, {"attention_mask": mask_b}).'
    )


def _is_inputs(given: Any) -> bool:
    several = isinstance(given, Sequence) and not isinstance(given, str)
    return given is None or isinstance(given, Mapping) or several


def _join_passes(side: Side, passes: Sequence[int]) -> Side:
    """Return a side whose entries read the values of all passes, in the order of firing."""
    groups: dict[tuple[str, str], dict[int, Entry]] = {}
    kept = [entry for entry in side.entries if entry.port == "grad"]  # which has no rows
    for entry in [entry for entry in side.entries if entry.port != "grad"]:
        match = _PASS.search(entry.rest)
        number = int(match[1]) if match else passes[0]
        groups.setdefault((entry.path, _PASS.sub("", entry.rest)), {})[number] = entry
    entries = [
        replace(
            next(iter(group.values())),
            rest=rest,
            read=partial(_read_passes, {number: entry.read for number, entry in group.items()}),
            outline=partial(
                _read_passes, {number: entry.outline for number, entry in group.items()}
            ),
        )
        for (_, rest), group in groups.items()
    ]
    return replace(side, entries=entries + kept)


def _read_passes(reads: Mapping[int, Any]) -> ValuesByPass:
    return ValuesByPass({number: read() for number, read in reads.items()})


def observe_shapes(alignment: Alignment, pairs: Sequence[tuple[Entry, Entry]]) -> None:
    """Let the alignment see the shapes of all pairs before one is read."""
    for ours, theirs in pairs:
        if ours.port == "grad":
            continue
        a, b = _tensors_by_leaf(ours.outline()), _tensors_by_leaf(theirs.outline())
        for leaf, leaf_b in _pair_leaves(a, b).items():
            if not _are_nested(a[leaf], b[leaf_b]):
                alignment.observe_shapes(shapes_of(a[leaf]), shapes_of(b[leaf_b]))


def measure_by_token(
    alignment: Alignment, a: ValuesByPass, b: ValuesByPass
) -> Iterator[MeasuredPair]:
    """Yield what is found of each pair of tensors at the common tokens."""
    ours, theirs = _tensors_by_leaf(a), _tensors_by_leaf(b)
    for leaf, leaf_b in _pair_leaves(ours, theirs).items():
        yield _measure_common_tokens(alignment, leaf, ours.pop(leaf), theirs.pop(leaf_b))
    yield from measure_unpaired(dict.fromkeys(ours, "there"), dict.fromkeys(theirs, "there"))


def measure_inputs(
    alignment: Alignment, a: ValuesByPass, b: ValuesByPass
) -> Iterator[MeasuredPair]:
    """Yield what is found of the inputs: the matched tokens, and those that are no tokens."""
    n_tokens = sum(len(span.sequence) for span in alignment.spans.values())
    n_matched = n_tokens or alignment.n_sequences
    form = f"{n_matched} {'tokens' if n_tokens else 'rows'}"
    nothing = torch.zeros(1, dtype=torch.long, device="cpu")
    yield MeasuredPair((), (form, form), (torch.long, torch.long), difference(nothing, nothing))
    ours, theirs = _tensors_by_leaf(a), _tensors_by_leaf(b)
    for leaf, leaf_b in _pair_leaves(ours, theirs).items():
        has_rows = all(tensor.dim() for tensor in ours[leaf].values())
        if has_rows and leaf and not _PLACES.fullmatch(str(leaf[0])):
            yield _measure_common_tokens(alignment, leaf, ours[leaf], theirs[leaf_b])


def measure_parameters(alignment: Alignment, a: Any, b: Any) -> Iterator[MeasuredPair]:
    """Yield what is found of the gradients of a parameter, which come from all tokens."""
    for pair in measure_values(a, b):
        if not alignment.covers_all and pair.gap is not None and pair.gap.differs:
            yield pair._replace(gap=None, why="a gradient over other tokens in a than in b")
        else:
            yield pair


def _measure_common_tokens(alignment: Alignment, leaf: Leaf, a: ByPass, b: ByPass) -> MeasuredPair:
    first, second = next(iter(a.values())), next(iter(b.values()))
    n_alone = 0
    if not _are_nested(a, b):
        pair = alignment.pair_common_tokens(a, b, is_cache=bool(leaf) and leaf[0] in CACHES)
        n_alone = alignment.n_alone
    elif alignment.is_same and len(a) == len(b) == 1:
        pair = first, second
    else:
        pair = "no dimensions of rows and tokens in nested tensors"
    if isinstance(pair, str):
        forms = describe.shape(first), describe.shape(second)
        return MeasuredPair(leaf, forms, (first.dtype, second.dtype), why=pair)
    return measure_pair(leaf, *pair)._replace(n_alone=n_alone)


def _are_nested(a: ByPass, b: ByPass) -> bool:
    return any(tensor.is_nested for side in (a, b) for tensor in side.values())


def _pair_leaves(ours: Mapping[Leaf, ByPass], theirs: Mapping[Leaf, ByPass]) -> dict[Leaf, Leaf]:
    """Pair the leaves by the tensors of the first pass."""
    return pair_leaves(*(
        {leaf: next(iter(by_pass.values())) for leaf, by_pass in side.items()}
        for side in (ours, theirs)
    ))  # fmt: skip


def _tensors_by_leaf(passes: ValuesByPass) -> dict[Leaf, dict[int, Tensor]]:
    """Return the tensors of the values of all passes by leaf; plain numbers are left out."""
    leaves: dict[Leaf, dict[int, Tensor]] = {}
    for number, value in passes.values.items():
        for leaf, array in arrays_in(value):
            if isinstance(array, Tensor) and not holds_number(value, leaf):
                leaves.setdefault(leaf, {})[number] = array
    return leaves
