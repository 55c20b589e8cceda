"""Run a user's function without autocast, and compute its reductions of 16-bit floats in float32.

Sums, means and norms of float16 overflow. Those of bfloat16 keep three digits. Under autocast, a
product of float32 matrices is computed in 16 bits, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hookline.engine import without_autocast
from hookline.engine.pytree import tree

# fmt: off
_NARROW = frozenset({
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
})
# The functions that autocast computes in float32 on an accelerator, and some that it leaves out.
# They are held by name, because a graph cannot have guards on functions.
_WIDE = frozenset({
    "cdist", "corrcoef", "cosine_similarity", "cov", "cumprod", "cumsum", "dist", "exp", "l1_loss",
    "linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "logcumsumexp", "logsumexp", "mean",
    "mse_loss", "nanmean", "nansum", "norm", "pow", "prod", "smooth_l1_loss", "special_logsumexp",
    "square", "std", "std_mean", "sum", "trace", "var", "var_mean",
})
# fmt: on


@final
class _InFloat32(TorchFunctionMode):
    """Compute sums, means, norms and powers of narrow floats in float32, and return float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in _WIDE:
            args = tuple([_to_float32(argument) for argument in args])
            kwargs = {name: _to_float32(argument) for name, argument in kwargs.items()}
        return func(*args, **kwargs)


def _to_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value


def call_in_float32(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to a value without autocast, with reductions in float32."""
    tensors = [tensor for _, tensor in tree.tensors(value)]
    if not tensors:
        return function(value)
    with without_autocast(tensors[0].device.type):
        if not any(tensor.dtype in _NARROW for tensor in tensors):
            return function(value)
        with _InFloat32():
            return function(value)
