"""Group the ranks of a recording: ranks that were given the same inputs hold the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from hookline.engine.pytree import tree
from hookline.recordings import PassRecord, Recording
from hookline.recordings.match_rank_values import RankValue
from hookline.statistics.difference import difference

INPUT = "(root):input"


@final
@dataclass(frozen=True)
class RankGroup:
    """Ranks of a recording that hold the same rows."""

    recording: Recording  # the recording of these ranks
    numbers: tuple[int, ...]  # the number of each rank in the recording of all ranks

    @property
    def passes(self) -> list[PassRecord]:
        """The passes of the first rank that have values."""
        return passes_with_values(self.recording.ranks[0])


def group_of_all_ranks(source: Recording) -> RankGroup:
    """Return all ranks as one group."""
    return RankGroup(source, tuple(range(len(source.ranks))))


def group_ranks(source: Recording) -> list[RankGroup]:
    """Return the groups of the ranks, in their order.

    Ranks without recorded inputs, and stages of a pipeline behind the first, join the only group if
    there is one. Otherwise their rows are not known, and each is a group of its own.
    """
    first, *_ = source.ranks
    unknown: list[int] = []
    groups: list[tuple[list[Any], list[int]]] = []
    for number, rank in enumerate(source.ranks):
        inputs = [record.calls(INPUT)[0] for record in rank.passes if INPUT in record]
        if not inputs or rank.modules != first.modules:
            unknown.append(number)
            continue
        same = next((numbers for other, numbers in groups if are_equal_values(inputs, other)), None)
        if same is None:
            groups.append((inputs, [number]))
        else:
            same.append(number)
    if len(groups) < 2:
        return [group_of_all_ranks(source)]
    together = [numbers for _, numbers in groups] + [[number] for number in unknown]
    return [_make_group(source, numbers) for numbers in sorted(together)]


def _make_group(source: Recording, numbers: Sequence[int]) -> RankGroup:
    recording = Recording(source.sites, source.report(), source.modules)
    recording.ranks = tuple(source.ranks[number] for number in numbers)
    return RankGroup(recording, tuple(numbers))


def passes_with_values(source: Recording) -> list[PassRecord]:
    """Return the passes of one rank in which a site fired."""
    return [record for record in source.passes if len(record)]


def are_equal_values(a: Any, b: Any) -> bool:
    """Tell whether two values have one structure and equal contents; NaN equals NaN."""
    ours, theirs = RankValue(a), RankValue(b)
    if [*map(_comparable_fields, ours.nodes)] != [*map(_comparable_fields, theirs.nodes)]:
        return False
    nested = ([part for _, part in tree.tensors(value) if part.is_nested] for value in (a, b))
    mine, yours = (
        [*value.tensors, *parts] for value, parts in zip((ours, theirs), nested, strict=True)
    )
    return len(mine) == len(yours) and all(map(_are_equal_tensors, mine, yours))


def _comparable_fields(node: Mapping[str, Any]) -> tuple[Any, ...]:
    return node["at"], node["kind"], node["dtype"], node["shape"], node.get("text")


def _are_equal_tensors(a: Tensor, b: Tensor) -> bool:
    try:
        return a.dtype == b.dtype and not difference(a, b).differs
    except (RuntimeError, NotImplementedError):  # packed dtypes, large sparse tensors
        return False
