"""Check numbers that the user logs, such as the loss of a training, and make curves of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hookline.curves.step_reports import StepReport
from hookline.engine import has_numbers
from hookline.engine.pytree import describe
from hookline.errors import InputError, NotRecordedError


class Logged(NamedTuple):
    """Hold one of the user's own numbers, by step."""

    steps: NDArray[np.int64]  # the numbers of the steps, int64, shape `(steps,)`, ascending
    values: NDArray[np.float64]  # the number at each of these steps, float64, shape `(steps,)`


class LoggedByName(dict[str, Logged]):
    """Hold the user's numbers by name, and explain a name that was not logged."""

    def __missing__(self, name: str) -> Logged:
        names = ", ".join(self) or "none; log one with seen.log(loss=loss)"
        raise NotRecordedError(
            f"{name!r} was not logged.\nUse one of the names that were: {names}."
        )


def logged_curves(reports: Iterable[StepReport]) -> dict[str, Logged]:
    """Return the user's numbers by name. The number that was logged last for a step counts."""
    by_name: dict[str, dict[int, float]] = {}
    for report in reports:
        for name, number in report.logged.items():
            by_name.setdefault(name, {})[report.step] = number
    return LoggedByName((name, _sorted_by_step(numbers)) for name, numbers in by_name.items())


def _sorted_by_step(number_by_step: dict[int, float]) -> Logged:
    steps = sorted(number_by_step)
    values = np.array([number_by_step[step] for step in steps], np.float64)
    return Logged(np.array(steps, np.int64), values)


def check_logged(numbers: Any, named: Mapping[str, Any]) -> dict[str, float | Tensor]:
    """Return numbers to log by name. A tensor on another device than the CPU stays a tensor.

    Raises:
        InputError: there are none, a name is no text, or a value is not a single real number.
    """
    if numbers is not None and not isinstance(numbers, Mapping):
        raise InputError(
            f"numbers must be a dict of names and numbers, got {describe.in_words(numbers)}."
            "\nName the number: seen.log(loss=loss)."
        )
    by_name = {**(numbers or {}), **named}
    if not by_name:
        raise InputError("seen.log must get a number, got none.\nCall seen.log(loss=loss).")
    for name in by_name:
        if not isinstance(name, str) or not name:
            raise InputError(
                f"a name of seen.log must be a text, got {name!r}.\nCall seen.log(loss=loss)."
            )
    return {name: _check_number(name, value) for name, value in by_name.items()}


def is_single_number(value: Any) -> bool:
    """Tell whether a value is a single real number, which `Curves.log` takes."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and has_numbers(value)
    if isinstance(value, np.ndarray):
        return value.size == 1 and value.dtype.kind in "iuf"
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_number(name: str, value: Any) -> float | Tensor:
    if not is_single_number(value):
        text = describe.in_full(value) if isinstance(value, Tensor) else describe.in_words(value)
        fix = f"{name}.mean()" if isinstance(value, Tensor) else f"float({name})"
        raise InputError(
            "a number of seen.log must be a number or a tensor of one element, got"
            f" {name}={text}.\nGive one number: seen.log({name}={fix})."
        )
    if isinstance(value, Tensor):
        return float(value.detach()) if value.is_cpu else value.detach().clone()
    try:
        return float(value.reshape(())) if isinstance(value, np.ndarray) else float(value)
    except OverflowError:
        raise InputError(
            f"a number of seen.log must fit into a float, got a larger {name}."
            f"\nLog its logarithm: seen.log({name}=math.log({name}))."
        ) from None
