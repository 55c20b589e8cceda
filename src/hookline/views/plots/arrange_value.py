"""Arrange a value for drawing: the order of its dimensions, channels and values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import final

import torch
from torch import Tensor

from hookline.display.text import name_without_torch
from hookline.engine.pytree import describe
from hookline.errors import InputError
from hookline.recordings.figure_values import LabelledTensor, check_count, check_sample_index

_LETTERS = "NCTLDHW"
_DEFAULT_LAYOUTS = {1: "C", 2: "NC", 3: "NTC", 4: "NCHW", 5: "NCDHW"}


@final
@dataclass(frozen=True)
class Arranged:
    """One sample of a value, its channels first."""

    data: Tensor  # the sample, shape `(channels, *space)`, of float32 or float64, on the CPU
    space: str  # the letters of the other dimensions
    text: str  # the layout and the sample: `read as NCHW, sample 0 of 8`


def arrange(value: LabelledTensor, layout: str | None, sample: int, default: str = "") -> Arranged:
    """Take one sample of a value and move its channels first.

    Args:
        layout: one letter a dimension: N sample, C channel, T or L position in a sequence, D, H, W.
        sample: the index of the sample.
        default: the figure's own default layout for a value of this many dimensions.

    Raises:
        InputError: the layout does not fit, the sample does not exist, or the tensor is empty,
            sparse, nested or a single number.
    """
    tensor, space, text = _channels_first(value, layout, sample, default)
    return Arranged(_to_real_float(tensor), space, text)


def arrange_difference(
    a: LabelledTensor, b: LabelledTensor, layout: str | None, sample: int
) -> Tensor:
    """Return one sample of the difference of two values, arranged as `arrange` does each."""
    return subtract(*(_channels_first(value, layout, sample)[0] for value in (a, b)))


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """Return the difference in float64; of complex numbers, its magnitude.

    >>> subtract(torch.tensor([1.0 + 0j]), torch.tensor([1j]))
    tensor([1.4142], dtype=torch.float64)
    """
    if a.is_complex() or b.is_complex():
        return (a.cpu().to(torch.complex128) - b.cpu().to(torch.complex128)).abs()
    return _to_real_float(a).double() - _to_real_float(b).double()


def _channels_first(
    value: LabelledTensor, layout: str | None, sample: int, default: str = ""
) -> tuple[Tensor, str, str]:
    """Return one sample, its channels first; the letters of its other dimensions; the layout."""
    check_sample_index(sample)
    tensor = drawable_tensor(value)
    letters = layout or _guess_layout(value, default)
    _check_layout(value, letters)
    text = "magnitudes " * value.tensor.is_complex() + f"read as {letters}"
    if "N" in letters:
        tensor, which = select_sample(tensor, letters.index("N"), sample, value.label)
        text += which
    space = letters.replace("N", "")
    tensor = tensor.movedim(space.index("C"), 0)
    space = space.replace("C", "")
    while len(space) > 2:  # a volume is drawn as its middle slice
        middle = tensor.shape[1] // 2
        text += f", slice {space[0]} = {middle} of {tensor.shape[1]}"
        tensor, space = tensor.select(1, middle), space[1:]
    if letters == "NCHW" and layout is None and value.tensor.dim() == 4:
        _, first, second, last = value.tensor.shape
        if first == second != last:
            text += "; if its channels are last, layout='NHWC'"
    return tensor, space, text


def select_sample(tensor: Tensor, dim: int, sample: int, label: str) -> tuple[Tensor, str]:
    """Return one sample along a dimension, and as text which one it is.

    Raises:
        InputError: the value has no such sample.
    """
    n_samples = tensor.shape[dim]
    if not -n_samples <= sample < n_samples:
        raise InputError(
            f"sample must be from 0 to {n_samples - 1} for {label}, got {sample}.\nGive sample=0."
        )
    which = f", sample {sample % n_samples} of {n_samples}" if n_samples > 1 else ""
    return tensor.select(dim, sample), which


def drawable_tensor(value: LabelledTensor) -> Tensor:
    """Return the value's tensor, detached; refuse one that has no maps, curves or bars to draw.

    Raises:
        InputError: the tensor is empty, sparse, nested or a single number.
    """
    tensor = value.tensor.detach()
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else name_without_torch(tensor.layout)
        how = "to_padded_tensor(0.0)" if tensor.is_nested else "to_dense()"
        raise InputError(
            f"{value.label} is a {kind} tensor, which has no maps to draw."
            f"\nRecord it plain: hl.record(model, ..., keep=lambda t: t.{how})."
        )
    if not tensor.numel():
        raise InputError(f"{value.label} is empty: its shape is {describe.shape(tensor)}.")
    if not tensor.dim():
        raise InputError(
            f"{value.label} is a single number, {tensor.item()}.\nUse hl.plots.statistics to draw"
            " numbers over passes."
        )
    return tensor.dequantize() if tensor.is_quantized else tensor


def _guess_layout(value: LabelledTensor, default: str) -> str:
    n_dims = value.tensor.dim()
    if len(default) == n_dims:
        return default
    if n_dims == 3 and value.module_type.endswith("1d"):
        return "NCL"
    return _DEFAULT_LAYOUTS.get(n_dims, "?" * n_dims)


def _check_layout(value: LabelledTensor, letters: str) -> None:
    is_sound = (
        len(letters) == value.tensor.dim()
        and len(set(letters)) == len(letters)
        and set(letters) <= set(_LETTERS)
        and "C" in letters
    )
    if not is_sound:
        n_dims = value.tensor.dim()
        problem = "needs a layout" if "?" in letters else f"cannot be read as {letters!r}"
        raise InputError(
            f"{value.label} {problem}: its shape is {describe.shape(value.tensor)}."
            f"\nGive layout= with one letter for each of its {n_dims} dimensions, C among them:"
            " N sample, C channel, T or L position in a sequence, D, H, W."
        )


def _to_real_float(tensor: Tensor) -> Tensor:
    """Convert a tensor to float32 or float64 on the CPU; take the magnitude of complex numbers."""
    tensor = tensor.cpu()
    if tensor.is_complex():
        return tensor.abs()
    if tensor.dtype in (torch.float64, torch.int64, torch.int32):
        return tensor.resolve_neg().double()
    return tensor.resolve_neg().float()


def pick_channels(data: Tensor, order: str | Iterable[int], n: int | None, label: str) -> list[int]:
    """Return the indices of the channels to draw, in order.

    Args:
        data: the value, shape `(channels, *space)`.
        order: "index"; or "mean", "std" or "max" for the largest first; or the indices themselves.
        n: the most channels to draw; None means all. It does not limit given indices.
        label: the site, for messages.

    Raises:
        InputError: the order is unknown, or a channel does not exist.
    """
    n_channels = data.shape[0]
    if not isinstance(order, str):
        chosen = [index(channel) for channel in order]
        for channel in chosen:
            if not -n_channels <= channel < n_channels:
                raise InputError(
                    f"a channel of {label} must be a number from 0 to {n_channels - 1}, got"
                    f" {channel}."
                    "\nGive order='index' for the first ones."
                )
        if not chosen:
            raise InputError(
                "order must name at least one channel, got an empty list.\nGive order='index'."
            )
        return [channel % n_channels for channel in chosen]
    if n is not None:
        check_count("n", n)
    if order == "index":
        return list(range(n_channels))[:n]
    flat = data.reshape(n_channels, -1).double()
    finite = flat.isfinite()
    count = finite.sum(1)
    numbers = flat.where(finite, 0.0)
    mean = numbers.sum(1) / count
    if order == "mean":
        key = mean
    elif order == "std":
        key = ((numbers - mean[:, None]).where(finite, 0.0).square().sum(1) / count).sqrt()
    elif order == "max":
        key = flat.where(finite, -math.inf).amax(1)
    else:
        raise InputError(
            "order must be 'index', 'mean', 'std' or 'max', or a list of channels, got"
            f" {order!r}.\nWrite order='std', for instance."
        )
    ranked: list[int] = key.nan_to_num(-math.inf).argsort(descending=True, stable=True).tolist()
    return ranked[:n]
