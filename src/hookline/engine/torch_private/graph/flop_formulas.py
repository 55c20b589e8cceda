"""Count the FLOPs of operations for which torch's counter has no formula."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Formula = Callable[..., int]
_aten = torch.ops.aten


@functools.cache
def extra_formulas() -> dict[Any, Formula]:
    """Return formulas that torch's counter lacks, or has wrong; a multiply-add counts as two.

    A formula takes the operation's own arguments and, as `out_val`, its result.
    """
    table: dict[Any, Formula] = {
        _aten._native_multi_head_attention: _multi_head_flops,
        _aten.mkldnn_rnn_layer: _rnn_layer_flops,
        _aten.mkldnn_rnn_layer_backward: lambda *args, **_: 2 * _rnn_layer_flops(*args),
        _aten._trilinear: _trilinear_flops,
        _aten.convolution_backward: _convolution_backward_flops,
        _aten._euclidean_dist: _cdist_flops,
        _aten.mv: lambda matrix, _, **__: 2 * matrix.numel(),
        _aten.addmv: lambda _, matrix, *__, **___: 2 * matrix.numel(),
        _aten.addmv_: lambda _, matrix, *__, **___: 2 * matrix.numel(),
        _aten.bmm: _matmul_flops,
        _aten.dot: lambda vector, _, **__: 2 * vector.numel(),
        _aten.vdot: lambda vector, _, **__: 2 * vector.numel(),
        _aten._int_mm: _matmul_flops,
        _aten._grouped_mm: _matmul_flops,
        _aten._sparse_addmm: lambda _, *matrices, **__: _matmul_flops(*matrices),
    }
    for name in _ADDED_TO:
        table[getattr(_aten, name)] = lambda _, *matrices, **__: _matmul_flops(*matrices)
    for name in ("_cudnn_rnn", "miopen_rnn"):
        table[getattr(_aten, name)] = _rnn_flops
        table[getattr(_aten, f"{name}_backward")] = _rnn_backward_flops
    for name in _ATTENTION:
        table[getattr(_aten, f"_scaled_dot_product_{name}")] = _attention_flops
        table[getattr(_aten, f"_scaled_dot_product_{name}_backward")] = _attention_backward_flops
    every: Any = table.values()
    for formula in every:
        formula._get_raw = True  # torch's mark of a formula that takes tensors
    return table


# torch's formulas of these refuse keys with fewer heads than queries, as grouped queries have.
_ATTENTION = (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
    "fused_attention_overrideable",
)  # fmt: skip
# Some have a formula of torch, which fails where a dtype of the result is given.
_ADDED_TO = ("addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "_addmm_activation")


def sparse_formula(operation: Any, args: Sequence[Any]) -> Formula | None:
    """Return the formula of a product of a sparse and a dense tensor; None for another operation.

    It counts the values that the sparse tensor holds. torch's formulas count all elements.
    """
    factors = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    n_sparse = sum(map(_is_sparse, factors))
    return _sparse_product_flops if operation in _PRODUCTS and n_sparse == 1 else None


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided and not tensor.is_mkldnn


def _sparse_product_flops(*args: Any, **_: Any) -> int:
    left, right = [arg for arg in args if isinstance(arg, Tensor)][-2:]
    sparse, dense, dim = (left, right, -1) if _is_sparse(left) else (right, left, -2)
    is_coo = sparse.layout is torch.sparse_coo
    values = sparse._values() if is_coo else sparse.values()  # those of a COO tensor may repeat
    return 2 * values.numel() * (dense.shape[dim] if dense.dim() >= _MATRIX else 1)


_PRODUCTS = (
    _aten.mm, _aten.addmm, _aten.addmm_, _aten._sparse_addmm, _aten.bmm, _aten.baddbmm,
    _aten.mv, _aten.addmv, _aten.addmv_,
)  # fmt: skip


def unsized_workspace(operation: Any, out: Any) -> Any:
    """Return the workspace that an operation keeps for backward; None without one.

    In `out`, the operation's result on tensors without numbers, the workspace is empty.
    """
    if operation not in _WORKSPACES or not isinstance(out, tuple | list):
        return None
    workspace = out[PLACE_OF_WORKSPACE]
    is_kept = torch.is_grad_enabled() and isinstance(workspace, Tensor) and not workspace.numel()
    return workspace if is_kept else None


PLACE_OF_WORKSPACE = 3  # in the result of each of these operations
_WORKSPACES = (_aten.mkldnn_rnn_layer, _aten._cudnn_rnn, _aten.miopen_rnn)


def _rnn_flops(inputs: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Count all layers and directions; each row of the input meets each weight matrix once."""
    rows = inputs.numel() // max(inputs.shape[-1], 1)
    return 2 * rows * sum(weight.numel() for weight in weights if weight.dim() == _MATRIX)


def _rnn_backward_flops(inputs: Tensor, weights: Sequence[Tensor], *rest: Any, **_: Any) -> int:
    """Count the gradients of inputs and states, and those of the weights where they are wanted."""
    has_weights = bool(rest[-1][-1])  # the last argument says which gradients are wanted
    return _rnn_flops(inputs, weights) * (2 if has_weights else 1)


def _rnn_layer_flops(inputs: Tensor, *weights: Any, **_: Any) -> int:
    """Count one layer in one direction."""
    return _rnn_flops(inputs, weights[:2])


def _matmul_flops(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    """Count a product of matrices, of batches of matrices, or of groups of rows or columns."""
    batch = left.shape[0] if left.dim() == right.dim() == _MATRIX + 1 else 1
    return int(2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1])


def _convolution_backward_flops(
    grad: Tensor, inputs: Tensor, weight: Tensor, *rest: Any, **_: Any
) -> int:
    """Count as much for each gradient as for the forward. torch's formula forgets the groups."""
    is_transposed, wanted = rest[4], rest[7]
    places = (inputs if is_transposed else grad).shape[2:]
    n_places = inputs.shape[0] * math.prod(places)
    return int(2 * n_places * weight.numel() * sum(wanted[:2]))


def _cdist_flops(left: Tensor, right: Tensor, **_: Any) -> int:
    """Count the product by which `torch.cdist` computes distances; it adds two columns."""
    rows = math.prod(left.shape[:-1])
    return 2 * rows * right.shape[-2] * (left.shape[-1] + 2)


def _multi_head_flops(
    query: Tensor, key: Tensor, value: Tensor, width: int, *_: Any, **__: Any
) -> int:
    """Count the projections of attention and the attention itself."""
    batch, n_queries, n_keys = query.shape[0], query.shape[1], key.shape[1]
    projections = 2 * batch * width * width * (2 * n_queries + 2 * n_keys)
    return projections + 4 * batch * n_queries * n_keys * width


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Count the products of each head of queries with keys, and with values."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return int(2 * pairs * (query.shape[-1] + value.shape[-1]))


def _attention_backward_flops(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Count the scores again, and two products for each product of the forward."""
    pairs = math.prod(query.shape[:-1]) * key.shape[-2]
    return int(2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _trilinear_flops(*args: Any, **_: Any) -> int:
    """Count the two products of `nn.Bilinear`, the larger of them first."""
    tensors, expanded, summed = args[:3], args[3:6], args[6]
    sizes: list[int] = []
    for tensor, dims in zip(tensors, expanded, strict=True):
        shape = list(tensor.shape)
        for dim in dims:
            shape.insert(dim, 1)
        sizes = [max(pair) for pair in zip(sizes, shape, strict=True)] if sizes else shape
    # The first product sums over the dimensions that the third tensor lacks.
    first: int = math.prod(sizes[dim] for dim in summed if dim in expanded[2])
    every: int = math.prod(sizes)
    return 2 * every + 2 * every // max(first, 1)


def may_lack_formula(operation: Any) -> bool:
    """Tell whether an operation without a formula may do more than one step for each element.

    These are operations of other libraries, and torch's own that multiply, convolve or decompose
    matrices. Like torch's counter, hookline counts nothing for functions of single elements.
    """
    space, _, name = str(operation._qualified_op_name).partition("::")
    if space in ("prim", "prims", "profiler"):
        return False
    return space != "aten" or may_do_matrix_work(name)


def may_do_matrix_work(name: str) -> bool:
    """Tell whether torch's operation of this name multiplies, convolves or decomposes matrices."""
    return bool(_MATRIX_WORK.search(name) and not _ELEMENTWISE.search(name))


_MATRIX = 2  # dimensions
_MATRIX_WORK = re.compile(
    r"(^|_)(\w*mm|\w*dot|[a-z]*mv|matmul|gemm|\w*conv\w*|attention|transformer|\w*rnn|lstm|gru"
    r"|cdist|trilinear|linear|fft|linalg|solve|spsolve|cholesky|lu|qr|svd|eigh?"
    r"|det|inverse|geqrf|orm?gqr|ormqr)(_|$)"
)
_ELEMENTWISE = re.compile(
    r"upsample|thnn|convert|unpack|pack$|prepack|flatten|check_errors|norm|cross|diagonal|vander"
    r"|cudnn_is|reorder|nested|get_|scaled_dot_product_attention_math|slice_inverse|lu_relu"
)
