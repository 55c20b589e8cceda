"""Call a user's metric, and refuse one that gives no number or reads nothing of the output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline.engine import has_numbers
from hookline.engine.pytree import describe, tree
from hookline.errors import InputError
from hookline.verbs.sweep.agreement import is_same_number

Metric = Callable[[Any], Any]

_FIX = "Give a function of the model's output such as lambda out: out.logits[0, -1, 7]."


def require_metric_function(metric: Any) -> None:
    """Refuse a metric that is not a function."""
    if not callable(metric):
        raise InputError(
            f"metric must be a function of the model's output, got {describe.in_words(metric)}."
            f"\n{_FIX}"
        )


def metric_number(metric: Metric, output: Any) -> float:
    """Return the metric of an output as a number.

    Raises:
        InputError: the metric returned something else than one real number.
    """
    value = metric(output)
    is_meta = isinstance(value, Tensor) and not has_numbers(value)
    is_tensor = isinstance(value, Tensor | np.ndarray | np.generic) and not is_meta
    number = value.item() if is_tensor and math.prod(value.shape) == 1 else value
    if not isinstance(number, int | float):
        raise InputError(f"metric must return one number, got {describe.in_words(value)}.\n{_FIX}")
    return float(number)


def refuse_constant_metric(metric: Metric, output: Any, number: float) -> None:
    """Refuse a metric that gives the same number for other outputs.

    Raises:
        InputError: the metric is the same, or NaN, for the negated and for the reversed output,
            whose sizes are those of the output; or the output is empty.
    """
    sizes = [tensor.numel() for _, tensor in tree.tensors(output)]
    if sizes and not any(sizes):
        raise InputError(
            "the model must return numbers, got an output without elements."
            "\nGive inputs of one row or more."
        )
    if any(_metric_changes(metric, output, change, number) for change in (_negated, _reversed)):
        return
    if math.isnan(number):
        raise InputError(
            "metric must return a number for the unchanged run, got nan, and nan for other outputs."
            f"\n{_FIX}"
        )
    raise InputError(
        "metric must depend on what the model returns, got a function that returns"
        f" {number:.4g} for other outputs, too, and so needs no changed value.\n{_FIX}"
    )


def _negated(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype is torch.bool else -1 - tensor


def _reversed(tensor: Tensor) -> Tensor:
    """Reverse the elements, so that the largest is at another place."""
    return tensor.flatten().flip(0).reshape(tensor.shape) * 2


def _metric_changes(
    metric: Metric, output: Any, change: Callable[[Tensor], Tensor], number: float
) -> bool:
    try:
        other = metric_number(metric, tree.map_tensors(change, output))
    except Exception:  # it looks at the output, or the output cannot be changed like this
        return True
    return not is_same_number(other, number)
