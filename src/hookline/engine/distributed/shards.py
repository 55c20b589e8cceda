"""The parts of a value that lie on this rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.engine.pytree import tree
from hookline.engine.torch_private.distributed import local_part


def local_shards(value: Any) -> Any:
    """A value with this rank's part in the place of each DTensor; itself if there is none.

    No rank talks to another for it, nor for anything that is computed from it.
    """
    if type(value) is Tensor or all(local_part(part) is part for _, part in tree.tensors(value)):
        return value
    return tree.map_tensors(local_part, value)
