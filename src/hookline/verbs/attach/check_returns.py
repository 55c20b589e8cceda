"""Check the values that raw hooks return.

torch uses every result but None as the new value. A stray `True` would become the layer's output,
and the list that a pre-hook returns would become one argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.engine.pytree import describe, tree
from hookline.errors import StructureError


def check_forward_output(result: Any, values: tuple[Any, ...]) -> Any:
    """Return the result of a forward hook, if it can be an output.

    Raises:
        StructureError: the output held tensors, and the result holds none.
    """
    output = values[-1]
    if not _has_tensor(result) and _has_tensor(output):
        raise StructureError(
            f"the hook must return an output with tensors, got {_as_text(result)} in place of"
            f" {describe.in_words(output)}.\nReturn the new output, or None to leave it as it is."
        )
    return result


def check_pre_hook_args(result: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that a forward-pre hook has returned, as a tuple.

    Raises:
        StructureError: it returned a list; or the arguments held tensors, and its result none.
    """
    args = values[1]
    took_list = len(args) == 1 and isinstance(args[0], list)
    # A new list is a mistake for a tuple; torch would pass the list as one argument.
    if isinstance(result, list) and not took_list:
        raise StructureError(
            f"the pre-hook must return a tuple, got {_as_text(result)}, which would become one"
            " argument."
            "\nReturn a tuple of arguments, a single argument, or None."
        )
    new: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    if not _has_tensor(new) and _has_tensor(args):
        raise StructureError(
            f"the pre-hook must return arguments with tensors, got {_as_text(result)} in place of"
            f" {describe.in_words(args)}."
            "\nReturn a tuple of arguments, a single argument, or None to leave them as they are."
        )
    return new


def check_pre_hook_args_kwargs(result: Any, values: tuple[Any, ...]) -> Any:
    """Return the result of a forward-pre hook that takes keyword arguments, too.

    Raises:
        StructureError: it is not (args, kwargs).
    """
    if not _is_args_kwargs(result):
        raise StructureError(
            f"the pre-hook (with_kwargs) must return (args, kwargs), got {_as_text(result)}."
            "\nReturn (args, kwargs), a tuple and a dict, or None to leave them as they are."
        )
    return result


def check_gradient(result: Any, grad: Tensor, where: str) -> Tensor:
    """Return the gradient that a hook returned, if it can replace the hook's argument.

    Raises:
        StructureError: the result is not a tensor of the same shape, dtype and device.
    """
    difference = describe.difference(grad, result)
    if difference:
        raise StructureError(
            f"the hook at {where} must return a gradient of the same form: {difference}."
            "\nReturn a gradient of the same shape, dtype and device, or None to leave it as it is."
        )
    return result  # type: ignore[no-any-return]


def check_backward(result: Any, old: Any) -> Any:
    """Return a backward hook's gradients in torch's form, if they can replace the module's.

    A single tensor and a list become tuples.

    Raises:
        StructureError: the gradients have another structure, shape, dtype or device.
    """
    if isinstance(old, tuple) and isinstance(result, Tensor):
        result = (result,)
    elif isinstance(old, tuple) and isinstance(result, list):
        result = tuple(result)
    difference = describe.difference(old, result)
    if difference:
        raise StructureError(
            f"the backward hook must return the form of {describe.in_words(old)}: {difference}."
            "\nReturn gradients of the same form, with None where there was None; or None for all"
            " to leave them as they are."
        )
    return result


def make_none_check(hook: str, instead: str) -> Callable[[Any, tuple[Any, ...]], Any]:
    """Return the check for hooks whose result torch ignores or refuses."""

    def check(result: Any, values: tuple[Any, ...]) -> Any:
        raise StructureError(
            f"{hook} must return None, got {_as_text(result)}, which would be ignored."
            f"\nReturn None; to have an effect, {instead} in place."
        )

    return check


def check_step_pre(result: Any, values: tuple[Any, ...]) -> Any:
    """Check the arguments that a hook before an optimizer's step returns.

    Raises:
        StructureError: they are not a tuple that begins with the optimizer, and a dict.
    """
    if not _is_args_kwargs(result):
        raise StructureError(
            f"line.step_pre must return (args, kwargs), got {_as_text(result)}.\nReturn a tuple"
            " and a dict for the step, or None to leave its arguments as they are."
        )
    optimizer, args = values[0], result[0]
    if not args or args[0] is not optimizer:
        raise StructureError(
            "line.step_pre must return args that begin with the optimizer, got"
            f" {describe.in_words(args)}."
            "\nReturn ((optimizer, *others), kwargs), or None to leave the arguments as they are."
        )
    return result


def check_optimizer_state(result: Any, values: tuple[Any, ...]) -> Any:
    """Check the state dict that a hook on an optimizer returns.

    Raises:
        StructureError: it is not a dict.
    """
    if not isinstance(result, dict):
        raise StructureError(
            f"the hook on the optimizer's state dict must return a dict, got {_as_text(result)}."
            "\nReturn a state dict, or None to leave it as it is."
        )
    return result


def make_registration_check(kind: str, expected: type) -> Callable[[Any, tuple[Any, ...]], Any]:
    """Return the check for the value that a registration hook returns."""

    def check(result: Any, values: tuple[Any, ...]) -> Any:
        if not isinstance(result, expected):
            raise StructureError(
                f"the hook must return a {expected.__name__} to be registered as the {kind}"
                f" {values[1]!r}, got {_as_text(result)}."
                f"\nReturn a {expected.__name__}, or None to leave it as it is."
            )
        return result

    return check


def _is_args_kwargs(result: Any) -> bool:
    is_pair = isinstance(result, tuple) and len(result) == 2
    return is_pair and isinstance(result[0], tuple) and isinstance(result[1], dict)


def _has_tensor(value: Any) -> bool:
    return next(tree.tensors(value), None) is not None


def _as_text(value: Any) -> str:
    return repr(value) if isinstance(value, str) else describe.in_words(value)
