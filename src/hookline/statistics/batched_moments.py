"""The moments of many small tensors on a GPU, in as many operations as those of one.

There each operation takes microseconds of Python, whatever the size of the tensor. So the tensors
are laid out in rows of one matrix; the rows are measured together, and added up by tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hookline.statistics.flat_numbers import in_memory_order, to_real_float

MOST_NUMEL = 2**20  # of a tensor: a larger one is worth operations of its own
_ROW_NUMEL = 2**12
_BATCH_NUMEL = 2**22  # of a matrix, which takes 32 MiB in float64


def batched_moments(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Measure strided tensors of one floating dtype on one device.

    Args:
        tensors: the tensors, of at most `MOST_NUMEL` elements each.

    Returns:
        The slots of each tensor, as `MomentsStatistic` has them.
    """
    with torch.autocast(tensors[0].device.type, enabled=False):
        return [slots for batch in _batches(tensors) for slots in _measure_batch(batch).unbind()]


def is_on_default_stream(device: torch.device) -> bool:
    """Tell whether what is called now runs on the device after all that was called before.

    On another CUDA stream it need not, and a CUDA graph may be captured, where nothing runs.
    """
    return device.type != "cuda" or torch.cuda.current_stream(device).cuda_stream == 0


def await_default_stream(tensors: Sequence[Tensor]) -> None:
    """Have the current streams wait for tensors that were made on the default ones."""
    for device in {tensor.device for tensor in tensors}:
        if is_on_default_stream(device):
            continue
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        for tensor in tensors:
            if tensor.device == device:
                tensor.record_stream(stream)  # its memory is not reused before


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in turn, as many as fit into one matrix."""
    batch: list[Tensor] = []
    n_left = _BATCH_NUMEL // _ROW_NUMEL
    for tensor in tensors:
        n_left -= _n_rows(tensor.numel())
        if n_left < 0:
            yield batch
            batch, n_left = [], _BATCH_NUMEL // _ROW_NUMEL - _n_rows(tensor.numel())
        batch.append(tensor)
    yield batch


def _measure_batch(tensors: Sequence[Tensor]) -> Tensor:
    """Return the slots of tensors that fit into one matrix, in a row for each."""
    values = to_real_float(_stack_in_rows(tensors))
    is_finite = values.abs() < math.inf  # NaN is not less
    numbers = torch.where(is_finite, values, 0.0).to(torch.float64)
    squares = numbers * numbers
    sums = [
        (~is_finite).sum(1, dtype=torch.float64),
        (values == 0).sum(1, dtype=torch.float64),
        numbers.sum(1),
        squares.sum(1),
        (squares * squares).sum(1),
    ]
    signed = [torch.where(is_finite, side, -math.inf).amax(1) for side in (-values, values)]
    n_rows, numels, paddings = _row_layout(tuple(map(Tensor.numel, tensors)), values.device)
    slots, extremes = (
        torch.segment_reduce(torch.stack(columns, 1), how, lengths=n_rows, unsafe=True)
        for columns, how in ((sums, "sum"), (signed, "max"))
    )
    slots[:, 0] -= paddings
    return torch.cat([numels, slots, extremes.to(torch.float64)], 1)


def _stack_in_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors out in rows. NaN fills their last rows, which no sum and no extreme counts."""
    padding = torch.full((_ROW_NUMEL,), math.nan, dtype=tensors[0].dtype, device=tensors[0].device)
    parts: list[Tensor] = []
    for tensor in tensors:
        parts += in_memory_order(tensor).reshape(-1), padding[: -tensor.numel() % _ROW_NUMEL]
    return torch.cat(parts).view(-1, _ROW_NUMEL)


def _n_rows(numel: int) -> int:
    return -(-numel // _ROW_NUMEL)


@functools.lru_cache(64)  # the weights, gradients and updates of a model have the same
def _row_layout(numels: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each tensor how many rows it has, its elements as a column, and its paddings."""
    columns = [list(map(_n_rows, numels)), numels, [-numel % _ROW_NUMEL for numel in numels]]
    is_pinned = device.type == "cuda"  # a copy from other memory would wait for the device
    host = torch.tensor(columns, device="cpu", pin_memory=is_pinned)
    n_rows, counts, paddings = host.to(device, non_blocking=is_pinned).unbind()
    return n_rows, counts.to(torch.float64)[:, None], paddings
