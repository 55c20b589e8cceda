"""View the memory of tensors as arrays, and leave the tensors as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def view_as_array(tensor: Tensor) -> NDArray[Any]:
    """View a tensor on the CPU as an array, which is read before anything else happens.

    After `Tensor.numpy()`, torch refuses to resize the tensor's memory, as long as it lives. But
    FSDP2 resizes that of weights, and `out=` that of a buffer.
    """
    return np.from_dlpack(tensor.detach())
