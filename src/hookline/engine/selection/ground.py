"""The things that a line can be attached to: a model, tensors by name, every module, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from hookline.engine.pytree.describe import in_words
from hookline.engine.selection.module_tree import ModuleTree, module_tree, tree_of_tensors
from hookline.errors import AttachError


@final
class Everywhere:
    """A stand-in for the modules of any model; `hl.EVERYWHERE` is the only instance."""

    def __repr__(self) -> str:
        return "hl.EVERYWHERE"


EVERYWHERE = Everywhere()

Ground = nn.Module | Mapping[str, Tensor]

# The verbs that a tensor's gradient alone is enough for.
_TAKE_TENSORS = ("attach", "edit", "record")


def tree_of(ground: Any, name: str) -> ModuleTree:
    """Return the module tree of the object that a line is attached to.

    Args:
        ground: a model; `EVERYWHERE`, whose modules are not known beforehand; for `attach`, `edit`
            and `record`, tensors by name; for `attach`, also None.
        name: the name of the verb.

    Raises:
        AttachError: `ground` is none of these, or the verb takes no tensors by name.
    """
    if isinstance(ground, nn.Module):
        return module_tree(ground)
    if isinstance(ground, Everywhere):
        return ModuleTree("everywhere", [], [])
    if ground is None and name == "attach":
        return ModuleTree("tensors", [], [])
    takes_tensors, is_mapping = name in _TAKE_TENSORS, isinstance(ground, Mapping)
    are_tensors = is_mapping and all(isinstance(one, Tensor) for one in ground.values())
    if are_tensors and takes_tensors:
        return tree_of_tensors(ground)
    wanted, advice = "a model (an nn.Module)", "Give the model itself"
    if takes_tensors:
        wanted, advice = f"{wanted} or tensors by name", f"{advice}, or tensors: {{'a': a}}"
    elif are_tensors:
        advice += "; for the gradients of tensors, use hl.record, hl.edit or hl.attach"
    of_other = in_words(ground) if is_mapping else type(ground).__name__
    got = "tensors by name" if are_tensors else of_other
    raise AttachError(f"hl.{name} must be given {wanted}, got {got}.\n{advice}.")
