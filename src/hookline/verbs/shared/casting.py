"""Cast models and values to a floating dtype; complex numbers stay complex."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def dtype_after_cast(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor takes where floating tensors take a dtype.

    >>> cast_dtype(torch.zeros(1, dtype=torch.complex64), torch.float64)
    torch.complex128
    """
    if tensor.is_floating_point():
        return dtype
    if not tensor.is_complex():
        return tensor.dtype
    if dtype is torch.float64:
        return torch.complex128
    return torch.complex64 if tensor.dtype is torch.complex128 else tensor.dtype


def cast_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters and buffers of a model, which is changed.

    `model.to(dtype)` would drop the imaginary parts of complex ones.
    """
    getattr(model, _METHODS[dtype])()  # of real tensors alone
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(dtype_after_cast(tensor, dtype))
    return model


_METHODS = {
    torch.float64: "double", torch.float32: "float", torch.float16: "half",
    torch.bfloat16: "bfloat16",
}  # fmt: skip
