"""The number of an epoch, also in the workers of a DataLoader, which start anew for each."""

from __future__ import annotations

from typing import Any, final

import torch
from torch.utils.data import get_worker_info

_N_SLOTS = 1024
_LOW = 2**32 - 1


@final
class Epochs:
    """Counts the iterations over a data set, in this process or by all workers of a loader.

    The workers of one epoch must agree on its number, also where some are ended early. They cannot
    ask the process that started them. So each writes to memory that all share: a number that the
    loader draws for the epoch, and the epoch, in one write. A worker that finds the loader's number
    takes the epoch beside it; else it begins the next.
    """

    def __init__(self) -> None:
        # In the lower half of a slot the count of begun epochs, in the upper the loader's number.
        self._slots = torch.zeros(_N_SLOTS, dtype=torch.int64)
        self._slots.share_memory_()  # type: ignore[no-untyped-call]
        self._n_begun_here = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._slots.share_memory_()  # type: ignore[no-untyped-call]

    def set(self, epoch: int) -> None:
        """Choose the epoch that begins next."""
        self._slots.fill_(epoch)

    def begin(self) -> int:
        """Return the number of the epoch that begins with this iteration."""
        worker = get_worker_info()
        slots: list[int] = self._slots.tolist()
        n_begun = max(slot & _LOW for slot in slots)
        if worker is None:
            self._slots[0] = n_begun + 1
            return n_begun
        # Workers that persist keep their seed, so their own count tells epochs apart.
        seed = worker.seed - worker.id + self._n_begun_here * 0x9E3779B97F4A7C15
        self._n_begun_here += 1
        mark = (seed ^ seed >> 32) & 0x7FFFFFFF | 1
        for slot in slots:
            if slot >> 32 == mark:
                return (slot & _LOW) - 1
        self._slots[1 + worker.id % (_N_SLOTS - 1)] = mark << 32 | n_begun + 1
        return n_begun
