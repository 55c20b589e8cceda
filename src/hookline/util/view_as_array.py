"""View the memory of tensors as arrays, and leave the tensors as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]


def view_as_array(tensor: Tensor) -> NDArray[Any]:
    """View a tensor on the CPU as a read-only array; a conjugate is copied.

    After `Tensor.numpy()`, torch refuses to resize the tensor's memory, as long as it lives. But
    FSDP2 resizes that of weights, and `out=` that of a buffer.
    """
    return np.from_dlpack(_Export(to_dlpack(tensor.resolve_conj().resolve_neg())))


class _Export:
    """A tensor as NumPy asks for it: `Tensor.__dlpack__` takes four times as long."""

    __slots__ = ("_capsule",)

    def __init__(self, capsule: Any) -> None:
        self._capsule: Any = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU
