"""Gather rows that lie in several mapped files with one call of NumPy.

A call for each row costs more than the row's copy, and a call for each file is no better where a
batch has a few rows of many files. But all files lie in the memory of one process. An array over
that memory, with an entry wherever a row could begin, needs only the address of each row.
"""

from __future__ import annotations

import math
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

MISSING = np.iinfo(np.int64).min  # the origin of rows that are not mapped
_FIRST = 64  # an array cannot begin at address 0
_MEMORY_BYTES = 2**48  # no process of a 64-bit system has more
_MOST_NUMBERS = 2**14  # of a row: NumPy computes the bytes of the whole array in 63 bits


@final
class Gatherer:
    """Copies rows of one shape and dtype from wherever they lie in this process.

    Args:
        shape: the shape of a row.
        dtype: the dtype of its numbers.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._shape, self._dtype = shape, dtype
        self._shift = dtype.itemsize.bit_length() - 1
        self._memory = np.asarray(_Memory(math.prod(shape) * dtype.itemsize, dtype.itemsize))

    @staticmethod
    def can(shape: tuple[int, ...]) -> bool:
        """Tell whether rows of a shape can be gathered; copy larger ones one by one."""
        return 0 < math.prod(shape) <= _MOST_NUMBERS

    def __call__(self, addresses: NDArray[np.int64]) -> NDArray[Any]:
        """Copy rows.

        Args:
            addresses: where each begins: in arrays that the caller holds until this returns. They
                are changed.
        """
        addresses -= _FIRST
        addresses >>= self._shift
        rows = self._memory[addresses]
        return rows.view(self._dtype).reshape(len(rows), *self._shape)


@final
class Origins:
    """Hold where the rows of each shard are, for all that is mapped.

    It holds the arrays: what a reader finds here stays mapped until the reader lets go of this,
    even if another thread drops the shard. So shards are only ever added.

    Args:
        n_shards: the number of shards.
    """

    def __init__(self, n_shards: int) -> None:
        self.of_shard = np.full(n_shards, MISSING)
        self._held: list[NDArray[Any]] = []

    def add(self, shard: int, array: NDArray[Any], origin: int) -> None:
        """Add a shard: its rows, and the address at which row 0 of the store would begin."""
        self._held.append(array)
        self.of_shard[shard] = origin


class _Memory:
    """The memory of this process in NumPy's array interface: rows of bytes that overlap."""

    def __init__(self, row_bytes: int, number_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{row_bytes}",
            "data": (_FIRST, True),
            "shape": ((_MEMORY_BYTES - _FIRST - row_bytes) // number_bytes,),
            "strides": (number_bytes,),
        }
