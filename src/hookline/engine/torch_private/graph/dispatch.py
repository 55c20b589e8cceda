"""torch's dispatch modes, and the parts and memory of tensors that dispatch hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# A context in which calls of torch run aside from the function modes that are on.
without_function_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction


@contextmanager
def without_modes() -> Iterator[None]:
    """Run operations aside from the dispatch modes and function modes that are on."""
    with without_function_modes(), _disable_current_modes():
        yield


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


def jagged_parts(tensor: Any) -> tuple[list[Tensor], int]:
    """Return the values, offsets and lengths (if any) of a jagged tensor, and its ragged dim."""
    parts = tensor.values(), tensor.offsets(), tensor.lengths()
    return [part for part in parts if part is not None], tensor._ragged_idx


def jagged_from_parts(parts: list[Tensor], dim: int) -> Tensor:
    """Make a jagged tensor of the results of `jagged_parts`."""
    # Not nested_tensor_from_jagged, which warns in the backward of a graph.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets_lengths

    view_of: Callable[..., Tensor] = nested_view_from_values_offsets_lengths
    values, offsets, lengths = parts if len(parts) == 3 else (*parts, None)
    return view_of(values, offsets, lengths, dim)
