"""What of a value is kept, and where: the options that `record` and `features` share.

Imports engine, measuring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
from torch import Tensor

from hookline.engine import innermost, local, tree
from hookline.engine.errors import AttachError
from hookline.verbs.measuring import measured


class Keep(TypedDict, total=False):
    """What of a value is kept, and where.

    Args:
        keep: what to keep of each value, as in `lambda t: t[:, -1]`; called with the value itself,
            for gradients with each tensor, as they arrive one by one. Sums, means, norms and
            powers of 16-bit floats are computed, and kept, in float32; autocast is off.
        device: where to keep tensors.
        dtype: the dtype of floating tensors as kept; others stay as they are.
        detach: False keeps the autograd graph, and with it the memory of the whole pass.
        copy: copy every tensor, so that in-place operations later in the model cannot change it.
    """

    keep: Callable[[Any], Any] | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    detach: bool
    copy: bool


def check_options(verb: str, options: Keep) -> None:
    """Refuse an option that a verb does not have, and a device or dtype that is none.

    Raises:
        TypeError: there is no such option.
        AttachError: one of them is none.
    """
    for name in options.keys() - Keep.__annotations__.keys():
        raise TypeError(
            f"hl.{verb}() got an unexpected keyword argument {name!r}."
            f"\nGive some of {', '.join(f'{known}=' for known in Keep.__annotations__)}."
        )
    device, dtype = options.get("device"), options.get("dtype")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise AttachError(f"dtype={dtype!r} is no dtype; give one such as torch.float16.")
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError):
        raise AttachError(f"device={device!r} is no device; give one such as 'cpu'.") from None


def is_plain(options: Keep) -> bool:
    """Whether values are kept as they are, detached: the fast way."""
    return options.get("detach", True) and not any(
        options.get(key) for key in ("keep", "device", "dtype", "copy")
    )


def keeper(options: Keep) -> Callable[[Any], Any]:
    """The function from a value to what is kept of it."""
    if is_plain(options):
        return lambda value: tree.map_tensors(_detached, value)
    keep, device, dtype = options.get("keep"), options.get("device"), options.get("dtype")
    detach, copy = options.get("detach", True), options.get("copy", False)

    def store(tensor: Tensor) -> Tensor:
        moved = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        # A slice would keep the memory of the whole it was cut from.
        is_part = keep is not None and _is_part(moved)
        if moved is tensor and (copy or is_part or moved.is_inference()):
            return moved.clone()
        return moved

    def kept(value: Any) -> Any:
        if detach:
            value = tree.map_tensors(Tensor.detach, value)
        if keep is not None:
            try:
                # Whatever keep= computes is of this rank's part, and talks to no other rank.
                value = measured(keep, local(value))
            except Exception as error:
                error.add_note(f"hookline: keep= was called with {tree.describe(value)}")
                raise
        return tree.map_tensors(store, value)

    return kept


def _detached(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.clone() if tensor.is_inference() else tensor


def _is_part(tensor: Tensor) -> bool:
    held = innermost(tensor)
    return held.layout is torch.strided and held.untyped_storage().nbytes() > held.nbytes
