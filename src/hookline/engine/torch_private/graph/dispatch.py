"""torch's dispatch modes, and the memory of tensors that dispatch hides."""

from __future__ import annotations

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
