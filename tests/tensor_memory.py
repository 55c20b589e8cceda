"""Count the memory that tensors take at one time."""

from __future__ import annotations

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Counts the bytes of the memory that lives at one time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage):
        address = storage.data_ptr()
        if address not in self._known:
            self._known.add(address)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, address, storage.nbytes())

    def _drop(self, address, size):
        self._known.discard(address)
        self.now -= size
