"""Read the values of several ranks as those of one process: shards joined, summands added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from hookline.display.text import first_line, plural
from hookline.engine import ROOT, Site, format_by_rank, glob_to_regex, path_text
from hookline.engine.pytree import tree
from hookline.errors import AmbiguousError, HooklineError, InputError, check_one_of
from hookline.recordings import Recording
from hookline.recordings.gather_and_reduce import OPS
from hookline.recordings.recorded_values import RecordedValue
from hookline.verbs.compare.rank_groups import RankGroup, are_equal_values, passes_with_values

# A dimension along which plain tensors are concatenated, or how they are reduced.
Dim = int | str
Dims = Dim | Mapping[str, Dim]


@final
@dataclass(frozen=True)
class UnjoinedValue:
    """Values of several ranks that cannot be joined."""

    site: str  # the site, as in `dims`
    parts: Mapping[int, Any]  # the value of each rank, by its number
    problem: str = ""  # the reason; empty if nothing says how to join them

    @property
    def is_whole(self) -> bool:
        """Tell whether the value of each rank is known."""
        return all(part is not None for part in self.parts.values())

    def why(self, other: Any, reduction: str | None = None, *, may_be_copies: bool = False) -> str:
        """Say why the values cannot be compared, with a guess from the value of the other side.

        Args:
            other: the value of the other side.
            reduction: how to reduce the parts to the value of the other side; None if unknown.
            may_be_copies: whether the value of one rank is that of the other side.
        """
        tensors = [[tensor for _, tensor in tree.tensors(part)] for part in self.parts.values()]
        shapes = [tuple(part[0].shape) for part in tensors if len(part) == 1]
        text = f"each of {len(self.parts)} ranks has its own"
        if self.problem:
            return f"{text}: {self.problem}"
        if reduction is not None:
            advice = f"give {self._dims_text(reduction)}"
            if may_be_copies:
                advice += " if they are summands; of copies, some are wrong"
            return f"{text}, and their {reduction} is that of the other side: {advice}"
        advice = (
            f"give {self._dims_text('…')}, with the dimension that they split or how to reduce them"
        )
        if len(shapes) < len(self.parts) or not isinstance(other, Tensor):
            return f"{text}: {advice}"
        text += f" {' and '.join(dict.fromkeys(str(list(shape)) for shape in shapes))}"
        text += f", of {list(other.shape)}"
        dim = _split_dim(shapes, tuple(other.shape))
        return f"{text}: {advice if dim is None else 'give ' + self._dims_text(dim)}"

    def _dims_text(self, dim: Dim) -> str:
        return f"dims={{{self.site!r}: {dim if dim == '…' else repr(dim)}}}"


def _split_dim(shapes: list[tuple[int, ...]], whole: tuple[int, ...]) -> int | None:
    """Return the dimension along which shapes add up to that of the whole; None without one."""
    for dim, size in enumerate(whole):
        rest = whole[:dim] + whole[dim + 1 :]
        if all(
            len(shape) == len(whole) and shape[:dim] + shape[dim + 1 :] == rest for shape in shapes
        ) and size == sum(shape[dim] for shape in shapes):
            return dim
    return None


def check_dims(dims: Any) -> None:
    """Refuse dims of another form.

    Raises:
        InputError: they are neither a dimension, nor a reduction, nor a dict of these.
    """
    for pattern in dims if isinstance(dims, Mapping) else ():
        if not isinstance(pattern, str):
            raise InputError(
                f"the keys of dims must be globs of sites, got {pattern!r:.80}."
                '\nGive dims=0 for all sites, or dims={"**.q_proj": -1}.'
            )
    for dim in dims.values() if isinstance(dims, Mapping) else [dims]:
        if isinstance(dim, str):
            check_one_of("dims", dim, OPS, 'Give a dimension, or "sum" of partial sums.')
        elif dim is not None and type(dim) is not int:
            raise InputError(
                f"dims must be a dimension, a reduction or a dict of these, got {dim!r:.80}."
                '\nGive dims=0 for parts of the batch, or dims={"**.q_proj": -1}.'
            )


def check_dims_match(dims: Dims | None, sites: Sequence[tuple[str, str]]) -> None:
    """Refuse dims of sites that no side has.

    Args:
        dims: what `hl.compare` takes.
        sites: path and port of each value of several ranks, on both sides.

    Raises:
        InputError: there are no such values, or a pattern matches none of them.
    """
    if dims is not None and not sites:
        raise InputError(
            f"dims must be left out where a and b are of one process, got dims={dims!r:.80}."
            "\nGive the folder that all ranks saved."
        )
    for pattern in dims if isinstance(dims, Mapping) else ():
        if not any(_matches_site(pattern, path, port) for path, port in sites):
            raise InputError(
                f"dims must name sites of several ranks, got {pattern!r}, which matches none.\nGive"
                f" paths such as {path_text(sites[0][0])!r}, with the port unless it is output."
            )


def read_whole(group: RankGroup, value: RecordedValue, key: str, dim: Dim | None) -> Any:
    """Read a value of several ranks as that of one process.

    DTensors are joined by their placements. Plain tensors are joined as `dim` says; if it says
    nothing, and all ranks have the same, the value is that.

    Args:
        group: the ranks.
        value: the value on one of the ranks.
        key: its key in a look-up.
        dim: what `dims` says of the site.
    """
    source = group.recording
    ranks = zip(group.numbers, source.ranks, strict=True)
    having = {number: rank for number, rank in ranks if key in rank}
    site = str(Site(value.site.path, value.site.port))  # as in `dims`
    try:
        parts = {number: rank[key] for number, rank in having.items()}
    except AmbiguousError:
        return UnjoinedValue(site, dict.fromkeys(having), _passes_problem(having))
    is_sharded = any(rank.holds_shard(key) for rank in having.values())
    if len(parts) == 1 and not is_sharded:
        return next(iter(parts.values()))
    try:
        if dim is not None and not is_sharded:
            if not _has_no_replicas(parts, dim):
                return UnjoinedValue(site, parts, _REPLICAS)
            return source.reduced(key, dim) if isinstance(dim, str) else source.full(key, dim)
        copies = source.values_by_replica(key, dim)
    except (HooklineError, ValueError, RuntimeError) as error:
        return UnjoinedValue(site, parts, first_line(error))
    first, *others = copies.values()
    if all(are_equal_values(first, other) for other in others):
        return first
    parts = {group.numbers[rank]: copy for rank, copy in copies.items()}
    return UnjoinedValue(site, parts, _stages_problem(having))


_REPLICAS = (
    "the ranks come as replicas with equal values, which dims would join, too; record each replica"
    " with other rows, and their inputs"
)


def _has_no_replicas(parts: Mapping[int, Any], dim: Dim) -> bool:
    """Tell whether joining plain values counts none twice: replicas come again in their order."""
    values, n = list(parts.values()), len(parts)
    if dim in ("mean", "max", "min") or are_equal_values(values[0], values[1]):
        return True
    return not any(
        n % size == 0
        and all(are_equal_values(values[k], values[k + size]) for k in range(n - size))
        for size in range(2, n // 2 + 1)
    )


def _passes_problem(ranks: Mapping[int, Recording]) -> str:
    """Say that the ranks have different numbers of passes, and what to compare instead."""
    counts = [len(passes_with_values(rank)) for rank in ranks.values()]
    said = format_by_rank(ranks, [plural(count, "pass", "passes") for count in counts])
    most = list(ranks)[counts.index(max(counts))]
    return f"{said}; compare one pass of a rank, hl.open(folder).ranks[{most}].passes[0]"


def _stages_problem(ranks: Mapping[int, Recording]) -> str:
    """Say that the ranks have other modules, and what to compare instead; empty if they do not."""
    first, *others = ranks.values()
    if all(rank.modules == first.modules for rank in others):
        return ""
    return (
        "the ranks have other modules, as in a pipeline; compare one at a time, as the second:"
        " hl.compare(run, hl.open(folder).ranks[1], names={its path: the path in run})"
    )


def dim_of(value: RecordedValue, dims: Dims | None) -> Dim | None:
    """Return the dimension or reduction for a site; the last pattern that matches decides."""
    if not isinstance(dims, Mapping):
        return dims
    site = value.site
    meant = [dim for pattern, dim in dims.items() if _matches_site(pattern, site.path, site.port)]
    return meant[-1] if meant else None


def _matches_site(pattern: str, path: str, port: str) -> bool:
    of_path, _, of_port = pattern.partition(":")
    is_path = not path if of_path == ROOT else glob_to_regex(of_path).fullmatch(path) is not None
    return (of_port or "output") == port and is_path
