"""Join a site's values of several passes in one tensor.

A message never suggests code that would fail: each way to join is checked against the shapes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.display.text import listed
from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import AmbiguousError, InputError, StructureError
from hookline.recordings.key_index import ParsedKey
from hookline.recordings.pass_log import Log, Read

_N_FORMS_SHOWN = 3
_LISTED = "dim=None) for a list of all values"


def stack_passes(log: Log, parsed_key: ParsedKey) -> Tensor:
    """Stack one value of each pass along a new first dimension.

    Raises:
        AmbiguousError: a pass has several calls.
        StructureError: the values are not tensors of one shape.
    """
    values = _one_value_per_pass(log, parsed_key, "stacked")
    shapes = _distinct_shapes(values)
    if shapes is None or len(shapes) > 1:
        raise StructureError(
            f"{str(parsed_key)!r} must be a tensor of one shape in all passes to be stacked, got"
            f" {_describe_values(values)}.\nWrite {suggest_join_code(log, parsed_key)}."
        )
    return _stack_or_cat(parsed_key, values, None)


def cat_passes(log: Log, parsed_key: ParsedKey, dim: int) -> Tensor:
    """Concatenate one value of each pass, in order. 0-d tensors become a 1-d tensor.

    Raises:
        AmbiguousError: a pass has several calls.
        InputError: `dim` is not an integer.
        StructureError: the values are not tensors, differ in another dimension, or lack `dim`.
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise InputError(
            f"dim must be the number of a dimension or None, got {dim!r}."
            f"\nWrite run.cat({str(parsed_key)!r}, dim=0)."
        )
    values = _one_value_per_pass(log, parsed_key, "concatenated", dim)
    shapes = _distinct_shapes(values)
    if shapes is not None and _can_concatenate(shapes, dim):
        return _stack_or_cat(parsed_key, values, dim if shapes[0] else None)
    if shapes is not None and not any(_has_dim(shape, dim) for shape in shapes):
        expected = f"dim must be a dimension of the values at {str(parsed_key)!r}"
        actual = f"dim={dim} for {_describe_values(values)}"
    else:
        expected = (
            f"the values at {str(parsed_key)!r} must be tensors that differ in dimension {dim} only"
        )
        actual = _describe_values(values)
    raise StructureError(f"{expected}, got {actual}.\nWrite {suggest_join_code(log, parsed_key)}.")


def suggest_join_code(
    log: Log, parsed_key: ParsedKey, read: Read | None = None, *, dim: int | None = None
) -> str:
    """Return the code that joins a site's values, with a description of its result.

    `read` returns an entry's value. `dim` is that of a failed call; it is suggested if it fits.
    """
    passes = log.values_by_pass(parsed_key, read)
    all_listed = f"run.cat({str(parsed_key)!r}, {_LISTED}"
    if any(len(calls) > 1 for calls in passes):
        first_call = log.key_of_first_call(parsed_key)
        code, is_part = _join_code(
            first_call, [calls[0] for calls in log.values_by_pass(first_call, read)], dim
        )
        result = "one tensor of one call" if is_part else "one call"
    else:
        code, is_part = _join_code(parsed_key, [calls[0] for calls in passes], dim)
        if code and not is_part:
            return f"{code} for all" + " in one tensor" * code.startswith("run.cat")
        result = "one of its tensors"
    return f"{code} for {result}, or {all_listed}" if code else all_listed


def _join_code(parsed_key: ParsedKey, values: Sequence[Any], dim: int | None) -> tuple[str, bool]:
    """Return the code that joins one value of each pass, and whether it joins a tensor within them.

    The code is empty if the values cannot be joined.
    """
    shapes = _distinct_shapes(values)
    if shapes is not None:
        if dim is None and len(shapes) == 1:
            return f"run.stack({str(parsed_key)!r})", False
        dims = [*([] if dim is None else [dim]), *range(max(len(shapes[0]), 1))]
        dim = next((dim for dim in dims if _can_concatenate(shapes, dim)), None)
        if dim is not None:
            return f"run.cat({str(parsed_key)!r}{f', dim={dim}' if dim else ''})", False
    for leaf, _ in tree.tensors(values[0]):
        if not leaf:
            break
        if _all_have_leaf(values, leaf) and (
            (
                parts := _distinct_shapes(
                    [leaves.get(value, leaf, str(parsed_key)) for value in values]
                )
            )
            is not None
            and _can_concatenate(parts, 0)
        ):
            return f"run.cat({parsed_key.key_of_leaf(leaf)!r})", True
    return "", False


def _one_value_per_pass(
    log: Log, parsed_key: ParsedKey, how: str, dim: int | None = None
) -> list[Any]:
    """Return the value of each pass.

    Several calls of one pass are refused: the rows would not match the rows of the inputs.
    """
    passes = log.values_by_pass(parsed_key)
    most = max(map(len, passes))
    if most > 1:
        raise AmbiguousError(
            f"{str(parsed_key)!r} must have one call in each pass to be {how}, got {most} in a"
            f" pass.\nWrite {suggest_join_code(log, parsed_key, dim=dim)}."
        )
    return [calls[0] for calls in passes]


def _stack_or_cat(parsed_key: ParsedKey, values: list[Tensor], dim: int | None) -> Tensor:
    try:
        return torch.stack(values) if dim is None else torch.cat(values, dim)
    except RuntimeError as error:  # several devices, or a layout that torch cannot join
        raise StructureError(
            f"the values at {str(parsed_key)!r} cannot be joined: {str(error).splitlines()[0]}"
            f"\nWrite run.cat({str(parsed_key)!r}, {_LISTED}."
        ) from error


def _distinct_shapes(values: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """Return the distinct shapes of tensors; None if a value has no shape, or no one shape."""
    if all(isinstance(value, Tensor) and not value.is_nested for value in values):
        return [*{tuple(value.shape) for value in values}]
    return None


def _can_concatenate(shapes: list[tuple[int, ...]], dim: int) -> bool:
    """Return whether tensors of these shapes can be concatenated along a dimension."""
    if not all(_has_dim(shape, dim) and len(shape) == len(shapes[0]) for shape in shapes):
        return False
    at = dim % max(len(shapes[0]), 1)
    return len({shape[:at] + shape[at + 1 :] for shape in shapes}) == 1


def _has_dim(shape: tuple[int, ...], dim: int) -> bool:
    n_dims = max(len(shape), 1)
    return -n_dims <= dim < n_dims


def _all_have_leaf(values: Sequence[Any], leaf: tree.Leaf) -> bool:
    return all(any(path == leaf for path, _ in tree.tensors(value)) for value in values)


def _describe_values(values: Sequence[Any]) -> str:
    forms = list(dict.fromkeys(map(describe.in_words, values)))
    return listed(forms, _N_FORMS_SHOWN)
