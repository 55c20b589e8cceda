"""Checks of the values that raw hooks return.

torch takes any return but None for the new value: a stray `True` becomes the layer's output, and a
pre-hook's list becomes one argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hookline.engine.pytree import describe, tree
from hookline.errors import StructureError


def check_forward(result: Any, values: tuple[Any, ...]) -> Any:
    """The result of a forward hook, if it can be an output.

    Raises:
        StructureError: the output held tensors, and the result holds none.
    """
    output = values[-1]
    if not _has_tensor(result) and _has_tensor(output):
        raise StructureError(
            f"the hook returned {_show(result)}, which would become the output in place of"
            f" {describe.in_words(output)}.\nReturn the new output, or None to leave it as it is."
        )
    return result


def check_forward_pre(with_kwargs: bool) -> Callable[[Any, tuple[Any, ...]], Any]:
    """The check for the results of a forward-pre hook."""
    return _check_args_kwargs if with_kwargs else _check_args


def _check_args(result: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    args = values[1]
    took_list = len(args) == 1 and isinstance(args[0], list)
    # A list where there was none is a mistake for a tuple; torch would pass it as one argument.
    if isinstance(result, list) and not took_list:
        raise StructureError(
            f"the pre-hook returned {_show(result)}, which would become one argument."
            "\nReturn a tuple of arguments, a single argument, or None."
        )
    new: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)
    if not _has_tensor(new) and _has_tensor(args):
        raise StructureError(
            f"the pre-hook returned {_show(result)} in place of {describe.in_words(args)}."
            "\nReturn a tuple of arguments, a single argument, or None to leave them as they are."
        )
    return new


def _check_args_kwargs(result: Any, values: tuple[Any, ...]) -> Any:
    is_pair = isinstance(result, tuple) and len(result) == 2
    if not (is_pair and isinstance(result[0], tuple) and isinstance(result[1], dict)):
        raise StructureError(
            f"the pre-hook (with_kwargs) returned {_show(result)}."
            "\nReturn (args, kwargs), a tuple and a dict, or None to leave them as they are."
        )
    return result


def check_gradient(result: Any, grad: Tensor, where: str) -> Tensor:
    """Check that a hook's gradient can take the place of the one it got.

    Raises:
        StructureError: it is no tensor of the same shape, dtype and device.
    """
    found = describe.difference(grad, result)
    if found:
        raise StructureError(
            f"the hook at {where} must return a gradient of the same form: {found}."
            "\nReturn a gradient of the same form, or None to leave it as it is."
        )
    return result  # type: ignore[no-any-return]


def check_backward(result: Any, old: Any) -> Any:
    """Check a backward hook's gradients, and give them the form of the module's; wrap a single one.

    Raises:
        StructureError: it is not of their structure, shapes, dtypes and devices.
    """
    if isinstance(old, tuple) and isinstance(result, Tensor):
        result = (result,)
    elif isinstance(old, tuple) and isinstance(result, list):
        result = tuple(result)
    found = describe.difference(old, result)
    if found:
        raise StructureError(
            f"the backward hook must return the form of {describe.in_words(old)}: {found}."
            "\nReturn gradients of the same form, with None where there was None; or None for all"
            " to leave them as they are."
        )
    return result


def check_nothing(who: str, instead: str) -> Callable[[Any, tuple[Any, ...]], Any]:
    """The check for hooks whose result torch ignores or refuses."""

    def check(result: Any, values: tuple[Any, ...]) -> Any:
        raise StructureError(
            f"{who} returned {_show(result)}, which would be ignored."
            f"\nReturn None; to have an effect, {instead} in place."
        )

    return check


def check_step(result: Any, values: tuple[Any, ...]) -> Any:
    """Check the arguments that a hook before an optimizer's step returns."""
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise StructureError(
            f"line.step_pre returned {_show(result)}.\nReturn (args, kwargs) for the step, a tuple"
            " and a dict, or None to leave them as they are."
        )
    return result


def check_optimizer_state(result: Any, values: tuple[Any, ...]) -> Any:
    """Check the state dict that a hook on an optimizer returns."""
    if not isinstance(result, dict):
        raise StructureError(
            f"the hook on the optimizer's state dict returned {_show(result)}."
            "\nReturn a state dict, or None to leave it as it is."
        )
    return result


def check_registered(kind: str, wanted: type) -> Callable[[Any, tuple[Any, ...]], Any]:
    """The check for what is to be registered instead of a parameter, buffer or module."""

    def check(result: Any, values: tuple[Any, ...]) -> Any:
        if not isinstance(result, wanted):
            raise StructureError(
                f"the hook returned {_show(result)} to be registered as the {kind}"
                f" {values[1]!r}.\nReturn a {wanted.__name__}, or None to leave it as it is."
            )
        return result

    return check


def _has_tensor(value: Any) -> bool:
    return next(tree.tensors(value), None) is not None


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) else describe.in_words(value)
