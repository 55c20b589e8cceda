"""The parts of a value that lie on this rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hookline.engine.pytree import tree
from hookline.engine.torch_private.distributed import local_part


def local_shards(value: Any) -> Any:
    """Return a value with this rank's part in place of each DTensor.

    A value without DTensors is returned itself. Neither this function nor any computation on its
    result communicates with another rank.
    """
    if type(value) is Tensor or all(local_part(part) is part for _, part in tree.tensors(value)):
        return value
    return tree.map_tensors(local_part, value)
