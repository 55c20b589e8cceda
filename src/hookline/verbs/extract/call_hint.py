"""Suggest what to give where a model does not take a batch: `inputs=`, or other data."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hookline.errors import HooklineError
from hookline.verbs.shared.run_model import binding_error, signature_of


@contextmanager
def explain_list_error(data: Any) -> Iterator[None]:
    """Add a note to an error of the model, if the data are a list, which may be of batches.

    Args:
        data: the data, as they were given.
    """
    try:
        yield
    except Exception as error:
        if type(data) is list and not isinstance(error, HooklineError):
            error.add_note(
                "hookline: a list holds items, which become the rows of batches."
                "\nIf it holds batches, give iter(data)."
            )
        raise


def suggest_inputs(model: nn.Module, data: Any, error: TypeError) -> None:
    """Add a note to the error of a call that forward's signature refuses, with a way that it takes.

    Args:
        model: the model.
        data: the batch: a tuple of arguments, a mapping of keyword arguments, or one argument.
        error: the error of the call.
    """
    signature = signature_of(model)
    if signature is None or binding_error(signature, data) is None:
        return  # the error is of the model's code
    for code, part in _parts_with_code(signature, data):
        if binding_error(signature, part) is None:
            error.add_note(
                "hookline: the model's forward does not take all of the batch."
                f"\nGive what it takes: inputs=lambda batch: {code}."
            )
            return


def _parts_with_code(signature: inspect.Signature, data: Any) -> Iterator[tuple[str, Any]]:
    """Yield parts of a batch, the largest first, each with the code that takes it of the batch."""
    if isinstance(data, tuple):
        for n in range(len(data) - 1, 1, -1):
            yield f"batch[:{n}]", data[:n]
        yield from (("batch[0]", part) for part in data[:1])
    elif isinstance(data, Mapping):
        keys = [key for key in data if key in signature.parameters]
        if keys:
            dict_code = f"{{key: batch[key] for key in {tuple(keys)!r}}}"
            yield dict_code, {key: data[key] for key in keys}
        for key, value in data.items():
            if isinstance(value, Tensor):
                yield f"batch[{key!r}]", value
                return
