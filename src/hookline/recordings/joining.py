"""Join a site's values of several passes in one tensor.

A message never suggests code that would fail: each way to join is checked against the shapes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import AmbiguousError, StructureError
from hookline.recordings.index import Lookup
from hookline.recordings.log import Log, Read

_N_FORMS_SHOWN = 3
_LISTED = "dim=None) for a list of all values"


def stacked(log: Log, asked: Lookup) -> Tensor:
    """Stack one value of each pass along a new first dimension.

    Args:
        log: the recording's log.
        asked: the key.

    Raises:
        AmbiguousError: a pass has several calls.
        StructureError: the values are not tensors of one shape.
    """
    passes = log.by_pass(asked)
    _refuse_several_calls(log, asked, passes, "stacked")
    values = [calls[0] for calls in passes]
    shapes = _shapes(values)
    if shapes is None or len(shapes) > 1:
        raise StructureError(
            f"{str(asked)!r} must be a tensor of one shape in all passes to be stacked, got"
            f" {_forms(values)}.\nWrite {way_to_join(log, asked)}."
        )
    return _joined(asked, values, None)


def concatenated(log: Log, asked: Lookup, dim: int) -> Tensor:
    """Concatenate one value of each pass, in order, along an existing dimension.

    Args:
        log: the recording's log.
        asked: the key.
        dim: the dimension, along which the sizes may differ. 0-d tensors become a 1-d tensor.

    Raises:
        AmbiguousError: a pass has several calls.
        StructureError: the values are not tensors, differ in another dimension, or lack `dim`.
    """
    passes = log.by_pass(asked)
    _refuse_several_calls(log, asked, passes, "concatenated", dim)
    values = [calls[0] for calls in passes]
    shapes = _shapes(values)
    if shapes is not None and _fits(shapes, dim):
        return _joined(asked, values, dim if shapes[0] else None)
    if shapes is not None and not any(_has(shape, dim) for shape in shapes):
        wanted = f"dim must be a dimension of the values at {str(asked)!r}"
        got = f"dim={dim} for {_forms(values)}"
    else:
        wanted = f"the values at {str(asked)!r} must be tensors that differ in dimension {dim} only"
        got = _forms(values)
    raise StructureError(f"{wanted}, got {got}.\nWrite {way_to_join(log, asked)}.")


def way_to_join(
    log: Log, asked: Lookup, read: Read | None = None, *, dim: int | None = None
) -> str:
    """Return the code that joins a site's values, with a description of its result.

    Args:
        log: the recording's log.
        asked: the key.
        read: returns an entry's value, as in `Log.values`.
        dim: the dimension of the failed call, which is suggested if it fits.
    """
    passes = log.by_pass(asked, read)
    all_listed = f"run.cat({str(asked)!r}, {_LISTED}"
    if any(len(calls) > 1 for calls in passes):
        one = log.first_call(asked)
        code, is_part = _code(one, [calls[0] for calls in log.by_pass(one, read)], dim)
        what = "one tensor of one call" if is_part else "one call"
    else:
        code, is_part = _code(asked, [calls[0] for calls in passes], dim)
        if code and not is_part:
            return f"{code} for all" + " in one tensor" * code.startswith("run.cat")
        what = "one of its tensors"
    return f"{code} for {what}, or {all_listed}" if code else all_listed


def _code(asked: Lookup, values: Sequence[Any], dim: int | None) -> tuple[str, bool]:
    """Return the code that joins one value of each pass, or one tensor within each value.

    Returns:
        The code, empty if the values cannot be joined, and whether it joins a tensor within them.
    """
    shapes = _shapes(values)
    if shapes is not None:
        if dim is None and len(shapes) == 1:
            return f"run.stack({str(asked)!r})", False
        dims = [*([] if dim is None else [dim]), *range(max(len(shapes[0]), 1))]
        dim = next((dim for dim in dims if _fits(shapes, dim)), None)
        if dim is not None:
            return f"run.cat({str(asked)!r}{f', dim={dim}' if dim else ''})", False
    for leaf, _ in tree.tensors(values[0]):
        if not leaf:
            break
        if _all_have(values, leaf) and (
            (parts := _shapes([leaves.get(value, leaf, str(asked)) for value in values]))
            is not None
            and _fits(parts, 0)
        ):
            return f"run.cat({asked.at(leaf)!r})", True
    return "", False


def _refuse_several_calls(
    log: Log, asked: Lookup, passes: Sequence[Sequence[Any]], how: str, dim: int | None = None
) -> None:
    """Refuse to join the calls of one pass: the rows would not match the rows of the inputs.

    Raises:
        AmbiguousError: a pass has several calls.
    """
    most = max(map(len, passes))
    if most > 1:
        raise AmbiguousError(
            f"{str(asked)!r} must have one call in each pass to be {how}, got {most} in a pass."
            f"\nWrite {way_to_join(log, asked, dim=dim)}."
        )


def _joined(asked: Lookup, values: list[Tensor], dim: int | None) -> Tensor:
    try:
        return torch.stack(values) if dim is None else torch.cat(values, dim)
    except RuntimeError as error:  # several devices, or a layout that torch cannot join
        raise StructureError(
            f"the values at {str(asked)!r} cannot be joined: {str(error).splitlines()[0]}"
            f"\nWrite run.cat({str(asked)!r}, {_LISTED}."
        ) from error


def _shapes(values: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """Return the distinct shapes of tensors; None if a value has no shape."""
    try:
        return [*{tuple(value.shape) for value in values}] if _are_tensors(values) else None
    except RuntimeError:  # torch's older nested tensors
        return None


def _are_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _fits(shapes: list[tuple[int, ...]], dim: int) -> bool:
    """Return whether tensors of these shapes can be concatenated along a dimension."""
    if not all(_has(shape, dim) and len(shape) == len(shapes[0]) for shape in shapes):
        return False
    at = dim % max(len(shapes[0]), 1)
    return len({shape[:at] + shape[at + 1 :] for shape in shapes}) == 1


def _has(shape: tuple[int, ...], dim: int) -> bool:
    n_dims = max(len(shape), 1)
    return -n_dims <= dim < n_dims


def _all_have(values: Sequence[Any], leaf: tree.Leaf) -> bool:
    return all(any(one == leaf for one, _ in tree.tensors(value)) for value in values)


def _forms(values: Sequence[Any]) -> str:
    forms = list(dict.fromkeys(map(describe.in_words, values)))
    return ", ".join(forms[:_N_FORMS_SHOWN]) + ", …" * (len(forms) > _N_FORMS_SHOWN)
