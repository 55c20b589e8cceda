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
from typing import Any, Generic, NamedTuple, TypeVar, final

import numpy as np
import torch
from torch import Tensor

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC")
_MOST_SECONDS = 20.0
_N_SLOTS = 8
_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_longlong
_Native = TypeVar("_Native")


def _c_function(library: ctypes.CDLL, name: str, *types: type) -> Any:
    """Return a function of a library, which takes these types and returns nothing."""
    function = getattr(library, name)
    function.argtypes, function.restype = types, None
    return function


@final
class NativeMoments:
    """Call the compiled functions of `moments.c`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._measure = {
            dtype: _c_function(library, f"measure_{str(dtype)[6:]}", _POINTER, _NUMBER, _POINTER)
            for dtype in (torch.float32, torch.float64)
        }
        types = _POINTER, _POINTER, _NUMBER, _POINTER
        self._measure_many = _c_function(library, "measure_many", *types)

    def add_tensor(self, slots: Tensor, flat: Tensor) -> None:
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


class RowPair(NamedTuple):
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
    """Tell how far a lies from b. Sums are over all elements that are finite in both."""

    gap: float = 0.0  # the sum of the squares of the difference
    norm_a: float = 0.0  # the sum of the squares of a
    row: tuple[float, int] = (0.0, 0)  # the worst, and its number
    element: tuple[float, int] = (0.0, 0)
    n_unequal: int = 0
    n_odd: int = 0  # elements that are not finite in one of the two only


READ_BY_C = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@final
class NativeDifference:
    """Call the compiled functions of `difference.c`."""

    def __init__(self, library: ctypes.CDLL) -> None:
        of_b = _POINTER, _NUMBER, _NUMBER, _POINTER
        names = {dtype: str(dtype)[6:] for dtype in READ_BY_C}
        self._sizes = {d: _c_function(library, f"sizes_{name}", *of_b) for d, name in names.items()}
        self._gaps = {
            d: _c_function(library, f"gaps_{name}", _POINTER, *of_b) for d, name in names.items()
        }

    def reference_norms(self, rows: RowPair) -> tuple[float, float] | None:
        """Return the sums of b's squares and of the norms of its rows; None if not finite."""
        sums = (ctypes.c_double * 2)()
        self._sizes[rows.b.dtype](rows.b.data_ptr(), rows.n_rows, rows.width, sums)
        return (sums[0], sums[1]) if math.isfinite(sums[0]) else None

    def gaps(self, rows: RowPair, least_row: float, least_element: float) -> Gaps | None:
        """Return how far the rows of a lie from those of b; None if a number is not finite.

        Args:
            rows: the tensors.
            least_row: the norm of a row by which smaller ones are measured.
            least_element: the size of an element by which smaller ones are measured.
        """
        slots = (ctypes.c_double * 9)(*[0.0] * 7, least_row, least_element)
        pointers = rows.a.data_ptr(), rows.b.data_ptr()
        self._gaps[rows.b.dtype](*pointers, rows.n_rows, rows.width, slots)
        gap, norm_a, n_unequal, worst_row, row, worst_element, element = slots[:7]
        worst = (worst_row, int(row)), (worst_element, int(element))
        is_finite = math.isfinite(gap + norm_a)
        return Gaps(gap, norm_a, *worst, int(n_unequal)) if is_finite else None


@final
class CompileMeter(Generic[_Native]):
    """Count the elements that are measured, until it is worth to compile functions in C.

    Args:
        until_native: the number of elements; infinite for never.
        compiled: compiles the functions; None where that is not possible.
    """

    def __init__(self, until_native: float, compiled: Callable[[], _Native | None]) -> None:
        self.until_native = until_native
        self._compiled = compiled

    def count_and_compile(self, numel: int) -> _Native | None:
        """Return the functions; None until they are worth it, and where that is not possible."""
        if self.until_native > 0:
            self.until_native -= numel
            return None
        return self._compiled()


@functools.cache
def compile_moments() -> NativeMoments | None:
    """Compile the functions of moments; None where this is not possible."""
    return _compile_if_right("moments.c", NativeMoments, _has_right_moments)


@functools.cache
def compile_difference() -> NativeDifference | None:
    """Compile the functions of a difference; None where this is not possible."""
    return _compile_if_right("difference.c", NativeDifference, _has_right_gaps)


def _compile_if_right(
    name: str, wrap: Callable[[ctypes.CDLL], _Native], is_right: Callable[[Any], bool]
) -> _Native | None:
    """Compile a source and wrap the library; None where it is not possible, or fails a check."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")  # such as "ccache gcc"
    except ValueError:  # a quote that is not closed
        return None
    if os.name != "posix" or not compiler or shutil.which(compiler[0]) is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="hookline-") as folder:
            native = wrap(ctypes.CDLL(_compile_library(compiler, _SOURCES / name, Path(folder))))
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    return native if is_right(native) else None


def _compile_library(compiler: Sequence[str], source: Path, folder: Path) -> str:
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


def _has_right_moments(native: NativeMoments) -> bool:
    """Tell whether the functions give the known moments of small numbers."""
    for dtype in (torch.float32, torch.float64):
        numbers = torch.arange(-3.0, 1027.0, dtype=dtype, device="cpu")
        numbers[20] = torch.nan
        slots = torch.zeros(_N_SLOTS, dtype=torch.float64, device="cpu")
        native.add_tensor(slots, numbers)
        finite = numbers[numbers.isfinite()].double()
        powers = [float((finite**power).sum()) for power in (1, 2, 4)]
        if slots.tolist() != [1030.0, 1.0, 1.0, *powers, 3.0, 1026.0]:
            return False
    return True


def _has_right_gaps(native: NativeDifference) -> bool:
    """Tell whether the functions give the known differences of small numbers."""
    for dtype in READ_BY_C:
        b = torch.ones(3, 289, dtype=dtype, device="cpu")
        a = b.clone()
        a[1] += 1.0
        a[2, 288] = 4.0
        rows = RowPair(a, b)
        if native.reference_norms(rows) != (867.0, 51.0):
            return False
        if native.gaps(rows, 17.0, 1.0) != (298.0, 1749.0, (1.0, 1), (3.0, 866), 290, 0):
            return False
    return True
