"""Bring values to the CPU while the model runs on."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor


@final
class Offload:
    """Copies values to the CPU: from a GPU into pinned memory, on a stream of its own.

    Args:
        device: the device of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return a contiguous CPU tensor that holds no more memory than its rows."""
        tensor = tensor.detach().contiguous()
        if self._stream is None or not tensor.is_cuda:
            tensor = tensor.cpu()
            is_part = tensor.untyped_storage().nbytes() > tensor.nbytes
            return tensor.clone() if is_part else tensor
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copy.copy_(tensor, non_blocking=True)
        # The allocator may reuse the memory only when this stream is done with it.
        tensor.record_stream(self._stream)
        return copy

    def ready(self) -> Callable[[], None]:
        """Return a function that waits until the values copied so far are on the CPU."""
        if self._stream is None:
            return _nothing
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize


def _nothing() -> None:
    """Wait for nothing: the values are on the CPU already."""
