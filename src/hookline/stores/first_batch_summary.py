"""Sum up the values of a job's first batch in a few numbers, by which another model is noticed.

A plain attribute, code, a hook or an edit changes a model's values as weights do. The digests of
equal values are equal. If rounding may differ, as on another machine, sums of the values are
compared instead.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_128

from hookline.engine.run_settings import ROUNDING
from hookline.files.safetensors_file import DTYPE_NAMES, DTYPES, to_byte_array

# The values of a column are dealt to so many sums, with arbitrary signs. A prime: the sums cut
# across any dimension.
_N_SUMS = 31
_PRECISIONS = {"highest": "ieee", "high": "tf32", "medium": "bf16"}
# The greatest distance of whole numbers of one model on other hardware, such as of an argmax.
_INTEGERS_ELSEWHERE = 0.5


class ComputePrecision(NamedTuple):
    """Describe the rounding of a model's operations."""

    device: str  # the type of its device
    rounding: float  # the relative rounding of its coarsest dtype
    is_split: bool  # tensor parallelism adds the numbers in another order than one process does

    @staticmethod
    def from_dtypes(
        device: str, dtypes: Iterable[torch.dtype], *, is_split: bool
    ) -> ComputePrecision:
        """Return the description of a model with parameters, or an autocast, of these dtypes."""
        rounding = max(
            ROUNDING[_PRECISIONS[torch.get_float32_matmul_precision()]],
            ROUNDING["ieee" if device == "cpu" else "tf32"],
            *map(_machine_epsilon, {torch.float32, *dtypes} if device != "cpu" else dtypes),
            0.0,
        )
        return ComputePrecision(device, rounding, is_split)


class SummaryDifferences(NamedTuple):
    """Describe the difference of the values of two first batches."""

    far: list[str]  # a text for each column whose values differ by more than rounding
    near: list[str]  # a text for each column whose values differ by rounding alone


def summarize_columns(columns: Mapping[str, Tensor], precision: ComputePrecision) -> dict[str, Any]:
    """Return the columns of a batch, which are on the CPU, in a few numbers, for JSON."""
    facts: dict[str, Any] = {"device": precision.device, "rounding": precision.rounding}
    if precision.is_split:
        facts["split"] = True
    return {**facts, "columns": {name: _summarize_column(rows) for name, rows in columns.items()}}


def compare_summaries(
    was: Mapping[str, Any], now: Mapping[str, Any], *, is_same_setup: bool
) -> SummaryDifferences:
    """Compare the summary of a first batch that a store was begun with, and that of this call.

    `is_same_setup` tells that versions, hardware and settings are the same. Equal values then have
    equal bits, but for the alignment of memory.
    """
    is_exact = is_same_setup and was["device"] == now["device"]
    is_exact = is_exact and "split" not in was and "split" not in now
    rounding = max(was["rounding"], now["rounding"])
    differences = SummaryDifferences([], [])
    for name, column in now["columns"].items():
        before = was["columns"].get(name)
        if before is None or before["digest"] == column["digest"]:
            continue  # the forms of the columns are compared before
        distance = _relative_distance(before, column)
        is_near = distance <= _tolerance(column["dtype"], rounding, is_exact=is_exact)
        texts = differences.near if is_near else differences.far
        texts.append(f"{name}: values differ by about {distance:.2g} of their norm")
    return differences


def _tolerance(dtype: str, rounding: float, *, is_exact: bool) -> float:
    """Return the greatest distance of values of the same model, relative to their norm."""
    kind = DTYPES[dtype]
    if not (kind.is_floating_point or kind.is_complex):
        return 0.0 if is_exact else _INTEGERS_ELSEWHERE
    rounding = max(rounding, _machine_epsilon(kind))
    # Rounding adds up over the layers. Half of the digits must agree on another machine.
    return min(8 * rounding, math.sqrt(rounding) / 8) if is_exact else math.sqrt(rounding)


def _machine_epsilon(dtype: torch.dtype) -> float:
    is_real = dtype.is_floating_point or dtype.is_complex
    return float(torch.finfo(dtype).eps) if is_real else 0.0


def _summarize_column(tensor: Tensor) -> dict[str, Any]:
    digest = xxh3_128(f"{list(tensor.shape)}".encode())
    digest.update(to_byte_array(tensor).data)
    rows = _pad_to_rows(tensor)
    n_not_finite, square = 0, _sum_of_squares(rows)
    if not math.isfinite(square):
        finite = np.isfinite(rows)
        n_not_finite = int((~finite).sum())
        rows = np.where(finite, rows, 0)
        square = _sum_of_squares(rows)
    n_digits = 17 if tensor.dtype.itemsize >= 8 else 9
    sums = np.einsum("i,ij->j", _fixed_signs(len(rows)), rows, dtype=np.float64).tolist()
    return {
        "dtype": DTYPE_NAMES[tensor.dtype],
        "digest": digest.hexdigest(),
        "not_finite": n_not_finite,
        "norm": _round_to_significant_digits(math.sqrt(square), n_digits),
        "sums": [_round_to_significant_digits(number, n_digits) for number in sums],
    }


def _pad_to_rows(tensor: Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor in rows of `_N_SUMS`, zeros behind them, as float32 or 64."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = tensor.reshape(-1)
    if not flat.is_floating_point():
        flat = flat.double()
    elif flat.itemsize < 4:
        flat = flat.float()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % _N_SUMS))
    rows: NDArray[Any] = padded.view(-1, _N_SUMS).numpy()
    return rows


def _fixed_signs(n: int) -> NDArray[np.float64]:
    """Return the same arbitrary signs in every process.

    With them, the squares of sums add up to about the square of the norm, whatever the values are.
    """
    data = np.frombuffer(hashlib.shake_256(b"hookline").digest(-(-n // 8)), np.uint8)
    return np.unpackbits(data)[:n].astype(np.float64) * 2 - 1


def _sum_of_squares(rows: NDArray[Any]) -> float:
    return float(np.einsum("ij,ij->", rows, rows, dtype=np.float64))


def _round_to_significant_digits(number: float, n_digits: int) -> float:
    return float(f"{number:.{n_digits}g}")


def _relative_distance(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Return about the norm of the difference of two columns, relative to theirs."""
    if was["not_finite"] != now["not_finite"]:
        return math.inf
    scale = max(was["norm"], now["norm"])
    return math.dist(was["sums"], now["sums"]) / scale if scale else 0.0
