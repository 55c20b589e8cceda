"""Measure on the CPU by functions in C, which the system's compiler makes when it pays.

The compiler takes a few tenths of a second, once in a process. NumPy and torch go on if there is no
compiler, or if its functions do not work.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_MOST_SECONDS = 20.0
_N_SLOTS = 8
_Native = TypeVar("_Native")
_Check = Callable[[Any], bool]


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


class Rows(NamedTuple):
    """Two contiguous tensors on the CPU, of one shape and one dtype of `READ_BY_C`, as rows."""

    a: Tensor
    b: Tensor

    @property
    def width(self) -> int:
        """The number of elements of a row; that of a single number is 1."""
        return self.b.shape[-1] if self.b.dim() else 1

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return self.b.numel() // max(self.width, 1)


class Gaps(NamedTuple):
    """Tell how far the rows of a lie from those of b. Sums are over all elements."""

    gap: float  # of the squares of the difference
    norm_a: float  # of the squares of a
    n_unequal: float  # of 1 for each element that is not equal
    worst_row: float
    row: float  # its number
    worst_element: float
    element: float  # its number


READ_BY_C = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@final
class NativeDifference:
    """Call the compiled functions of `difference.c`.

    Args:
        library: the compiled library.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sizes, self._gaps = (
            {dtype: getattr(library, f"{name}_{str(dtype)[6:]}") for dtype in READ_BY_C}
            for name in ("sizes", "gaps")
        )
        number, pointer = ctypes.c_longlong, ctypes.c_void_p
        for function in self._sizes.values():
            function.argtypes = (pointer, number, number, pointer)
        for function in self._gaps.values():
            function.argtypes = (pointer, pointer, number, number, pointer)
        for function in (*self._sizes.values(), *self._gaps.values()):
            function.restype = None

    def sizes(self, rows: Rows) -> tuple[float, float] | None:
        """Return the sums of b's squares and of the norms of its rows; None if not finite."""
        sums = (ctypes.c_double * 2)()
        self._sizes[rows.b.dtype](rows.b.data_ptr(), rows.n_rows, rows.width, sums)
        return (sums[0], sums[1]) if math.isfinite(sums[0]) else None

    def gaps(self, rows: Rows, least_row: float, least_element: float) -> Gaps | None:
        """Return how far the rows of a lie from those of b; None if a number is not finite.

        Args:
            rows: the tensors.
            least_row: the norm of a row by which smaller ones are measured.
            least_element: the size of an element by which smaller ones are measured.
        """
        slots = (ctypes.c_double * 9)(*[0.0] * 7, least_row, least_element)
        pointers = rows.a.data_ptr(), rows.b.data_ptr()
        self._gaps[rows.b.dtype](*pointers, rows.n_rows, rows.width, slots)
        gaps = Gaps(*slots[:7])
        return gaps if math.isfinite(gaps.gap + gaps.norm_a) else None


@functools.cache
def native_moments() -> NativeMoments | None:
    """Compile the functions of moments; None where this is not possible."""
    return _made("moments.c", NativeMoments, _is_right)


@functools.cache
def native_difference() -> NativeDifference | None:
    """Compile the functions of a difference; None where this is not possible."""
    return _made("difference.c", NativeDifference, _tells_apart)


def _made(name: str, wrap: Callable[[ctypes.CDLL], _Native], is_right: _Check) -> _Native | None:
    """Compile a source and wrap the library; None where it is not possible, or fails a check."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")  # such as "ccache gcc"
    except ValueError:  # a quote that is not closed
        return None
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="hookline-") as folder:
            native = wrap(ctypes.CDLL(_compiled(compiler, _SOURCES / name, Path(folder))))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    return native if is_right(native) else None


def _compiled(compiler: Sequence[str], source: Path, folder: Path) -> str:
    """Compile a library for this processor, or for any of its kind, and return its path."""
    library = str(folder / "library.so")
    for option in (["-march=native"], ["-mcpu=native"], []):
        command = [*compiler, *_FLAGS, *option, str(source), "-o", library]
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
        numbers = torch.arange(-3.0, 1027.0, dtype=dtype, device="cpu")
        numbers[20] = torch.nan
        slots = torch.zeros(_N_SLOTS, dtype=torch.float64, device="cpu")
        native.add(slots, numbers)
        finite = numbers[numbers.isfinite()].double()
        powers = [float((finite**power).sum()) for power in (1, 2, 4)]
        if slots.tolist() != [1030.0, 1.0, 1.0, *powers, 3.0, 1026.0]:
            return False
    return True


def _tells_apart(native: NativeDifference) -> bool:
    """Tell whether the functions give the known differences of small numbers."""
    for dtype in READ_BY_C:
        b = torch.ones(3, 289, dtype=dtype, device="cpu")
        a = b.clone()
        a[1] += 1.0
        a[2, 288] = 4.0
        rows = Rows(a, b)
        if native.sizes(rows) != (867.0, 51.0):
            return False
        if native.gaps(rows, 17.0, 1.0) != (298.0, 1749.0, 290.0, 1.0, 1.0, 3.0, 866.0):
            return False
    return True
