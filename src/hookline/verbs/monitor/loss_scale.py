"""The scale of a loss under automatic mixed precision, by which gradients are divided."""

from __future__ import annotations

import sys
import weakref
from typing import Any, final

import torch
from torch import Tensor

from hookline.engine.pytree import describe
from hookline.errors import AttachError, warn

_MOST_FRAMES = 16  # between an optimizer's hook and the scaler's step


@final
class LossScale:
    """Divide gradients by the scale of a `GradScaler`.

    Without a given scaler, the scaler is found when it first steps an optimizer.

    Args:
        scaler: the scaler, or None.

    Raises:
        AttachError: it is not a scaler.
    """

    def __init__(self, scaler: Any = None) -> None:
        if scaler is not None and not hasattr(scaler, "get_scale"):
            raise AttachError(
                f"scaler= must be a GradScaler, got {describe.in_words(scaler)}."
                "\nLeave it out: the scaler is found at its first step."
            )
        self._scaler = None if scaler is None else weakref.ref(scaler)
        self._left_scaled = False  # whether a gradient was measured with the scale

    def unscale(self, grad: Tensor) -> Tensor:
        """Return a gradient without the scale of the loss."""
        scaler = None if self._scaler is None else self._scaler()
        if scaler is None:
            self._left_scaled = True
            return grad
        with torch.no_grad():
            scale = scaler.scale(torch.ones((), device=grad.device))
            return _divided(grad.detach(), scale)

    def find_running_scaler(self, step: int) -> None:
        """Look for a scaler that is stepping an optimizer: called in the optimizer's hook."""
        if self._scaler is not None:
            return
        # At each step: the first ones may go past the scaler, as in a warm-up.
        frame, left = sys._getframe(1), _MOST_FRAMES
        while frame.f_back is not None and left:
            frame, left = frame.f_back, left - 1
            if frame.f_code.co_qualname == "GradScaler.step":
                scaler = frame.f_locals["self"]
                if scaler.is_enabled():
                    self._scaler = weakref.ref(scaler)
                    self._warn_of_scaled(scaler, step)
                return

    def _warn_of_scaled(self, scaler: Any, step: int) -> None:
        """Warn of gradients that were measured before the scaler was known, if there are any."""
        if self._left_scaled:  # gradients of parameters are unscaled when the optimizer steps
            warn(
                f"hl.monitor: gradients at modules in step {step} are multiplied by"
                f" GradScaler's {scaler.get_scale():g}; those of later steps are unscaled."
                "\nGive hl.monitor(..., scaler=scaler) to unscale them from the start."
            )


def unscale_fused(optimizer: Any, grad: Tensor) -> Tensor:
    """Return a parameter's gradient without the scale that a fused optimizer divides by itself."""
    scale = getattr(optimizer, "grad_scale", None)
    return _divided(grad, scale) if isinstance(scale, Tensor) else grad


def is_skipped_by_scaler(optimizer: Any) -> bool:
    """Tell whether a fused optimizer will skip its step, as a `GradScaler` has told it to."""
    # On a GPU this waits for the gradients, as a GradScaler does with other optimizers.
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, Tensor) and bool(found_inf)


def _divided(grad: Tensor, scale: Tensor) -> Tensor:
    # In float32: in half precision, small gradients would become 0.
    wide = grad if grad.dtype is torch.float64 else grad.float()
    return wide / scale.to(wide.device)
