"""Join a site's values of several passes and calls in one tensor.

A message never suggests what would fail: each way to join is tried on the shapes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hookline.engine.pytree import describe, leaves, tree
from hookline.errors import AmbiguousError, StructureError
from hookline.recordings.index import Lookup

_N_FORMS_SHOWN = 3
_LISTED = "dim=None) for a list of all values"


def stacked(asked: Lookup, passes: Sequence[Sequence[Any]]) -> Tensor:
    """One value of each pass, along a new first dimension.

    Args:
        asked: the key.
        passes: the values of each pass, call by call.

    Raises:
        AmbiguousError: several calls in a pass. StructureError: they are not tensors of one shape.
    """
    most = max(map(len, passes))
    if most > 1:
        raise AmbiguousError(
            f"{str(asked)!r} must have one call in each pass to be stacked, got {most} in a pass."
            f"\nWrite {way_to_join(asked, passes)}, or name one call, such as"
            f" {str(asked.of_call(0))!r}."
        )
    values = [calls[0] for calls in passes]
    shapes = _shapes(values)
    if shapes is None or len(shapes) > 1:
        raise StructureError(
            f"{str(asked)!r} must be a tensor of one shape in all passes to be stacked, got"
            f" {_forms(values)}.\nWrite {way_to_join(asked, passes)}."
        )
    return _joined(asked, values, None)


def concatenated(asked: Lookup, passes: Sequence[Sequence[Any]], dim: int) -> Tensor:
    """The values of all passes and calls, in order, along a dimension that they have.

    Args:
        asked: the key.
        passes: the values of each pass, call by call.
        dim: the dimension, in which their sizes may differ. Numbers (of no dimension) become a row.

    Raises:
        StructureError: they are not tensors, differ in another dimension, or have no such one.
    """
    values = [value for calls in passes for value in calls]
    shapes = _shapes(values)
    if shapes is not None and _fits(shapes, dim):
        return _joined(asked, values, dim if shapes[0] else None)
    if shapes is not None and not any(_has(shape, dim) for shape in shapes):
        wanted = f"dim must be a dimension of the values at {str(asked)!r}"
        got = f"dim={dim} for {_forms(values)}"
    else:
        wanted = f"the values at {str(asked)!r} must be tensors that differ in dimension {dim} only"
        got = _forms(values)
    raise StructureError(f"{wanted}, got {got}.\nWrite {way_to_join(asked, passes)}.")


def way_to_join(asked: Lookup, passes: Sequence[Sequence[Any]]) -> str:
    """The code that joins these values, and what it gives."""
    values = [value for calls in passes for value in calls]
    key = str(asked)
    shapes = _shapes(values)
    if shapes is not None:
        if len(values) == len(passes) and len(shapes) == 1:
            return f"run.stack({key!r}) for all"
        dim = next((dim for dim in range(max(len(shapes[0]), 1)) if _fits(shapes, dim)), None)
        if dim is not None:
            return f"run.cat({key!r}{f', dim={dim}' if dim else ''}) for all in one tensor"
    for leaf, _ in tree.tensors(values[0]):
        if not leaf:
            break
        if _all_have(values, leaf) and (
            (parts := _shapes([leaves.get(value, leaf, key) for value in values])) is not None
            and _fits(parts, 0)
        ):
            part = f"run.cat({asked.at(leaf)!r}) for one of its tensors"
            return f"{part}, or run.cat({key!r}, {_LISTED}"
    return f"run.cat({key!r}, {_LISTED}"


def _joined(asked: Lookup, values: list[Tensor], dim: int | None) -> Tensor:
    try:
        return torch.stack(values) if dim is None else torch.cat(values, dim)
    except RuntimeError as error:  # of several devices, or of layouts that torch cannot join
        raise StructureError(
            f"the values at {str(asked)!r} cannot be joined: {str(error).splitlines()[0]}"
            f"\nWrite run.cat({str(asked)!r}, {_LISTED}."
        ) from error


def _shapes(values: Sequence[Any]) -> list[tuple[int, ...]] | None:
    """The tensors' shapes, each once; None if one is no tensor, or has no shape."""
    try:
        return [*{tuple(value.shape) for value in values}] if _are_tensors(values) else None
    except RuntimeError:  # torch's older nested tensors
        return None


def _are_tensors(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _fits(shapes: list[tuple[int, ...]], dim: int) -> bool:
    """Whether tensors of these shapes can be concatenated along a dimension."""
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
