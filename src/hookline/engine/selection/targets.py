"""The targets of a line: a model, tensors by name, every module, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from hookline.engine.pytree.describe import in_words
from hookline.engine.selection.module_tree import (
    ModuleTree,
    module_tree,
    place_of_model,
    tree_of_tensors,
)
from hookline.errors import AttachError


@final
class Everywhere:
    """A stand-in for the modules of any model; `hl.EVERYWHERE` is the only instance."""

    def __repr__(self) -> str:
        return "hl.EVERYWHERE"


EVERYWHERE = Everywhere()

Target = nn.Module | Mapping[str, Tensor]

# The verbs that a tensor's gradient alone is enough for.
_TAKE_TENSORS = ("attach", "edit", "record")


def target_tree(target: Any, name: str) -> ModuleTree:
    """Return the module tree of a line's target.

    Args:
        target: a model, or its tree; `EVERYWHERE`, whose modules are not known beforehand; for
            `attach`, `edit` and `record`, tensors by name; for `attach`, also None.
        name: the name of the verb.

    Raises:
        AttachError: `target` is none of these, or the verb takes no tensors by name.
    """
    if isinstance(target, nn.Module):
        return module_tree(target)
    if isinstance(target, ModuleTree):
        return target
    if isinstance(target, Everywhere):
        return ModuleTree("everywhere", [])
    if target is None and name == "attach":
        return ModuleTree("tensors", [])
    takes_tensors, is_mapping = name in _TAKE_TENSORS, isinstance(target, Mapping)
    are_tensors = is_mapping and all(isinstance(value, Tensor) for value in target.values())
    if are_tensors and takes_tensors:
        return tree_of_tensors(target)
    allowed, fix = "a model (an nn.Module)", f"Give the model {place_of_model(target)}"
    if takes_tensors:
        allowed, fix = f"{allowed} or tensors by name", f"{fix}, or tensors: {{'a': a}}"
    elif are_tensors:
        fix += "; for the gradients of tensors, use hl.record, hl.edit or hl.attach"
    other = in_words(target) if is_mapping else type(target).__name__
    got = "tensors by name" if are_tensors else other
    raise AttachError(f"hl.{name} must be given {allowed}, got {got}.\n{fix}.")
