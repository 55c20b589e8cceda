"""Find what to compare where the ranks of a side have values that cannot be joined."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

from hookline.display.text import listed
from hookline.engine.pytree.tree import Leaf
from hookline.errors import HooklineError
from hookline.recordings.gather_and_reduce import OPS, reduce_saved_ranks
from hookline.verbs.compare.compare_by_token import ValuesByPass
from hookline.verbs.compare.comparison import QUIET, ComparedSite
from hookline.verbs.compare.join_ranks import UnjoinedValue

Values = tuple[Any, Any]
_MOST_NAMED = 4


@final
class UnjoinedPair:
    """A pair of values, of which at least one is of ranks that could not be joined.

    Attributes:
        first: the first value that could not be joined.
    """

    def __init__(self, values: Values) -> None:
        unjoined = [_unjoined_by_pass(side) for side in values]
        self._values = values
        self._side = 0 if unjoined[0] else 1
        self._by_pass = unjoined[self._side]
        self._is_of_both = all(unjoined)
        self.first: UnjoinedValue = next(iter(self._by_pass.values()))

    @property
    def other(self) -> Any:
        """The value beside it, in its first pass."""
        value = self._values[1 - self._side]
        return next(iter(value.values.values())) if isinstance(value, ValuesByPass) else value

    @property
    def have_same_ranks(self) -> bool:
        """Tell whether both values are of the same ranks, so that each has a counterpart."""
        a, b = self._values
        if not isinstance(a, UnjoinedValue) or not isinstance(b, UnjoinedValue):
            return False
        return a.parts.keys() == b.parts.keys() and a.is_whole and b.is_whole

    @property
    def may_be_copies(self) -> bool:
        """Tell whether the values of the ranks of one side may be copies of the other side's."""
        return not self._is_of_both and not any(part.problem for part in self._by_pass.values())

    def by_rank(self) -> Iterator[tuple[int, Values]]:
        """Yield the number of each rank, with its value beside the other side's."""
        for number, unjoined in self._by_pass.items():
            for rank, part in unjoined.parts.items():
                a, b = self._replace_values({number: part})
                yield rank, (a, b.parts[rank] if isinstance(b, UnjoinedValue) else b)

    def joined_passes(self) -> Values | None:
        """Return the passes whose values could be joined; None if there are none."""
        value = self._values[self._side]
        passes = value.values if isinstance(value, ValuesByPass) else {}
        joined = {number: part for number, part in passes.items() if number not in self._by_pass}
        return self._replace_values(joined) if joined else None

    def reduced(self, op: str) -> Values | None:
        """Return the values with those of the ranks reduced; None if they cannot be."""
        try:
            values = {
                number: reduce_saved_ranks([*part.parts.values()], op, "", is_sharded=False)
                for number, part in self._by_pass.items()
            }
        except (HooklineError, ValueError, RuntimeError):  # other shapes, packed dtypes
            return None
        return self._replace_values(values)

    def _replace_values(self, values: Mapping[int, Any]) -> Values:
        """Return the pair with other values of the side, by pass."""
        a, b = self._values
        is_by_pass = isinstance(self._values[self._side], ValuesByPass)
        new = ValuesByPass(values) if is_by_pass else next(iter(values.values()))
        return (a, new) if self._side else (new, b)


def compare_by_rank(
    parts: UnjoinedPair, judge: Callable[[Values], dict[Leaf, ComparedSite]], row: ComparedSite
) -> list[ComparedSite]:
    """Compare the value of each rank with the other side's.

    If one rank has the other side's value, all have copies. If none has it, nothing tells whether
    the values are parts of it.

    Args:
        parts: the pair of values.
        judge: returns the row of each pair of tensors in two values.
        row: what is returned if the values cannot be compared, without the reason.

    Returns:
        The rows. Each is the worst of all ranks.
    """
    if not parts.have_same_ranks and not parts.may_be_copies:
        return [replace(row, why=parts.first.why(parts.other))]
    by_rank: list[tuple[int | None, dict[Leaf, ComparedSite]]]
    by_rank = [(rank, judge(values)) for rank, values in parts.by_rank()]
    are_near = [_are_within_noise(rows.values()) for _, rows in by_rank]
    if parts.may_be_copies and not all(are_near):
        ops = ["sum"] if any(are_near) else OPS
        op = next((op for op in ops if _does_reduction_fit(parts, op, judge)), None)
        if op is not None or not any(are_near):
            why = parts.first.why(parts.other, op, may_be_copies=any(are_near))
            return [replace(row, why=why)]
    alone = parts.joined_passes()
    by_rank += [] if alone is None else [(None, judge(alone))]
    leaves = dict.fromkeys(leaf for _, rows in by_rank for leaf in rows)
    return [
        _worst_row([(rank, rows[leaf]) for rank, rows in by_rank if leaf in rows])
        for leaf in leaves
    ]


def _does_reduction_fit(
    parts: UnjoinedPair, op: str, judge: Callable[[Values], dict[Leaf, ComparedSite]]
) -> bool:
    values = parts.reduced(op)
    return values is not None and _are_within_noise(judge(values).values())


def _are_within_noise(rows: Collection[ComparedSite]) -> bool:
    return bool(rows) and all(row.verdict in QUIET for row in rows)


def _worst_row(rows: list[tuple[int | None, ComparedSite]]) -> ComparedSite:
    """Return the worst row of all ranks; it names those that differ."""
    odd = [(rank, row) for rank, row in rows if row.verdict not in QUIET]
    if not odd:
        return max((row for _, row in rows), key=_relative_error)
    rank, worst = max(
        odd, key=lambda pair: (pair[1].verdict == "differs", _relative_error(pair[1]))
    )
    if rank is None:
        return worst
    ranks = [str(other) for other, _ in odd if other is not None]
    name = f"rank{'s' * (len(ranks) > 1)} {listed(ranks, _MOST_NAMED)}"
    return replace(worst, why=f"{name}: {worst.why}")


def _relative_error(row: ComparedSite) -> float:
    return math.inf if row.relative is None else row.relative


def find_unjoined_pair(values: Values) -> UnjoinedPair | None:
    """Return a pair of values with parts that could not be joined; None if all are joined."""
    return UnjoinedPair(values) if any(map(_unjoined_by_pass, values)) else None


def _unjoined_by_pass(value: Any) -> dict[int, UnjoinedValue]:
    """Return what could not be joined, by pass."""
    passes = value.values if isinstance(value, ValuesByPass) else {0: value}
    return {number: part for number, part in passes.items() if isinstance(part, UnjoinedValue)}
