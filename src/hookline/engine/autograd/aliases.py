"""Aliases of a call's inputs and outputs, whose gradients belong to that call alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.display.text import name_without_torch
from hookline.engine.pytree import tree
from hookline.engine.pytree.identity_map import IdentityMap
from hookline.errors import AttachError

Call = tuple[int, int]  # a running call: the ids of its frame and of its module

# The aliases of leaves that calls got, by id; with the call, to which its own alias is no leaf.
_calls: dict[int, tuple[weakref.ref[Tensor], Call]] = {}


def must_be_aliased(tensor: Tensor, call: Call | None) -> bool:
    """Tell whether a call must alias a tensor: a leaf, or the alias of one that another call got.

    Without the second, a module inside another would get its leaf's gradient by whether the other
    has hooks.
    """
    if tensor.is_leaf:
        return True
    entry = _calls.get(id(tensor)) if call is not None and _calls else None
    return entry is not None and entry[1] != call


def register_leaf_alias(alias: Tensor, call: Call) -> None:
    """Note the alias of a leaf, as long as it lives."""
    number = id(alias)
    _calls[number] = weakref.ref(alias, partial(_forget_alias, number)), call


def _forget_alias(alias_id: int, _: Any) -> None:
    _calls.pop(alias_id, None)


def alias_leaves(value: Any) -> Any:
    """Alias the leaves of an output: a returned parameter, or an input that is passed on.

    A leaf outlives the pass. A hook on the leaf itself would outlive the pass, too, and would see
    the gradients of all its other uses.
    """
    leaves = [tensor for tensor in aliasable_tensors(value, tuples_only=False) if tensor.is_leaf]
    return tree.replace_tensors(value, make_aliases(leaves), tuples_only=False) if leaves else value


def alias_lasting_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], call: Call | None = None, *, leaves_only: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Alias the arguments that outlive the pass: leaves, or at the beginning of the pass, all.

    A hook on a tensor that several passes share would see the gradients of all of them.

    Args:
        args: the arguments without a name.
        kwargs: the arguments by name.
        call: the call; None where nothing outside of it is known, as in code being compiled.
        leaves_only: whether to alias leaves alone.

    Returns:
        The new (args, kwargs); None if there was nothing to alias.
    """
    candidates = aliasable_tensors((*args, *kwargs.values()), tuples_only=True)
    lasting = [tensor for tensor in candidates if not leaves_only or must_be_aliased(tensor, call)]
    if not lasting:
        return None
    new = [tensor.view_as(tensor) for tensor in lasting]
    if call is not None:
        for alias in new:
            register_leaf_alias(alias, call)
    return replace_in_arguments(args, kwargs, alias_map(lasting, new))


def replace_in_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], new: IdentityMap[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace tensors in arguments, also inside tuples."""
    return (
        tuple(tree.replace_tensors(value, new, tuples_only=True) for value in args),
        {
            name: tree.replace_tensors(value, new, tuples_only=True)
            for name, value in kwargs.items()
        },
    )


def make_aliases(tensors: list[Tensor]) -> IdentityMap[Tensor]:
    """Make an alias of each tensor."""
    return alias_map(tensors, [tensor.view_as(tensor) for tensor in tensors])


def alias_map(tensors: Sequence[Tensor], aliases: Sequence[Tensor]) -> IdentityMap[Tensor]:
    """Map tensors to their aliases."""
    new: IdentityMap[Tensor] = IdentityMap()
    for tensor, alias in zip(tensors, aliases, strict=True):
        new[tensor] = alias
    return new


def aliasable_tensors(value: Any, *, tuples_only: bool) -> list[Tensor]:
    """Return each tensor through which a gradient can flow, once."""
    if not torch.is_grad_enabled():
        return []
    tensors: list[Tensor] = []
    for tensor in _tensors_in_containers(
        value, tuples_only
    ):  # dynamo inlines a comprehension as a call
        if tensor.requires_grad and can_be_aliased(tensor):
            tensors.append(tensor)
    return tensors if len(tensors) < 2 else alias_map(tensors, tensors).key_list()


def can_be_aliased(tensor: Tensor) -> bool:
    """Tell whether torch can alias a tensor: not sparse tensors, nor strided nested tensors."""
    return tensor.layout is torch.jagged or (
        tensor.layout is torch.strided and not tensor.is_nested
    )


def refuse_unaliasable(name: str, values: tuple[Any, ...]) -> None:
    """Refuse inputs of a module that torch cannot alias.

    Raises:
        AttachError: an input cannot be aliased.
    """
    for tensor in _tensors_in_containers(values, tuples_only=True):
        if torch.is_grad_enabled() and tensor.requires_grad and not can_be_aliased(tensor):
            kind = "nested" if tensor.is_nested else name_without_torch(tensor.layout)
            raise AttachError(
                f"{name} takes a {kind} tensor, of which torch makes no alias, so a raw backward"
                " hook cannot be given its gradient."
                f"\nUse line.backward_pre, or record '{name}:grad_output'."
            )


def _tensors_in_containers(value: Any, tuples_only: bool) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, tuple) or (not tuples_only and tree.is_container(value)):
        for _, part in tree.items(value) or ():
            if isinstance(part, Tensor):
                tensors.append(part)
            else:
                tensors += _tensors_in_containers(part, tuples_only)
    return tensors
