"""Read the values of several ranks as those of one process: shards joined, summands added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.display.text import first_line
from hookline.engine import glob, path_text
from hookline.engine.pytree import tree
from hookline.errors import AmbiguousError, HooklineError, InputError, one_of
from hookline.recordings import Recording
from hookline.recordings.ranks import OPS
from hookline.recordings.walk import RecordedValue

# A dimension along which plain tensors are concatenated, or how they are reduced.
Dim = int | str
Dims = Dim | Mapping[str, Dim]


@final
@dataclass(frozen=True)
class Unjoined:
    """Values of several ranks that cannot be joined.

    Args:
        site: the site, as in `dims`.
        parts: the value of each rank.
        problem: the reason; empty if nothing says how to join them.
    """

    site: str
    parts: list[Any]
    problem: str = ""

    def why(self, other: Any) -> str:
        """Say why the values cannot be compared, with a guess from the value of the other side."""
        tensors = [[tensor for _, tensor in tree.tensors(part)] for part in self.parts]
        shapes = [tuple(part[0].shape) for part in tensors if len(part) == 1]
        text = f"each of {len(self.parts)} ranks has its own"
        if self.problem:
            return f"{text}: {self.problem}"
        if len(shapes) < len(self.parts) or not isinstance(other, Tensor):
            return f"{text}: give dims={{{self.site!r}: …}}"
        shown = " and ".join(dict.fromkeys(str(list(shape)) for shape in shapes))
        guess = _guess(shapes, tuple(other.shape))
        if guess is None:
            return f"{text} {shown}, of {list(other.shape)}: give dims={{{self.site!r}: …}}"
        return f"{text} {shown}, of {list(other.shape)}: give dims={{{self.site!r}: {guess!r}}}"


def _guess(shapes: list[tuple[int, ...]], whole: tuple[int, ...]) -> Dim | None:
    """Return the dimension along which shapes add up to that of the whole, or a sum."""
    if all(shape == whole for shape in shapes):
        return "sum"
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
    for dim in dims.values() if isinstance(dims, Mapping) else [dims]:
        if isinstance(dim, str):
            one_of("dims", dim, OPS, 'Give a dimension, or "sum" of partial sums.')
        elif dim is not None and type(dim) is not int:
            raise InputError(
                f"dims must be a dimension, a reduction or a dict of these, got {dim!r:.80}."
                '\nGive dims=0 for parts of the batch, or dims={"**.q_proj": -1}.'
            )


def check_dims_are_meant(dims: Dims | None, sites: Sequence[tuple[str, str]]) -> None:
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
            "\nGive the folder that all ranks saved: hl.open(folder)."
        )
    for pattern in dims if isinstance(dims, Mapping) else ():
        if not any(_is_meant(pattern, path, port) for path, port in sites):
            raise InputError(
                f"dims must name sites of several ranks, got {pattern!r}, which matches none.\nGive"
                f" paths such as {path_text(sites[0][0])!r}, with the port unless it is output."
            )


def whole(source: Recording, value: RecordedValue, key: str, dims: Dims | None) -> Any:
    """Read a value of several ranks as that of one process.

    DTensors are joined by their placements. Plain tensors are joined as `dims` says; if it says
    nothing, and all ranks have the same, the value is that.

    Args:
        source: the recording of several ranks.
        value: the value on one of the ranks.
        key: its key in a look-up.
        dims: what `hl.compare` takes.
    """
    having = [rank for rank in source.ranks if key in rank]
    if len(having) == 1:
        return having[0][key]
    dim = dim_of(value, dims)
    try:
        return source.reduced(key, dim) if isinstance(dim, str) else source.full(key, dim)
    except AmbiguousError as error:
        parts = [rank[key] for rank in having]
        if all(_are_equal(parts[0], part) for part in parts[1:]):
            return parts[0]
        return Unjoined(key, parts, "" if dim is None else first_line(error))
    except (HooklineError, ValueError, RuntimeError) as error:
        return Unjoined(key, [rank[key] for rank in having], first_line(error))


def dim_of(value: RecordedValue, dims: Dims | None) -> Dim | None:
    """Return the dimension or reduction for a site; the last pattern that matches decides."""
    if not isinstance(dims, Mapping):
        return dims
    matching: Dim | None = None
    for pattern, dim in dims.items():
        if _is_meant(pattern, value.site.path, value.site.port):
            matching = dim
    return matching


def _is_meant(pattern: str, path: str, port: str) -> bool:
    of_path, _, of_port = pattern.partition(":")
    return (of_port or "output") == port and glob(of_path).fullmatch(path) is not None


def _are_equal(a: Any, b: Any) -> bool:
    ours, theirs = ([tensor for _, tensor in tree.tensors(value)] for value in (a, b))
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
