"""The things that a line can be attached to: a model, tensors by name, every module, or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn

from hookline.engine.selection.module_tree import ModuleTree, module_tree, tree_of_tensors
from hookline.errors import AttachError


@final
class Everywhere:
    """A stand-in for the modules of any model; `hl.EVERYWHERE` is the only instance."""

    def __repr__(self) -> str:
        return "hl.EVERYWHERE"


EVERYWHERE = Everywhere()

Ground = nn.Module | Mapping[str, Tensor]


def tree_of(ground: Any, name: str) -> ModuleTree:
    """Return the module tree of the object that a line is attached to.

    Args:
        ground: a model; tensors by name; `EVERYWHERE`, whose modules are not known beforehand; for
            `attach`, also None.
        name: the name of the verb.

    Raises:
        AttachError: `ground` is none of these.
    """
    if isinstance(ground, nn.Module):
        return module_tree(ground)
    if isinstance(ground, Everywhere):
        return ModuleTree("everywhere", [], [])
    if ground is None and name == "attach":
        return ModuleTree("tensors", [], [])
    if isinstance(ground, Mapping) and all(isinstance(t, Tensor) for t in ground.values()):
        return tree_of_tensors(ground)
    raise AttachError(
        f"{name} needs a model (an nn.Module), or tensors by name, got {type(ground).__name__}."
        "\nGive the model itself; for tensors: hl.attach({'a': a})."
    )
