"""Compare the copies of a DTensor's part, which should be the same on all ranks that hold one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from hookline.engine import is_dtensor, layout_json, local_part
from hookline.errors import warn
from hookline.files.safetensors_file import flat_bytes
from hookline.recordings.join_dtensor_parts import Layout

# The part that a rank has a copy of, and a hash of its numbers; None where no other rank has it.
ReplicaFingerprint = list[str] | None


def fingerprint_replicas(tensors: Sequence[Tensor]) -> list[ReplicaFingerprint]:
    """Describe the copies that this rank has, one for each tensor."""
    texts: list[ReplicaFingerprint] = []
    for tensor in tensors:
        layout = Layout.from_json(layout_json(tensor)) if is_dtensor(tensor) else None
        texts.append(None if layout is None else fingerprint_replica(layout, local_part(tensor)))
    return texts


def fingerprint_replica(layout: Layout, part: Tensor) -> ReplicaFingerprint:
    """Describe a part of which several ranks have copies; None for other parts."""
    pairs = zip(layout.mesh, layout.placements, strict=True)
    has_copies = any(n > 1 and row[0] == "replicate" for n, row in pairs)
    if not has_copies or not layout.at or part.is_meta:
        return None
    here = [at for at, row in zip(layout.at, layout.placements, strict=False)
            if row[0] != "replicate"]  # fmt: skip
    numbers = flat_bytes(part.detach().resolve_conj().resolve_neg().cpu().contiguous()).numpy()
    return [f"{layout.first} {here}", hashlib.blake2b(numbers.data, digest_size=16).hexdigest()]


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
