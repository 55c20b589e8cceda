"""Measure moments on the CPU by a function in C, which the system's compiler makes when it pays.

The compiler takes a few tenths of a second, once in a process. NumPy goes on if there is no
compiler, or if its function does not work.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

_SOURCE = Path(__file__).with_name("moments.c")
_FLAGS = ("-O3", "-ffp-contract=off", "-shared", "-fPIC")
_MOST_SECONDS = 20.0
_N_SLOTS = 8


@final
class NativeMoments:
    """Call the compiled functions of `moments.c`.

    Args:
        library: the compiled library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._measure = {
            torch.float32: library.measure_float32,
            torch.float64: library.measure_float64,
        }
        self._measure_many = library.measure_many
        for function in self._measure.values():
            function.argtypes = (ctypes.c_void_p, ctypes.c_longlong, ctypes.c_void_p)
        self._measure_many.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong, ctypes.c_void_p,
        )  # fmt: skip
        for function in (*self._measure.values(), self._measure_many):
            function.restype = None

    def add(self, slots: Tensor, flat: Tensor) -> None:
        """Add a contiguous float32 or float64 tensor on the CPU to slots, which are written to."""
        self._measure[flat.dtype](flat.data_ptr(), flat.numel(), slots.data_ptr())

    def measure_many(self, tensors: Sequence[Tensor], slots: Tensor) -> None:
        """Add each of many contiguous float32 tensors on the CPU to a row of slots.

        Args:
            tensors: the tensors.
            slots: slots of shape `(len(tensors), 8)`, which are written to.
        """
        pointers = np.array([tensor.data_ptr() for tensor in tensors], np.uintp)
        sizes = np.array([tensor.numel() for tensor in tensors], np.longlong)
        self._measure_many(pointers.ctypes.data, sizes.ctypes.data, len(tensors), slots.data_ptr())


@functools.cache
def native_moments() -> NativeMoments | None:
    """Compile the functions; None where this is not possible."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")  # such as "ccache gcc"
    except ValueError:  # a quote that is not closed
        return None
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="hookline-") as folder:
            native = NativeMoments(ctypes.CDLL(_compiled(compiler, Path(folder))))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    return native if _is_right(native) else None


def _compiled(compiler: Sequence[str], folder: Path) -> str:
    """Compile the library for this processor, or for any of its kind, and return its path."""
    library = str(folder / "moments.so")
    for option in (["-march=native"], ["-mcpu=native"], []):
        command = [*compiler, *_FLAGS, *option, str(_SOURCE), "-o", library]
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_MOST_SECONDS,
        )
        if not process.returncode:
            break
    return library


def _is_right(native: NativeMoments) -> bool:
    """Tell whether the functions give the known moments of small numbers."""
    for dtype in (torch.float32, torch.float64):
        numbers = torch.arange(-3.0, 1027.0, dtype=dtype)
        numbers[20] = torch.nan
        slots = torch.zeros(_N_SLOTS, dtype=torch.float64)
        native.add(slots, numbers)
        finite = numbers[numbers.isfinite()].double()
        powers = [float((finite**power).sum()) for power in (1, 2, 4)]
        if slots.tolist() != [1030.0, 1.0, 1.0, *powers, 3.0, 1026.0]:
            return False
    return True
