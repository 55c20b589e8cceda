"""The modules of a model, each once, with all its paths. Imports torch_internals.

Linear in the number of paths; wrapper prefixes are left out, shared modules carry their aliases,
and a module that holds itself does not hang the walk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from hookline.engine.torch_internals import children, unwrap


@dataclass(slots=True, eq=False)
class Node:
    """One module of a model: its first path, its place in registration order, its other paths."""

    path: str
    module: nn.Module
    index: int
    aliases: list[str] = field(default_factory=list)
    parent: Node | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """All paths of the module, the first one first."""
        return (self.path, *self.aliases)


def walk(model: nn.Module) -> list[Node]:
    """Every module of a model, in registration order, the root first."""
    nodes: dict[int, Node] = {}  # by id: a module may define == and lose its hash
    _visit(model, "", None, nodes, set(), set())
    return list(nodes.values())


def _visit(
    module: nn.Module,
    path: str,
    parent: Node | None,
    nodes: dict[int, Node],
    above: set[int],
    bare: set[type],
) -> None:
    # `bare` are the types known not to be wrappers: asking each type once halves the walk.
    kind = type(module)
    if kind not in bare:
        inner_module = unwrap(module)
        if inner_module is module:
            bare.add(kind)
        module = inner_module
    key = id(module)
    node = nodes.get(key)
    if node is None:
        node = nodes[key] = Node(path, module, len(nodes), parent=parent)
    elif key in above:
        return
    else:
        node.aliases.append(path)
    inner = children(module)
    if inner:
        above.add(key)
        prefix = f"{path}." if path else ""
        for name, child in inner.items():
            if child is not None:
                _visit(child, prefix + name, node, nodes, above, bare)
        above.discard(key)
