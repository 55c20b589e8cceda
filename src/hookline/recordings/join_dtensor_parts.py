"""Join the parts of a DTensor that the ranks of a job have saved, and compare their copies.

A folder keeps the layout of each part: the mesh, the rank's coordinates in the mesh, and the
placement along each dimension of the mesh. This module needs neither DTensor nor a process group.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.errors import AmbiguousError, RanksError, warn
from hookline.files.safetensors_file import to_byte_array

Part = tuple["DTensorLayout", Tensor]
# The part that a rank has a copy of, and a hash of its numbers; None where no other rank has it.
ReplicaFingerprint = list[str] | None
ReplicaKey = tuple[
    int, tuple[int, ...]
]  # the first rank of a mesh, and the coordinates of a replica

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul,
    "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip
_N_FIELDS = {"replicate": 1, "shard": 2, "strided": 3, "partial": 2, "unknown": 2}


@final
@dataclass(frozen=True)
class DTensorLayout:
    """Locate one rank's part in the whole of a DTensor."""

    shape: tuple[int, ...]  # the shape of the whole tensor
    mesh: tuple[int, ...]  # the number of ranks along each dimension of the mesh
    names: tuple[str, ...]  # the names of these dimensions; empty if they have none
    # The first rank of the mesh. It tells apart meshes of one shape.
    first: int
    # The coordinates of the rank in the mesh; empty if the rank lies outside of it.
    at: tuple[int, ...]
    # For each dimension of the mesh `("shard", dim)`, `("strided", dim, pieces)`, `("replicate",)`,
    # `("partial", op)` or `("unknown", text)`.
    placements: tuple[tuple[Any, ...], ...]

    @classmethod
    def from_json(cls, data: Any) -> DTensorLayout | None:
        """Read a layout of a manifest; None for one of an older hookline, without placements."""
        if data is True:
            return None
        try:
            layout = cls(
                shape=_checked_sizes(data["shape"]),
                mesh=_checked_sizes(data["mesh"]),
                names=tuple(map(str, data["names"])),
                first=_checked_sizes([data["first"]])[0],
                at=_checked_sizes(data["at"]),
                placements=tuple(map(tuple, data["placements"])),
            )
            is_sound = layout._is_sound()
        except (TypeError, KeyError, IndexError):
            is_sound = False
        if not is_sound:
            raise ValueError(f"not the layout of a DTensor: {data!r:.200}")
        return layout

    def _is_sound(self) -> bool:
        return (
            len(self.mesh) == len(self.placements)
            and len(self.at) in (0, len(self.mesh))
            and all(at < n for at, n in zip(self.at, self.mesh, strict=False))
            and all(len(row) == _N_FIELDS[row[0]] for row in self.placements)
            and all(
                0 <= row[1] < len(self.shape)
                for row in self.placements
                if row[0] in ("shard", "strided")
            )
        )

    @property
    def unjoinable_placement(self) -> str:
        """The placement that cannot be joined; empty if all can."""
        texts = [str(row[1]) for row in self.placements if row[0] == "unknown"]
        ops = {row[1] for row in self.placements if row[0] == "partial"}
        if len(ops) > 1 or not ops <= _REDUCTIONS.keys():
            texts.append(f"Partial({', '.join(sorted(ops))})")
        return ", ".join(texts)

    @property
    def reduction(self) -> str:
        """The reduction of partial values; empty if there are none."""
        return next((str(row[1]) for row in self.placements if row[0] == "partial"), "")

    def coordinates_along(self, kind: str) -> tuple[int, ...]:
        """The rank's coordinates along the dimensions of the mesh with one kind of placement."""
        return tuple(at for at, row in zip(self.at, self.placements, strict=True) if row[0] == kind)

    @property
    def part_text(self) -> str:
        """The part of the whole that the rank holds, in words; empty if it holds all of it."""
        texts = []
        for at, n, row in zip(self.at, self.mesh, self.placements, strict=True):
            if n > 1 and row[0] != "replicate":
                name = "summand" if row[0] == "partial" else "part"
                what = row[1] if row[0] == "unknown" else f"{row[0]}({row[1]})"
                texts.append(f"{name} {at} of {n} by {what}")
        return ", ".join(texts)

    @property
    def replica_key(self) -> ReplicaKey:
        """The mesh and the replica in it that a part belongs to."""
        return self.first, self.coordinates_along("replicate")

    def indices(self) -> list[Tensor]:
        """The indices in the whole of this rank's part, for each dimension of the tensor."""
        rows = [torch.arange(size, device="cpu") for size in self.shape]
        for at, n, row in zip(self.at, self.mesh, self.placements, strict=True):
            if row[0] == "shard":
                rows[row[1]] = _nth_chunk(rows[row[1]], n, at)
            elif row[0] == "strided":  # FSDP2 on top of tensor parallelism, on one dimension
                pieces = [_nth_chunk(rows[row[1]], row[2], piece) for piece in range(row[2])]
                rows[row[1]] = torch.cat([_nth_chunk(piece, n, at) for piece in pieces])
        return rows


def join_parts(parts: Sequence[Part], dim: int | None, question: str) -> Tensor:
    """Join the parts of all ranks to the whole tensor.

    Args:
        parts: the layout and the tensor of each rank.
        dim: the dimension along which the wholes of several meshes are concatenated.
        question: the look-up as code, for messages.

    Raises:
        RanksError: a part is missing, or does not fit its layout.
        AmbiguousError: there are several meshes, and `dim` is None.
    """
    by_mesh: dict[int, list[Part]] = {}
    for layout, tensor in parts:
        by_mesh.setdefault(layout.first, []).append((layout, tensor))
    if len(by_mesh) > 1 and dim is None:
        raise AmbiguousError(
            f"{question}: the ranks form {len(by_mesh)} meshes, from ranks"
            f" {', '.join(map(str, sorted(by_mesh)))} on, and each has a whole tensor of its own."
            "\nGive the dimension along which to join them: dim=0 if each mesh has a part of the"
            " batch."
        )
    wholes = [_join_mesh(by_mesh[first], question) for first in sorted(by_mesh)]
    return wholes[0] if len(wholes) == 1 else torch.cat(wholes, dim or 0)


def join_each_replica(
    parts: Sequence[Part], merge: Callable[[list[Tensor]], Tensor] | None, question: str
) -> list[Tensor]:
    """Join the parts of all ranks to a whole tensor for each replica, as `join_parts` does.

    Args:
        parts: the layout and the tensor of each rank.
        merge: makes one tensor of the wholes of several meshes; None to keep them apart.
        question: the look-up as code, for messages.

    Returns:
        For each part the whole tensor that it belongs to.
    """
    copies = dict.fromkeys(layout.replica_key for layout, _ in parts)
    wholes = {
        (first, replica): _join_mesh(
            [part for part in parts if part[0].first == first], question, replica
        )
        for first, replica in copies
    }
    for replica in dict.fromkeys(replica for _, replica in copies):
        firsts = sorted(first for first, other in copies if other == replica)
        if merge is not None and len(firsts) > 1:
            merged = merge([wholes[first, replica] for first in firsts])
            wholes |= {(first, replica): merged for first in firsts}
    return [wholes[layout.replica_key] for layout, _ in parts]


def guess_layout_text(parts: Sequence[Part], question: str) -> str:
    """Say which layout the shapes of parts suggest, as the line of a message with the fix."""
    shape = parts[0][0].shape
    shapes = [tuple(tensor.shape) for _, tensor in parts]
    if all(part == shape for part in shapes):
        return "Each part has the shape of the whole: they may be summands, or copies."
    split = [
        dim
        for dim, size in enumerate(shape)
        if sum(part[dim] for part in shapes) == size
        and all(part[:dim] + part[dim + 1 :] == shape[:dim] + shape[dim + 1 :] for part in shapes)
    ]
    if split:
        return (
            f"The shapes of the parts suggest {question.partition(', dim=')[0]}, dim={split[0]})."
        )
    return f"The parts are {', '.join(map(str, map(list, shapes)))} of {list(shape)}."


def fingerprint_replica(layout: DTensorLayout, part: Tensor) -> ReplicaFingerprint:
    """Describe a part of which several ranks have copies; None for other parts."""
    pairs = zip(layout.mesh, layout.placements, strict=True)
    has_copies = any(n > 1 and row[0] == "replicate" for n, row in pairs)
    if not has_copies or not layout.at or part.is_meta:
        return None
    here = [at for at, row in zip(layout.at, layout.placements, strict=False)
            if row[0] != "replicate"]  # fmt: skip
    digest = hashlib.blake2b(to_byte_array(part).data, digest_size=16)
    return [f"{layout.first} {here}", digest.hexdigest()]


def warn_of_unequal_replicas(
    question: str, ranks: Sequence[int], fingerprints: Sequence[Sequence[ReplicaFingerprint]]
) -> None:
    """Warn where two ranks have unlike copies of one part.

    Args:
        question: the look-up as code, for messages.
        ranks: the ranks.
        fingerprints: of each rank, the description of its copy of each tensor.
    """
    for column in zip(*fingerprints, strict=True):
        first: dict[str, tuple[int, str]] = {}
        for rank, copy in zip(ranks, column, strict=True):
            if copy is None:
                continue
            other, digest = first.setdefault(copy[0], (rank, copy[1]))
            if digest != copy[1]:
                warn(
                    f"{question}: ranks {other} and {rank} should hold the same numbers, by the"
                    " placement Replicate, and hold others. In a job each rank gets its own, from"
                    f" a folder those of rank {other}.\nLook at the ranks alone:"
                    " hl.open(folder).ranks[0]; random numbers that ranks share need one seed."
                )
                return


def _join_mesh(parts: list[Part], question: str, replica: tuple[int, ...] | None = None) -> Tensor:
    """Join the parts of one mesh.

    `replica` has the coordinates of the ranks that count, along the dimensions of the mesh whose
    ranks have the same; None for the first.
    """
    by_place = {layout.at: (layout, tensor) for layout, tensor in parts if layout.at}
    layout = parts[0][0]
    missing = [at for at in itertools.product(*map(range, layout.mesh)) if at not in by_place]
    if missing or any(
        _rank_independent_fields(other) != _rank_independent_fields(layout) for other, _ in parts
    ):
        reason = (
            f"the part at {missing[0]} of the mesh {list(layout.mesh)} is missing"
            if missing
            else "the ranks' layouts differ"
        )
        raise RanksError(
            f"{question}: {reason}.\nSave the folder on all ranks of the mesh, after the same run."
        )
    summands: dict[tuple[int, ...], Tensor] = {}
    for place, (part_layout, part) in sorted(by_place.items()):
        copy = part_layout.coordinates_along("replicate")
        if copy != replica if replica is not None else any(copy):
            continue
        rows = part_layout.indices()
        if [len(row) for row in rows] != list(part.shape):
            raise RanksError(
                f"{question}: the part at {place} of the mesh {list(layout.mesh)} must have the"
                f" shape {[len(row) for row in rows]} by its placements, got {list(part.shape)}."
                f"\n{guess_layout_text(parts, question)}"
            )
        group = part_layout.coordinates_along("partial")
        if group not in summands:
            summands[group] = part.new_empty(layout.shape)
        summands[group][_region_index(rows)] = part
    whole, *others = summands.values()
    for other in others:
        whole = _REDUCTIONS[layout.reduction](whole, other)
    return whole / len(summands) if layout.reduction == "avg" else whole


def _rank_independent_fields(layout: DTensorLayout) -> tuple[Any, ...]:
    return layout.shape, layout.mesh, layout.first, layout.placements


def _region_index(rows: list[Tensor]) -> tuple[Any, ...]:
    """Return the index of a region of a tensor: slices if all rows follow one another."""
    if all(len(row) == 0 or int(row[-1] - row[0]) == len(row) - 1 for row in rows):
        starts = [int(row[0]) if len(row) else 0 for row in rows]
        return tuple(
            slice(start, start + len(row)) for start, row in zip(starts, rows, strict=True)
        )
    return tuple(row.view(-1, *[1] * (len(rows) - 1 - dim)) for dim, row in enumerate(rows))


def _nth_chunk(row: Tensor, n: int, number: int) -> Tensor:
    """Return a chunk as torch.chunk cuts it; chunks that it leaves out are empty."""
    size = math.ceil(len(row) / n)
    return row[size * number : size * (number + 1)]


def _checked_sizes(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or any(type(size) is not int or size < 0 for size in data):
        raise TypeError("sizes must be integers from 0 up")
    return tuple(data)
