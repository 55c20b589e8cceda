"""Suggest `inputs=` where a model's forward does not take a whole batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

Given = tuple[tuple[Any, ...], Mapping[str, Any]]


def note_inputs(model: nn.Module, data: Any, error: TypeError) -> None:
    """Add a note to the error of a call that forward's signature refuses, with a way that it takes.

    Args:
        model: the model.
        data: the batch: a tuple of arguments, a mapping of keyword arguments, or one argument.
        error: the error of the call.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # a forward that is not a Python function
        return
    given: Given = ((data,), {})
    if isinstance(data, tuple):
        given = (data, {})
    elif isinstance(data, Mapping):
        given = ((), data)
    if _is_taken(signature, given):
        return  # the error is of the model's code
    for code, candidate in _candidates(signature, data):
        if _is_taken(signature, candidate):
            error.add_note(
                "hookline: the model's forward does not take all of the batch."
                f"\nGive what it takes: inputs=lambda batch: {code}."
            )
            return


def _is_taken(signature: inspect.Signature, given: Given) -> bool:
    try:
        signature.bind(*given[0], **given[1])
    except TypeError:
        return False
    return True


def _candidates(signature: inspect.Signature, data: Any) -> Iterator[tuple[str, Given]]:
    """Yield parts of a batch as code, largest first, each with the arguments that it gives."""
    if isinstance(data, tuple):
        for n in range(len(data) - 1, 1, -1):
            yield f"batch[:{n}]", (data[:n], {})
        yield "batch[0]", (data[:1], {})
    elif isinstance(data, Mapping):
        keys = [key for key in data if key in signature.parameters]
        if keys:
            dict_code = f"{{key: batch[key] for key in {tuple(keys)!r}}}"
            yield dict_code, ((), {key: data[key] for key in keys})
        for key, value in data.items():
            if isinstance(value, Tensor):
                yield f"batch[{key!r}]", ((value,), {})
                return
