"""Checks that the ready-made edits share: of the value, and of the number or tensor given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.display.text import name_without_torch
from hookline.engine import has_numbers
from hookline.engine.pytree import describe, tree
from hookline.errors import AttachError, StructureError

Edit = Callable[[Tensor], Tensor]


def explain_errors(name: str, change: Edit) -> Edit:
    """Wrap an edit so that its error names the kind of tensor that torch cannot change so."""

    def edit(value: Tensor) -> Tensor:
        tensor = require_tensor(value, name)
        if not _lacks_torch_functions(tensor):
            return change(tensor)
        try:
            return change(tensor)
        except StructureError:
            raise
        except (RuntimeError, TypeError) as error:
            kind = str(tensor.dtype if tensor.layout is torch.strided else tensor.layout)
            first = str(error).strip().splitlines()[0][:80]
            raise StructureError(
                f"hl.edits.{name} cannot change {describe.in_full(tensor)}, which is"
                f" {'nested' if tensor.is_nested else kind.removeprefix('torch.')}: {first}."
                "\nGive hl.edit a function of your own, for an 8-bit float such as"
                " lambda t: (t.float() * 2).to(t.dtype)."
            ) from error

    return edit


def _lacks_torch_functions(tensor: Tensor) -> bool:
    """Tell whether torch lacks some functions for this kind of tensor.

    In compiled code a gradient cannot be asked, so the compiler's own error is raised there.
    """
    if is_dynamo_compiling():
        return False
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return not is_plain or tensor.is_complex() or tensor.dtype.itemsize == 1


def require_tensor(value: Any, name: str) -> Tensor:
    """Return a value that is a tensor; refuse any other."""
    if not isinstance(value, Tensor):
        leaves = [describe.leaf_text(leaf) for leaf, _ in tree.tensors(value)]
        advice = (
            "Select a tensor by a leaf behind the port (output, input):"
            f" {', '.join(f'PATH:PORT{leaf}' for leaf in leaves[:4])}."
            if leaves
            else "Select a module that returns a tensor, or give hl.edit a function of your own."
        )
        raise StructureError(
            f"hl.edits.{name} must be given a tensor, got {describe.in_words(value)}.\n{advice}"
        )
    return value


@final
class Operand:
    """A number or tensor that a value is combined with.

    Compiled code has guards on the values of numbers, so each new number would recompile it. It has
    no guards on the values of tensors, so compiled code uses a tensor in place of the number.
    """

    __slots__ = ("_is_tensor", "_kind", "_name", "_number", "_tensor")

    def __init__(self, operand: float | Tensor, name: str) -> None:
        self._name = name
        self._is_tensor = isinstance(operand, Tensor)
        self._number = operand
        if isinstance(operand, Tensor):
            self._tensor, self._kind = operand, operand.dtype
            return
        # Independent of torch's default dtype. The widest dtype keeps the number exact.
        dtype = {float: torch.float64, complex: torch.complex128}.get(type(operand))
        try:
            self._tensor = torch.as_tensor(operand, dtype=dtype, device="cpu")
            if self._tensor.dim():
                raise TypeError  # a list or an array, which torch does not combine with a tensor
        except (TypeError, ValueError, RuntimeError):
            raise AttachError(
                f"hl.edits.{name} must be given a number or a tensor, got"
                f" {describe.in_words(operand)}.\nGive hl.edit a function of your own for anything"
                f" else: hl.edit(model, selector, lambda t: ...)."
            ) from None
        self._kind = self._tensor.dtype

    def cast_like(self, value: Tensor) -> float | Tensor:
        """Return the number or tensor on the value's device, and in the value's dtype.

        A tensor without dimensions gives the numbers that the same plain number gives, once the
        result is cast to the value's dtype.

        Raises:
            StructureError: the value is quantized, or `check_dtype_and_broadcast` refuses it.
        """
        if not is_dynamo_compiling() and value.is_quantized:
            raise StructureError(
                f"hl.edits must be given values that are not quantised, got"
                f" {describe.in_full(value)}.\nEdit where the value is dequantized, or give hl.edit"
                " a function that returns"
                " torch.quantize_per_tensor(new, t.q_scale(), t.q_zero_point(), t.dtype)."
            )
        self.check_dtype_and_broadcast(value)
        if self._is_tensor:
            if value.dim() and not self._tensor.dim():
                # Of one on the processor, torch takes the number, and does not round it first.
                return self._tensor if self._tensor.is_cpu else self._unrounded_tensor(value)
            return self._tensor.to(value.device, value.dtype)
        return self._tensor if is_dynamo_compiling() else self._number

    def _unrounded_tensor(self, value: Tensor) -> Tensor:
        """Return the tensor on the value's device. With dimensions, torch does not round it."""
        tensor = self._tensor.to(value.device)
        is_plain = value.layout is torch.strided and not value.is_nested
        if not is_plain or value.dtype not in (torch.float16, torch.bfloat16):
            return tensor
        return tensor.float().reshape([1] * value.dim())

    def check_shape(self, value: Tensor) -> None:
        """Refuse a value of another shape than the tensor's, unless the tensor has no dimensions.

        Raises:
            StructureError: the shapes differ.
        """
        tensor = self._tensor
        if not tensor.dim() or tensor.is_nested or value.is_nested or tensor.shape == value.shape:
            return
        advice = "Give a number, or a tensor of the value's shape."
        if _broadcasts(tensor, value):
            advice = "To put it at each place, give hl.edit: lambda t: new.expand_as(t).clone()."
        raise StructureError(
            f"the tensor given to hl.edits.{self._name} must have the value's shape"
            f" {describe.shape(value)}, got {describe.shape(tensor)}.\n{advice}"
        )

    def check_dtype_and_broadcast(self, value: Tensor) -> None:
        """Refuse a value with which the number or tensor would give another dtype or shape.

        Raises:
            StructureError: the value's dtype cannot hold the number or tensor, or the tensor's
                shape does not broadcast to the value's.
        """
        odd = ""
        if _dtype_rank(self._kind) > _dtype_rank(value.dtype):
            odd = name_without_torch(self._kind)
        elif _dtype_rank(value.dtype) == 1 and value.dtype is not self._kind:
            odd = self._integer_out_of_range(value.dtype)
        if odd:
            raise StructureError(
                f"the value here is {describe.in_full(value)}, which cannot hold {odd}."
                f"\nGive a number or tensor that {name_without_torch(value.dtype)} can hold."
            )
        if not self._is_tensor or is_dynamo_compiling():
            return
        if not _broadcasts(self._tensor, value):
            raise StructureError(
                f"the tensor given to hl.edits.{self._name} must broadcast to the value's shape"
                f" {describe.shape(value)}, got {describe.shape(self._tensor)}."
                "\nGive a number, or a tensor of the value's shape or with sizes of 1."
            )

    def _integer_out_of_range(self, dtype: torch.dtype) -> str:
        """Return an integer that an integer dtype does not hold; empty if it holds all of them."""
        if dtype.is_signed and dtype.itemsize == 8:
            return ""
        if not self._is_tensor:
            ends = [int(self._number)]
        elif is_dynamo_compiling() or not self._tensor.numel() or not has_numbers(self._tensor):
            return ""
        else:
            ends = [int(end) for end in self._tensor.detach().long().aminmax()]
        limits = torch.iinfo(dtype)
        return next((str(end) for end in ends if not limits.min <= end <= limits.max), "")


def _broadcasts(operand: Tensor, value: Tensor) -> bool:
    if operand.is_nested or value.is_nested:
        return True  # torch raises its own error
    missing = value.dim() - operand.dim()
    return missing >= 0 and all(
        size in (1, value_size)
        for size, value_size in zip(operand.shape, value.shape[missing:], strict=True)
    )


def _dtype_rank(dtype: torch.dtype) -> int:
    """Rank a dtype's kind: a dtype can be cast to one of the same rank or above."""
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return int(dtype is not torch.bool)
