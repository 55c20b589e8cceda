"""Ready-made functions for `hl.edit`. Each takes a tensor and returns a new one.

A factor or value may be a tensor that requires gradients. It is then trained through the model.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from hookline.display.text import first_line
from hookline.engine import is_in_transform, repeatable_generator
from hookline.engine.pytree import describe
from hookline.errors import AttachError
from hookline.util.fork_safe_lock import fork_safe_lock
from hookline.verbs.edit.directions import project_out, steer
from hookline.verbs.edit.operands import Edit, Operand, explain_errors
from hookline.verbs.edit.patches import patch
from hookline.verbs.edit.rounding import round_to
from hookline.verbs.edit.routers import reroute

__all__ = [
    "add", "clamp", "noise", "patch", "project_out", "replace", "reroute", "round_to", "scale",
    "steer",
]  # fmt: skip


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
        StructureError: (when the function is called) the value is no tensor, its kind of
            dtype, such as integers, cannot hold `factor`, or `factor` does not broadcast to its
            shape.
    """
    operand = Operand(factor, "scale")
    # In this order torch does not round a tensor without dimensions first.
    return explain_errors("scale", lambda value: (value * operand.cast_like(value)).to(value.dtype))


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
        StructureError: (when the function is called) the value is no tensor, its kind of
            dtype, such as integers, cannot hold `offset`, or `offset` does not broadcast to its
            shape.
    """
    operand = Operand(offset, "add")
    return explain_errors("add", lambda value: (operand.cast_like(value) + value).to(value.dtype))


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
        StructureError: (when the function is called) the value is no tensor, its kind of
            dtype, such as integers, cannot hold `new`, or `new` has another shape.
    """
    operand = Operand(new, "replace")

    def change(tensor: Tensor) -> Tensor:
        operand.check_shape(tensor)
        other = torch.as_tensor(operand.cast_like(tensor), dtype=tensor.dtype, device=tensor.device)
        # A copy, because a later in-place layer cannot write to an expanded tensor.
        return other.expand_as(tensor).clone()

    return explain_errors("replace", change)


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
        AttachError: `std` is neither a real number nor a tensor of one element, or it is negative.
            Or `seed` is not an integer. (When the function is called) `vmap` forbids random draws.
        StructureError: (when the function is called) the value is no tensor, or its kind of dtype,
            such as integers, cannot hold `std`.
    """
    generators: dict[torch.device, torch.Generator] = {}
    lock = fork_safe_lock()
    operand = Operand(std, "noise")
    try:
        std = float(std)
    except (TypeError, ValueError, RuntimeError):  # complex, or several elements
        raise AttachError(
            "hl.edits.noise must be given a real number or a tensor of one element, got"
            f" {describe.in_full(std) if isinstance(std, Tensor) else repr(std)}."
            "\nGive one number: hl.edits.noise(0.1)."
        ) from None
    if std < 0:
        raise AttachError(
            f"the std of hl.edits.noise must not be negative, got {std}."
            "\nGive a standard deviation: hl.edits.noise(0.1)."
        )
    if seed is not None and not isinstance(seed, Integral):
        raise AttachError(
            f"seed must be an integer or None, got {seed!r}.\nWrite hl.edits.noise(0.1, seed=0)."
        )

    def draw(tensor: Tensor) -> Tensor:
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device)
            generator.seed() if seed is None else generator.manual_seed(seed)
        try:
            return torch.randn(
                tensor.shape,
                generator=repeatable_generator(generator),
                dtype=tensor.dtype,
                device=tensor.device,
            )
        except RuntimeError as error:
            if is_dynamo_compiling() or not is_in_transform():
                raise
            raise AttachError(
                f"hl.edits.noise cannot draw under this torch.func.vmap: {first_line(error)}"
                '\nWrite vmap(..., randomness="different") or "same". Or, where the model itself'
                " calls vmap, add noise that is drawn before: hl.edits.add(0.1 *"
                " torch.randn(n_features))."
            ) from error

    def change(tensor: Tensor) -> Tensor:
        operand.cast_like(tensor)
        if tensor.is_meta:  # a meta tensor has a shape and no numbers
            return tensor + std
        if is_dynamo_compiling():  # a graph holds no lock
            return tensor + std * draw(tensor)
        with lock:  # no other thread draws between a checkpoint's look at the generator and a draw
            drawn = draw(tensor)
        return tensor + std * drawn

    edit = explain_errors("noise", change)
    # By it each forward of a sweep begins again, as a new edit does.
    edit.fresh = lambda: noise(std, seed=seed)  # type: ignore[attr-defined]
    return edit


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
        StructureError: (when the function is called) the value is no tensor, its kind of
            dtype, such as integers, cannot hold a bound, or a bound does not broadcast to its
            shape.
    """
    if min is None and max is None:
        raise AttachError(
            "hl.edits.clamp must be given a bound, got none.\nGive a bound: hl.edits.clamp(min=0)."
        )
    low, high = (None if bound is None else Operand(bound, "clamp") for bound in (min, max))

    def by_numbers(value: Tensor) -> Tensor:
        # They bound a quantized value by what it stands for, whatever its dtype.
        if is_dynamo_compiling() or not value.is_quantized:
            for bound in (low, high):
                if bound is not None:
                    bound.check_dtype_and_broadcast(value)
        return torch.clamp(value, min, max)  # type: ignore[arg-type]  # no tensor is among them

    def by_tensors(value: Tensor) -> Tensor:
        def like(bound: Operand | None) -> Tensor | None:
            if bound is None:
                return None
            return torch.as_tensor(bound.cast_like(value), dtype=value.dtype, device=value.device)

        return torch.clamp(value, like(low), like(high))

    # torch.clamp takes two numbers or two tensors.
    takes_tensors = isinstance(min, Tensor) or isinstance(max, Tensor)
    return explain_errors("clamp", by_tensors if takes_tensors else by_numbers)
