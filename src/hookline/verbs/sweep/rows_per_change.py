"""Let several changes share a forward: each has its own rows of a repeated batch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from hookline.engine import has_numbers
from hookline.engine.pytree import tree
from hookline.verbs.sweep.site_change import SiteChange

# How far rounding moves a value when the batch has another size, in units of the dtype's own.
_ROUNDING, _MOST = 1000.0, 0.05
_LARGE = 1000.0  # times what values are, or a part of it: what rows get that others must not see
N_PERTURBED = 5  # batches in a row: the second is the inputs' own, others get other values


class NoRowsError(Exception):
    """A value cannot be cut into the rows of the changes that share a forward."""


def copy_tensors(value: Any) -> Any:
    """Copy the tensors of a value, because the model or a metric may write to them."""
    return tree.map_tensors(Tensor.clone, value)


def batch_size(inputs: Any) -> int | None:
    """Return the first size of the first tensor of the inputs; None if there is none."""
    if callable(inputs) and not isinstance(inputs, Tensor | Mapping | tuple):
        return None
    return next((tensor.shape[0] for _, tensor in tree.tensors(inputs) if tensor.dim()), None)


def repeat_inputs(inputs: Any, n: int) -> Any:
    """Return inputs whose batch stands n times in a row; tensors without the batch stay."""
    size = batch_size(inputs)

    def repeat(tensor: Tensor) -> Tensor:
        has_batch = tensor.dim() and tensor.shape[0] == size
        return torch.cat([tensor] * n) if has_batch else tensor

    return tree.map_tensors(repeat, inputs)


def repeated_dim(shape: torch.Size, form: torch.Size, n: int) -> int | None:
    """Return the dimension in which a shape is n times as long as a form; None for equal ones.

    Raises:
        NoRowsError: they differ in another way.
    """
    if shape == form:
        return None
    dims = [dim for dim, size in enumerate(form) if len(shape) == len(form) and shape[dim] != size]
    if len(dims) != 1:
        raise NoRowsError
    (dim,) = dims
    if not form[dim] or shape[dim] != form[dim] * n:
        raise NoRowsError
    return dim


def split_output(output: Any, one_batch: Any, n: int) -> list[Any]:
    """Cut the output of a forward that is shared, or shortened, into the outputs of each batch.

    What cannot be cut, such as a mean over the batch or a cache of keys and values, is
    `UnsplitOutput` in each of them.

    Args:
        output: the output.
        one_batch: the output for the batch alone.
        n: how often the batch was repeated.
    """
    if type(output) is not type(one_batch):
        return [UnsplitOutput()] * n
    if isinstance(output, Tensor):
        if n == 1 and output.shape == one_batch.shape:
            return [output]
        try:
            dim = _rows_dim(output, one_batch, n)
            return list(torch.split(output, one_batch.shape[dim], dim))
        except NoRowsError:
            return [output if _shares_memory(output, one_batch) else UnsplitOutput()] * n
    if isinstance(output, _CONTAINERS) or is_dataclass(output):
        return _split_container(output, one_batch, n)
    is_same = type(output) in tree.PLAIN_ATOMS and output == one_batch
    return [output if is_same else UnsplitOutput()] * n


def _split_container(output: Any, one_batch: Any, n: int) -> list[Any]:
    items, known = (list(tree.items(whole) or ()) for whole in (output, one_batch))
    if [key for key, _ in items] != [key for key, _ in known]:
        return [UnsplitOutput()] * n
    pairs = zip(items, known, strict=True)
    columns = [split_output(part, of_one, n) for (_, part), (_, of_one) in pairs]
    return [tree.rebuild(output, list(row)) for row in zip(*columns, strict=True)] or [output] * n


_CONTAINERS = (tuple, list, Mapping)


def _shares_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two outputs are one tensor, such as a buffer of the model."""
    return a.shape == b.shape and has_numbers(a) and a.data_ptr() == b.data_ptr()


def _raise_no_rows(*_: Any) -> Any:
    raise NoRowsError


@final
class UnsplitOutput:
    """Stand for a part of an output that has no rows; whatever reads it raises `NoRowsError`."""

    def __getattr__(self, name: str) -> Any:
        raise NoRowsError

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise NoRowsError

    __array__ = __call__ = __getitem__ = __iter__ = __len__ = _raise_no_rows
    __contains__ = __bool__ = __float__ = __int__ = __index__ = __abs__ = __neg__ = _raise_no_rows
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __pow__ = _raise_no_rows
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = _raise_no_rows
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _raise_no_rows
    __hash__ = None  # type: ignore[assignment]


def _rows_dim(value: Tensor, known: Tensor, n: int) -> int:
    """Return the dimension in which a value has n times the rows of the batch alone.

    Raises:
        NoRowsError: there is none.
    """
    dim = repeated_dim(value.shape, known.shape, n)
    if dim is None:
        raise NoRowsError
    return dim


def apply_changes_to_rows(
    value: Tensor, known: Tensor, changes: Sequence[SiteChange], n: int
) -> Tensor:
    """Apply each change to its own rows of a value.

    Args:
        value: the value of the repeated batch.
        known: the value of the batch alone.
        changes: the changes, at most n.
        n: how often the batch was repeated.

    Raises:
        NoRowsError: the rows are not n times the value of the batch alone.
    """
    dim = _rows_dim(value, known, n)
    new = value.clone()
    old, target = (
        torch.unflatten(tensor, dim, (n, known.shape[dim])).movedim(dim, 0)
        for tensor in (value, new)
    )
    are_equal = torch.equal(old, old[:1].expand_as(old))
    if not all(equal_up_to_rounding(row, known) for row in old[: 1 if are_equal else n]):
        raise NoRowsError
    target[: len(changes)] = _apply_changes(old[: len(changes)], changes, are_equal=are_equal)
    return new


def perturb_other_batches(value: Any, known: Any) -> Any:
    """Change the values of all batches but the second, whose rows may depend on others.

    Args:
        value: the value of the inputs `N_PERTURBED` times in a row.
        known: the value of the inputs alone.
    """
    if not (isinstance(value, Tensor) and isinstance(known, Tensor) and value.is_floating_point()):
        return value
    try:
        dim = _rows_dim(value, known, N_PERTURBED)
    except NoRowsError:
        return value
    rows = value.chunk(N_PERTURBED, dim)[1]
    return _surround_with_others([rows], known, dim) if equal_up_to_rounding(rows, known) else value


def drop_perturbed_batches(batches: Sequence[Any]) -> list[Any]:
    """Return the second of `N_PERTURBED` batches, and those of changes before the last two."""
    return [batches[1], *batches[3:-2]]


def _surround_with_others(batches: Sequence[Tensor], known: Tensor, dim: int) -> Tensor:
    """Return the rows of a batch, and those of changes, among others, large or small ones."""
    own, *changed = batches
    if not known.is_floating_point():
        return torch.cat([known, own, known, *changed, known, known], dim)
    # Of both signs, and more of one, so that neither a maximum nor a sum misses them.
    sizes = known.new_full(known.shape, _LARGE)
    sizes.view(-1)[2::3] = -_LARGE
    large = sizes * (known.abs() + 1)
    # Against each other, so that a product with one of both is large, and no sum is 0.
    return torch.cat([large, own, -large / 2, *changed, known / _LARGE, large], dim)


def append_changed_rows(
    value: Tensor,
    known: Tensor,
    changes: Sequence[SiteChange],
    n: int,
    size: int,
    *,
    perturbs: bool,
) -> Tensor:
    """Append rows to a value: for each change those of the batch alone, with this change.

    Args:
        value: the value of the batch, and of the rows that came to it so far.
        known: the value of the batch alone.
        changes: the changes.
        n: how many times the rows of the batch the value has.
        size: the size of the batch; with n = 1, the first dimension that has it is that of rows.
        perturbs: whether the batch is the second of `N_PERTURBED`, of which all others are changed:
            with n = 1 they come to it here, otherwise the value has them.

    Raises:
        NoRowsError: the rows are not n times the value of the batch alone.
    """
    if n == 1 and value.shape == known.shape and size in known.shape:
        dim = known.shape.index(size)
    else:
        dim = _rows_dim(value, known, n)
    old = known.expand(len(changes), *known.shape)
    new = _apply_changes(old, changes, are_equal=True).movedim(0, dim).flatten(dim, dim + 1)
    if not perturbs:
        return torch.cat([value, new], dim)
    batches, size = [value], known.shape[dim]
    if n > 1:
        batches = [
            value.narrow(dim, size, size),
            value.narrow(dim, 3 * size, (n - N_PERTURBED) * size),
        ]
    return _surround_with_others([*batches, new], known, dim)


def _apply_changes(rows: Tensor, changes: Sequence[SiteChange], *, are_equal: bool) -> Tensor:
    """Return rows with a change in each. Of equal rows, one alone is given to each function."""
    wholes: dict[int, Tensor] = {}
    keys = [id(change.change if are_equal else change) for change in changes]
    for number, (key, change) in enumerate(zip(keys, changes, strict=True)):
        if key not in wholes:
            wholes[key] = change.changed_value(rows[number])
    old = rows[:1] if are_equal else rows
    is_alone = len(wholes) == 1  # one is made where all rows get the same
    new = wholes[keys[0]][None] if is_alone else torch.stack([wholes[key] for key in keys])
    moved = (old != new) & ~(old.isnan() & new.isnan())
    places = _mask_of_parts([change.where for change in changes], rows.shape[1:])
    if places is not None:
        places = places.to(rows.device)
        new = torch.where(places[(..., *[None] * (rows.dim() - places.dim()))], new, old)
        moved = moved[..., None].flatten(places.dim()).any(-1) & places
    moved = moved.flatten(1).any(1).expand(len(rows))
    for change, has_moved in zip(changes, moved.tolist(), strict=True):
        change.count_call(has_moved=has_moved)
    return new.expand_as(rows)


def _mask_of_parts(parts: Sequence[tuple[slice, ...]], form: torch.Size) -> Tensor | None:
    """Return for each row which places of its first dimensions are in its part; None for all.

    Args:
        parts: for each row ranges of its first dimensions; all have as many.
        form: the shape of a row.
    """
    mask = np.ones(len(parts), dtype=bool)
    for dim, ranges in enumerate(zip(*parts, strict=True)):
        bounds = np.array([part.indices(form[dim])[:2] for part in ranges])
        places = np.arange(form[dim])
        is_in = (places >= bounds[:, :1]) & (places < bounds[:, 1:])
        mask = mask[..., None] & is_in.reshape(len(parts), *[1] * dim, form[dim])
    return torch.from_numpy(mask) if mask.ndim > 1 else None


def equal_up_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Tell whether two values of one shape differ by no more than rounding."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    gap, size = (float(torch.linalg.vector_norm(t.float())) for t in (a - b, b))
    return not gap > batching_tolerance(a.dtype) * max(size, sys.float_info.min)


def batching_tolerance(dtype: torch.dtype) -> float:
    """Return the relative difference that batching may make in a dtype."""
    return min(torch.finfo(dtype).eps * _ROUNDING, _MOST)
