"""The memory that batches are copied into."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hookline.files.safetensors_file import DTYPE_NAMES

REUSED_BYTES = 2**20  # of a batch; a smaller one is quick to copy anywhere
_MOST_FREE = 2
_ALIGNMENT = 64  # bytes, as of torch's own tensors


@final
class BufferPool:
    """Memory for batches, used again once no tensor or array refers to it.

    Memory that is new to the process takes two to three times as long to fill.
    """

    def __init__(self) -> None:
        self._free: deque[NDArray[np.uint8]] = deque(maxlen=_MOST_FREE)

    def __reduce__(self) -> tuple[Any, ...]:
        return BufferPool, ()  # another process has memory of its own

    @property
    def n_free(self) -> int:
        """The number of blocks that wait for a batch."""
        return len(self._free)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor of the shape, strides and dtype of another one, not filled."""
        n_bytes = tensor.nbytes
        is_plain = tensor.is_contiguous() and tensor.dtype in DTYPE_NAMES
        if n_bytes < REUSED_BYTES or not is_plain:
            return torch.empty_like(tensor)
        block = self._reuse_or_allocate(n_bytes)
        part = block[:n_bytes]
        # torch refers to the array as long as anything has its memory.
        weakref.finalize(part, self._free.append, block).atexit = False
        return torch.from_numpy(part).view(tensor.dtype).view(tensor.shape)

    def _reuse_or_allocate(self, n_bytes: int) -> NDArray[np.uint8]:
        """Return a block that nothing refers to, and that has at least so many bytes."""
        try:
            block = self._free.pop()  # atomic: no other thread gets it
        except IndexError:
            block = np.empty(0, np.uint8)
        if len(block) >= n_bytes:
            return block
        memory = np.empty(n_bytes + _ALIGNMENT, np.uint8)
        return memory[-memory.ctypes.data % _ALIGNMENT :]
