"""Every private name by which torch tells the mode of the present code.

The modes are tracing and the transforms of torch.func.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hookline.util.walk_stack import walk_stack

# Bound once, because they are called in every pass.
_is_exporting = torch.compiler.is_exporting
_is_jit_tracing = torch._C._is_tracing
_dispatch_mode = torch._C._get_dispatch_mode
_PROXY = torch._C._TorchDispatchModeKey.PROXY
_innermost_transform = torch._C._functorch.peek_interpreter_stack


# Returns how a library computes operations in float32: "ieee", "tf32", "bf16" or "none". This is
# torch's own function behind `torch.backends.cuda.matmul.fp32_precision`, which takes 1 µs.
float32_precision: Callable[[str, str], str] = torch._C._get_fp32_precision_getter


def is_plain_eager() -> bool:
    """Tell whether neither a tracer nor a transform of torch.func runs.

    This function combines `running_tracer` and `running_transform`. Each pass begins with it, when
    its code is no longer in the processor's caches, so one call less matters.
    """
    symbolic = sys.modules.get("torch.fx._symbolic_trace")
    return not (
        _innermost_transform() is not None
        or _is_jit_tracing()
        or _dispatch_mode(_PROXY) is not None
        or _is_exporting()
        or (symbolic is not None and _may_be_fx_tracing(symbolic))
    )


def running_tracer() -> str | None:
    """Return the public name of the running tracer; None without one.

    `torch.compile` does not count, since it knows of lines.
    """
    if _is_exporting():
        return "torch.export"
    if _is_jit_tracing():
        return "torch.jit.trace"
    if _dispatch_mode(_PROXY) is not None:
        return "make_fx"
    symbolic = sys.modules.get("torch.fx._symbolic_trace")
    if symbolic is not None and _may_be_fx_tracing(symbolic) and _fx_traces_in_thread(symbolic):
        return "torch.fx.symbolic_trace"
    return None


def _may_be_fx_tracing(symbolic: Any) -> bool:
    """Tell whether torch.fx's flag says that it traces: of torch up to 2.13, or from 2.14.

    True where torch has renamed both.
    """
    flag = getattr(symbolic, "_is_fx_tracing_flag", None)
    if flag is not None:
        return bool(flag)
    is_tracing = getattr(symbolic, "_get_is_fx_tracing", None)
    return is_tracing is None or bool(is_tracing())


def _fx_traces_in_thread(symbolic: object) -> bool:
    """Tell whether torch.fx traces in this thread.

    Up to torch 2.13 all threads share its flag, which is set while another thread compiles.
    """
    file = getattr(symbolic, "__file__", None)
    codes = (frame.f_code for frame in walk_stack(sys._getframe(1)))
    return any(code.co_name == "trace" and code.co_filename == file for code in codes)


# The wrappers of torch.func's tensors: grad, jvp, vmap, functionalize.
_functorch = torch._C._functorch


def running_transform() -> str | None:
    """Return the innermost running transform of torch.func, such as "Vmap"; None without one."""
    innermost = _innermost_transform()
    return None if innermost is None else innermost.key().name


def is_in_dual_level() -> bool:
    """Tell whether forward-mode AD is on: dispatch modes crash on its numbers."""
    return forward_ad._current_level >= 0


# Whether a tensor wraps another tensor inside a transform of torch.func, past or present. This is
# torch's own function, because it is called for each tensor that is kept or looked up.
is_wrapped = _functorch.is_functorch_wrapped_tensor


def is_vmapped(tensor: Tensor) -> bool:
    """Tell whether a tensor is vmap's view of one example."""
    return _functorch.is_batchedtensor(tensor)


def is_of_running_transform(tensor: Tensor) -> bool:
    """Tell whether the transform that wrapped a tensor is still running."""
    level = _functorch.maybe_get_level(tensor)
    return any(running.level() == level for running in _functorch.get_interpreter_stack() or ())


# Tells whether a tensor is one example of torch's older vmap, in which a batched backward runs:
# `autograd.grad(is_grads_batched=True)`, `functional.jacobian(vectorize=True)`.
is_legacy_batched: Callable[[Tensor], bool] = getattr(
    _functorch, "is_legacy_batchedtensor", lambda tensor: False
)
_ABSENT = 2**31 - 1  # the size of a batch that a tensor is not part of
_MOST_LEVELS = 64


def unwrap_legacy_vmap(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return the whole batch that the older vmap has wrapped, and the levels of its dimensions.

    The batch dimensions are in front, the outermost vmap's first.
    """
    levels = [
        level for level in range(1, _MOST_LEVELS)
        if torch._remove_batch_dim(tensor, level, _ABSENT, 0).shape[0] != _ABSENT
    ]  # fmt: skip
    for level in reversed(levels):
        tensor = torch._remove_batch_dim(tensor, level, _ABSENT, 0)
    return tensor, levels


def rewrap_legacy_vmap(batch: Tensor, levels: list[int]) -> Tensor:
    """Wrap a batch as `unwrap_legacy_vmap` found it."""
    for level in levels:
        batch = torch._add_batch_dim(batch, 0, level)
    return batch


def unwrap_transform(tensor: Tensor) -> tuple[Tensor, int | None]:
    """Return the tensor that a transform has wrapped, and under vmap the batch dimension."""
    dimension = _functorch.maybe_get_bdim(tensor) if is_vmapped(tensor) else None
    return _functorch.get_unwrapped(tensor), dimension
