"""Detect writes to a value after it was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import every_tensor, local_part, unwrap_all_transforms


def stamp(value: Any) -> tuple[int | None, ...]:
    """Return the version counters of a value's tensors; equal stamps mean that torch saw no write.

    An inference tensor has no version counter; its stamp is None.
    """
    return _versions(map(unwrap_all_transforms, every_tensor(value)))


@final
@dataclass(slots=True, eq=False)
class StampWithCopies:
    """The stamp of a value that is kept with its graph and whose versions do not show all writes.

    Args:
        versions: the usual stamp.
        copies: each tensor whose version does not show all writes, with a copy of it.
    """

    versions: Any
    copies: list[tuple[Tensor, Tensor]]


@final
@dataclass(slots=True, eq=False)
class UndetectableStamp:
    """The stamp of a value that cannot be copied and whose changes cannot be detected.

    Args:
        kind: the type of the object that holds its tensors.
    """

    kind: str


def is_unchanged(tensors: Sequence[Tensor], old_stamp: Any) -> bool:
    """Return whether a value is unchanged since it was stamped.

    Args:
        tensors: the innermost tensor of each tensor in the value.
        old_stamp: the stamp.
    """
    if old_stamp is None:
        return True
    if type(old_stamp) is int:  # a fast tap notes the bare version of a lone tensor
        return tensors[0]._version == old_stamp
    if isinstance(old_stamp, StampWithCopies):
        if not all(_are_equal(tensor.detach(), copy) for tensor, copy in old_stamp.copies):
            return False
        old_stamp = old_stamp.versions
    return bool(_versions(tensors) == old_stamp)


def _versions(tensors: Iterable[Tensor]) -> tuple[int | None, ...]:
    return tuple([None if tensor.is_inference() else tensor._version for tensor in tensors])


def _are_equal(tensor: Tensor, copy: Tensor) -> bool:
    tensor, copy = local_part(tensor), local_part(copy)
    if tensor.shape != copy.shape or tensor.dtype is not copy.dtype:
        return False
    if torch.equal(tensor, copy):
        return True
    return bool(torch.isclose(tensor, copy, rtol=0, atol=0, equal_nan=True).all())
