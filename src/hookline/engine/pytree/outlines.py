"""Outlines: the structure of a value, with numbered slots in place of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hookline.engine.pytree import tree
from hookline.engine.pytree.identity_map import IdentityMap


class Slot(int):
    """A tensor's number, which stands for the tensor in an outline."""


def outline(value: Any, slot_of: Callable[[Tensor], int | None]) -> Any:
    """Return a value's structure, with a `Slot` for each numbered tensor and None for other values.

    `fill` puts numbered values back. A value that cannot be rebuilt becomes None. So does a place
    in which a value contains itself.
    """
    return _outline(value, slot_of, IdentityMap())


def _outline(value: Any, slot_of: Callable[[Tensor], int | None], forms: IdentityMap[Any]) -> Any:
    if isinstance(value, Tensor):
        slot = slot_of(value)
        return None if slot is None else Slot(slot)
    if type(value) in tree.PLAIN_ATOMS:
        return None
    if value in forms:
        return forms.get(value)
    parts = tree.items(value)
    if parts is None:
        return None
    forms[value] = None
    try:
        inner = [_outline(part, slot_of, forms) for _, part in parts]
        form = tree.rebuild(value, inner, exact=False)
    except Exception:  # an object that cannot be copied
        form = None
    forms[value] = form
    return form


def fill(form: Any, values: Mapping[int, Any]) -> Any:
    """Fill the slots of an outline; slots without a value become None."""
    if isinstance(form, Slot):
        return values.get(form)
    parts = tree.items(form)
    if parts is None:
        return None
    return tree.rebuild(form, [fill(part, values) for _, part in parts], exact=False)
