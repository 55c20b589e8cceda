"""Ready-made functions for `hl.edit`. Each takes a tensor and returns a new one.

A factor or value may be a tensor that requires gradients. It is then trained through the model.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any, final

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.engine import same_draws
from hookline.engine.pytree import describe, tree
from hookline.errors import AttachError, StructureError
from hookline.util.locks import fork_safe_lock

Edit = Callable[[Tensor], Tensor]

__all__ = ["add", "clamp", "noise", "replace", "scale"]


def __dir__() -> list[str]:
    """List the edits alone, for completion in editors."""
    return [*__all__]


def scale(factor: float | Tensor) -> Edit:
    """Multiply the value by a factor; 0 sets finite values to zero.

        >>> hl.edits.scale(2.0)(torch.ones(2)).tolist()
        [2.0, 2.0]

    Args:
        factor: a number, or a tensor that broadcasts to the value's shape. As 0 times inf or NaN is
            NaN, use `replace(0)` to set every value to zero.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device.

    Raises:
        AttachError: `factor` is neither a number nor a tensor.
        StructureError: (when the function is called) the value is no tensor, its dtype cannot hold
            `factor`, or `factor` does not broadcast to its shape.
    """
    operand = _Operand(factor, "scale")
    return _edit("scale", lambda value: operand.like(value) * value)


def add(offset: float | Tensor) -> Edit:
    """Add an offset, such as a steering vector or a bias.

        >>> hl.edits.add(torch.tensor([0.0, 1.0]))(torch.zeros(2)).tolist()
        [0.0, 1.0]

    A vector is added at each place of the leading dimensions: a steering vector of shape
    `(n_features,)` to every token of every row of a value `(batch, n_tokens, n_features)`.

    Args:
        offset: a number, or a tensor that broadcasts to the value's shape.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device.

    Raises:
        AttachError: `offset` is neither a number nor a tensor.
        StructureError: (when the function is called) the value is no tensor, its dtype cannot hold
            `offset`, or `offset` does not broadcast to its shape.
    """
    operand = _Operand(offset, "add")
    return _edit("add", lambda value: operand.like(value) + value)


def replace(new: float | Tensor) -> Edit:
    """Replace the value, by an activation of another run or by a constant.

        >>> hl.edits.replace(3.0)(torch.zeros(2)).tolist()
        [3.0, 3.0]

    A tensor is not broadcast, so that an activation of one token does not overwrite all tokens.

    Args:
        new: a number, a tensor of one number without dimensions, or a tensor of the value's shape.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device.

    Raises:
        AttachError: `new` is neither a number nor a tensor.
        StructureError: (when the function is called) the value is no tensor, its dtype cannot hold
            `new`, or `new` has another shape.
    """
    operand = _Operand(new, "replace")

    def change(tensor: Tensor) -> Tensor:
        operand.check_shape(tensor)
        other = torch.as_tensor(operand.like(tensor), dtype=tensor.dtype, device=tensor.device)
        # A copy, because a later in-place layer cannot write to an expanded tensor.
        return other.expand_as(tensor).clone()

    return _edit("replace", change)


def noise(std: float, *, seed: int | None = None) -> Edit:
    """Add Gaussian noise of mean 0 from a generator of its own; torch's generator stays unchanged.

        >>> change = hl.edits.noise(0.1, seed=0)
        >>> bool((change(torch.zeros(4)) != 0).all())
        True

    Args:
        std: the standard deviation, in units of the value: a number, or a tensor of one element.
        seed: the seed of the generator. Each call of the function draws new noise, and each
            function of one seed draws the same sequence. None seeds each function differently.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device.

    Raises:
        AttachError: `std` is neither a real number nor a tensor of one element, or `seed` is not an
            integer.
        StructureError: (when the function is called) the value is no tensor, or its dtype cannot
            hold `std`.
    """
    generators: dict[torch.device, torch.Generator] = {}
    lock = fork_safe_lock()
    operand = _Operand(std, "noise")
    try:
        std = float(std)
    except (TypeError, ValueError, RuntimeError):  # complex, or several elements
        raise AttachError(
            "hl.edits.noise must be given a real number or a tensor of one element, got"
            f" {describe.in_full(std) if isinstance(std, Tensor) else repr(std)}."
            "\nGive one number: hl.edits.noise(0.1)."
        ) from None
    if seed is not None and not isinstance(seed, Integral):
        raise AttachError(
            f"seed must be an integer or None, got {seed!r}.\nWrite hl.edits.noise(0.1, seed=0)."
        )

    def draw(tensor: Tensor) -> Tensor:
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device)
            generator.seed() if seed is None else generator.manual_seed(seed)
        return torch.randn(
            tensor.shape, generator=same_draws(generator), dtype=tensor.dtype, device=tensor.device
        )

    def change(tensor: Tensor) -> Tensor:
        operand.like(tensor)
        if tensor.is_meta:  # a meta tensor has a shape and no numbers
            return tensor + std
        if is_dynamo_compiling():  # a graph holds no lock
            return tensor + std * draw(tensor)
        with lock:  # no other thread draws between a checkpoint's look at the generator and a draw
            drawn = draw(tensor)
        return tensor + std * drawn

    return _edit("noise", change)


def clamp(min: float | Tensor | None = None, max: float | Tensor | None = None) -> Edit:
    """Limit the value to the range between two bounds, as `torch.clamp` does.

        >>> hl.edits.clamp(min=0)(torch.tensor([-1.0, 1.0])).tolist()
        [0.0, 1.0]

    Args:
        min: the lower bound: a number, or a tensor that broadcasts to the value's shape. None for
            no lower bound.
        max: the upper bound, in the same way.

    Returns:
        A function for `hl.edit`: it takes a tensor, and returns a new one of the same shape, dtype
        and device.

    Raises:
        AttachError: both bounds are None, or one is neither a number nor a tensor.
        StructureError: (when the function is called) the value is no tensor, its dtype cannot hold
            a bound, or a bound does not broadcast to its shape.
    """
    if min is None and max is None:
        raise AttachError(
            "hl.edits.clamp must be given a bound, got none.\nGive a bound: hl.edits.clamp(min=0)."
        )
    low, high = (None if bound is None else _Operand(bound, "clamp") for bound in (min, max))

    def by_numbers(value: Tensor) -> Tensor:
        # They bound a quantized value by what it stands for, whatever its dtype.
        if is_dynamo_compiling() or not value.is_quantized:
            for bound in (low, high):
                if bound is not None:
                    bound.check(value)
        return torch.clamp(value, min, max)  # type: ignore[arg-type]  # no tensor is among them

    def by_tensors(value: Tensor) -> Tensor:
        def like(bound: _Operand | None) -> Tensor | None:
            if bound is None:
                return None
            return torch.as_tensor(bound.like(value), dtype=value.dtype, device=value.device)

        return torch.clamp(value, like(low), like(high))

    # torch.clamp takes two numbers or two tensors.
    takes_tensors = isinstance(min, Tensor) or isinstance(max, Tensor)
    return _edit("clamp", by_tensors if takes_tensors else by_numbers)


def _edit(name: str, change: Edit) -> Edit:
    """Wrap an edit so that its error names the kind of tensor that torch cannot change so."""

    def edit(value: Tensor) -> Tensor:
        tensor = _tensor(value, name)
        if not _is_special(tensor):
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


def _is_special(tensor: Tensor) -> bool:
    """Tell whether torch lacks some functions for this kind of tensor.

    In compiled code a gradient cannot be asked, so the compiler's own error is raised there.
    """
    if is_dynamo_compiling():
        return False
    is_plain = tensor.layout is torch.strided and not tensor.is_nested
    return not is_plain or tensor.is_complex() or tensor.dtype.itemsize == 1


def _tensor(value: Any, name: str) -> Tensor:
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
class _Operand:
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

    def like(self, value: Tensor) -> float | Tensor:
        """Return the number or tensor on the value's device and in the value's dtype.

        Raises:
            StructureError: the value is quantized, or `check` refuses it.
        """
        if not is_dynamo_compiling() and value.is_quantized:
            raise StructureError(
                f"hl.edits must be given values that are not quantised, got"
                f" {describe.in_full(value)}.\nEdit where the value is dequantized, or give hl.edit"
                " a function that returns"
                " torch.quantize_per_tensor(new, t.q_scale(), t.q_zero_point(), t.dtype)."
            )
        self.check(value)
        if self._is_tensor:
            return self._tensor.to(value.device, value.dtype)
        return self._tensor if is_dynamo_compiling() else self._number

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

    def check(self, value: Tensor) -> None:
        """Refuse a value with which the number or tensor would give another dtype or shape.

        Raises:
            StructureError: the value's dtype cannot hold the number or tensor, or the tensor's
                shape does not broadcast to the value's.
        """
        if _breadth(self._kind) > _breadth(value.dtype):
            raise StructureError(
                f"the value here is {describe.in_full(value)}, which cannot hold"
                f" {_short(self._kind)}."
                f"\nGive a number or tensor that {_short(value.dtype)} can hold."
            )
        if not self._is_tensor or is_dynamo_compiling():
            return
        if not _broadcasts(self._tensor, value):
            raise StructureError(
                f"the tensor given to hl.edits.{self._name} must broadcast to the value's shape"
                f" {describe.shape(value)}, got {describe.shape(self._tensor)}."
                "\nGive a number, or a tensor of the value's shape or with sizes of 1."
            )


def _broadcasts(operand: Tensor, value: Tensor) -> bool:
    if operand.is_nested or value.is_nested:
        return True  # torch raises its own error
    missing = value.dim() - operand.dim()
    return missing >= 0 and all(
        size in (1, value_size)
        for size, value_size in zip(operand.shape, value.shape[missing:], strict=True)
    )


def _breadth(dtype: torch.dtype) -> int:
    """Rank a dtype's kind: a dtype can be cast to one of the same rank or above."""
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return int(dtype is not torch.bool)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
