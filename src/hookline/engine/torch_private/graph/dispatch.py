"""torch's dispatch modes, and the parts and memory of tensors that dispatch hides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# A context in which operations run aside from the dispatch modes that are on.
without_dispatch_modes = _disable_current_modes


def storage_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's numbers; None if it has no memory of its own.

    The numbers of a sparse or jagged tensor are those of its values.
    """
    try:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        return tensor.untyped_storage().data_ptr() or None
    except (RuntimeError, NotImplementedError):
        return None


def jagged_parts(tensor: Any) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Return the values, offsets, lengths and ragged dimension of a jagged tensor."""
    return tensor.values(), tensor.offsets(), tensor.lengths(), tensor._ragged_idx


def jagged_of(values: Tensor, offsets: Tensor, lengths: Tensor | None, dim: int) -> Tensor:
    """Make a jagged tensor of its parts."""
    # Not nested_tensor_from_jagged, which warns in the backward of a graph.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    view_of: Callable[..., Tensor] = nested_view_from_values_offsets_lengths
    return view_of(values, offsets, lengths, dim)
