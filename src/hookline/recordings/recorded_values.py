"""The values of a pass in firing order, each read on request."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine import Site
from hookline.engine.pytree import describe
from hookline.engine.pytree.tree import Leaf
from hookline.recordings.pass_record import PassRecord
from hookline.statistics.flat_numbers import DENSE_NUMEL


@final
@dataclass(frozen=True, slots=True)
class RecordedValue:
    """One value of a recording, which is read on request: a call of a site in a pass."""

    record: PassRecord  # the pass, or one of its backward passes
    key: str  # the site as in a look-up
    site: Site
    call: int  # the number of the module's call in the pass
    # for a gradient, the index of its backward pass if there are several; else None
    backward: int | None = None

    def read(self) -> Any:
        """Read the value.

        Raises:
            OverwrittenError: the value was changed in place after it was recorded.
            FolderError: the folder is gone or damaged.
        """
        return self.record[self._site_with_call]

    def outline(self) -> Any:
        """Return the value's structure; a value in a folder has meta tensors without data.

        Raises:
            FolderError: the folder is gone or damaged.
        """
        return self.record.outline(self._site_with_call)

    def holds_shard(self) -> bool:
        """Return whether a tensor of the value is this rank's part of a DTensor."""
        return self.record.holds_shard(self._site_with_call)

    def part_text(self) -> str:
        """Say which part of a DTensor the value is; empty if it is whole."""
        if not self.holds_shard():
            return ""
        layouts = [layout for layout in self.record.layouts(self._site_with_call) if layout.at]
        return " and ".join(dict.fromkeys(row.part_text for row in layouts if row.part_text))

    @property
    def _site_with_call(self) -> Site:
        return self.site if self.site.call is not None else replace(self.site, call=self.call)


def iterate_recorded_values(record: PassRecord) -> Iterator[RecordedValue]:
    """Yield the values of a pass in firing order, without reading them.

    If several backward passes went over it, their gradients follow, one pass at a time.
    """
    backwards = record.backwards if len(record.backwards) > 1 else []
    for (site, call), key in zip(record.fired(), record.order, strict=True):
        if not (backwards and site.is_gradient):
            yield RecordedValue(record, key, site, call)
    for number, backward in enumerate(backwards):
        for (site, call), key in zip(backward.fired(), backward.order, strict=True):
            yield RecordedValue(backward, key, site, call, number)


def add_leaf_to_key(key: str, leaf: Leaf) -> str:
    """Return the key of a leaf of a value; a leaf is written after the port and before the call.

    >>> add_leaf_to_key("lstm#1", (1, 0)), add_leaf_to_key("fc", ())
    ('lstm:output[1][0]#1', 'fc')
    """
    if not leaf:
        return key
    head, sign, call = key.rpartition("#") if re.search(r"#\d+$", key) else (key, "", "")
    head += "" if ":" in head else ":output"
    return f"{head}{describe.leaf_text(leaf)}{sign}{call}"


def is_convertible(tensor: Tensor) -> bool:
    """Return whether torch can convert a tensor's numbers; packed 4-bit dtypes it cannot."""
    if tensor.is_quantized:
        return True
    if tensor.layout is not torch.strided and not tensor.is_nested:
        return tensor.numel() <= DENSE_NUMEL
    return _is_castable(tensor.dtype)


@functools.cache
def _is_castable(dtype: torch.dtype) -> bool:
    try:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        torch.empty(1, dtype=dtype, device="cpu").to(wide)
    except RuntimeError:
        return False
    return True
